"""Entry points of the command line: argument parsing only."""
