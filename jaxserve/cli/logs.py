"""Logging of the commands: warnings by default, more with -v, all of it on stderr; the access log on stdout."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TextIO

# They speak at INFO of what only their own developers need.
CHATTY_LIBRARIES = ("absl", "asyncio", "etils", "filelock", "httpcore", "httpx", "jax", "orbax")


_TO_LINE_START_AND_ERASE = "\r\x1b[2K"


def configure_logging(verbose: int, *, shown: Sequence[str] = (), over_bars: bool = False) -> None:
    """Call it before jax is imported: XLA reads its log level then.

    Args:
        verbose: 0: warnings; 1: what jaxserve does as well; 2 and more: everything, libraries included.
        shown: loggers whose INFO is meant for every user of the command.
        over_bars: a message takes the line of a progress bar that is being drawn, maybe by another process.
    """
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    pattern = (
        "jaxserve: %(levelname)s: %(message)s" if verbose == 0 else "%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    line_start = _line_start(sys.stderr) if over_bars else ""
    logging.basicConfig(level=level, format=line_start + pattern, stream=sys.stderr, force=True)
    for name in CHATTY_LIBRARIES:
        logging.getLogger(name).setLevel(logging.DEBUG if verbose >= 2 else logging.WARNING)
    for name in shown:
        logging.getLogger(name).setLevel(min(level, logging.INFO))
    if verbose < 2:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA: errors only


def configure_access_log(*, enabled: bool) -> None:
    """The server's access log: lines of their own on stdout, whatever -v says, and nothing else there.

    On a terminal a line takes that of a progress bar, if one is being drawn.
    """
    logger = logging.getLogger("jaxserve.access")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler(sys.stdout) if enabled else logging.NullHandler()
    handler.setFormatter(logging.Formatter(_line_start(sys.stdout) + "%(message)s"))
    logger.handlers = [handler]


def _line_start(stream: TextIO) -> str:
    """What a line begins with: on a terminal, an unfinished progress bar goes, and is drawn anew below the line."""
    is_dumb = os.environ.get("TERM", "dumb") == "dumb"
    return _TO_LINE_START_AND_ERASE if stream.isatty() and not is_dumb else ""
