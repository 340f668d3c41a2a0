"""A server process around a scripted engine: `python -m tests.server.fake_server JSON`, JSON as in `Options`."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from jaxserve.config import ServerConfig
from jaxserve.protocol.service import OpenAIService
from jaxserve.server import lifecycle
from tests.fakes import FakeEngine, endless, fake_service


@dataclass(frozen=True)
class Options:
    """What the process is to go through.

    Attributes:
        port: 0 for any free one.
        load: "at once", "never" or "fail".
        fail_after: tokens after which the engine fails.
        failing_engines: how many engines, from the first on, do so.
        server: further fields of the server's config.
        stuck: the engine does not come back when it is told to stop; it gets a second for that.
        busy: a thread that Python waits for at its end never does.
    """

    port: int = 0
    load: str = "at once"
    shutdown_timeout: float = 30.0
    token_delay: float = 0.02
    fail_after: int | None = None
    failing_engines: int = 1000
    stuck: bool = False
    busy: bool = False
    max_model_len: int = 1_000_000
    server: dict[str, Any] = field(default_factory=dict)


def load(options: Options, number: int) -> OpenAIService:
    """The service, for the `number`-th time from 0."""
    if options.load == "never":
        threading.Event().wait()
    if options.load == "fail":
        raise RuntimeError("the checkpoint is corrupt: fetch it again")
    fail_after = options.fail_after if number < options.failing_engines else None
    engine = FakeEngine(
        endless, token_delay=options.token_delay, fail_after=fail_after, max_model_len=options.max_model_len
    )
    if options.stuck:
        lifecycle._STOP_SECONDS = 1.0
        engine.shutdown = threading.Event().wait  # type: ignore[assignment]
    if options.busy:
        ThreadPoolExecutor(1, thread_name_prefix="jaxserve-busy").submit(threading.Event().wait)
    return fake_service(engine)


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    options = Options(**json.loads(sys.argv[1]))
    config = ServerConfig(port=options.port, shutdown_timeout=options.shutdown_timeout, **options.server)
    numbers = itertools.count()
    try:
        sys.exit(lifecycle.run(lambda: load(options, next(numbers)), config))
    except RuntimeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
