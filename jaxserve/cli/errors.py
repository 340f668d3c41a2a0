"""Failures that a user can do something about become one line on stderr and a non-zero exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@contextmanager
def reported_errors(verbose: int, failure_file: Path | None = None) -> Iterator[None]:
    """Runs a command's body; a failure with a message for people ends the program with that line.

    Errors that no class below foresees are bugs: they keep their traceback. With -v, all errors do.

    Args:
        failure_file: where the line, or what a traceback would end with, is written for whoever started this program.
    """
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`). What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_FAILURE) from None
    except Exception as error:
        message = describe(error)
        if failure_file is not None:
            failure_file.write_text(message or f"{type(error).__name__}: {one_line(str(error))}")
        if message is None:
            raise
        if verbose:
            traceback.print_exc()
        print(f"jaxserve: error: {message}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILURE) from None


def describe(error: Exception) -> str | None:
    """One line for an error that a user can act on; None for one that points to a bug."""
    if isinstance(error, OSError) and error.errno is not None:
        reason = error.strerror or os.strerror(error.errno)
        return one_line(f"{reason}: {error.filename}" if error.filename is not None else reason)
    # A plain RuntimeError is raised with a message for people; its subclasses come from jax and others.
    if isinstance(error, ValueError | MemoryError) or type(error) is RuntimeError or is_ours(error):
        return one_line(str(error)) or type(error).__name__
    return None


def is_ours(error: Exception) -> bool:
    """Whether jaxserve declared the class: then the message was written for people."""
    return type(error).__module__.split(".")[0] == "jaxserve"


def one_line(text: str) -> str:
    return " ".join(text.split())
