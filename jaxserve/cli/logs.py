"""Logging of the commands: warnings by default, more with -v, all of it on stderr; the access log on stdout."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

# They speak at INFO of what only their own developers need.
CHATTY_LIBRARIES = ("absl", "asyncio", "etils", "filelock", "httpcore", "httpx", "jax", "orbax")


def configure_logging(verbose: int, *, shown: Sequence[str] = ()) -> None:
    """Call it before jax is imported: XLA reads its log level then.

    Args:
        verbose: 0: warnings; 1: what jaxserve does as well; 2 and more: everything, libraries included.
        shown: loggers whose INFO is meant for every user of the command.
    """
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    pattern = (
        "jaxserve: %(levelname)s: %(message)s" if verbose == 0 else "%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.basicConfig(level=level, format=pattern, stream=sys.stderr, force=True)
    for name in CHATTY_LIBRARIES:
        logging.getLogger(name).setLevel(logging.DEBUG if verbose >= 2 else logging.WARNING)
    for name in shown:
        logging.getLogger(name).setLevel(min(level, logging.INFO))
    if verbose < 2:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA: errors only


def configure_access_log(*, enabled: bool) -> None:
    """The server's access log: lines of their own on stdout, whatever -v says, and nothing else there."""
    logger = logging.getLogger("jaxserve.access")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler(sys.stdout) if enabled else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers = [handler]
