"""`python -m jaxserve`: the same as the `jaxserve` command."""

from jaxserve.cli.main import main

if __name__ == "__main__":
    main()
