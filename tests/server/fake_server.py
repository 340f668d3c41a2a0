"""A server process around a scripted engine: `python -m tests.server.fake_server JSON`, JSON as in `Options`."""

from __future__ import annotations

import json
import logging
import sys
import threading
from dataclasses import dataclass

from jaxserve.config import ServerConfig
from jaxserve.protocol.service import OpenAIService
from jaxserve.server.lifecycle import run
from tests.fakes import FakeEngine, endless, fake_service


@dataclass(frozen=True)
class Options:
    """Attributes: port: 0 for any. load: "at once", "never", "fail". fail_after: tokens until the engine fails."""

    port: int = 0
    load: str = "at once"
    shutdown_timeout: float = 30.0
    token_delay: float = 0.02
    fail_after: int | None = None


def load(options: Options) -> OpenAIService:
    if options.load == "never":
        threading.Event().wait()
    if options.load == "fail":
        raise RuntimeError("the checkpoint is corrupt: fetch it again")
    return fake_service(
        FakeEngine(endless, token_delay=options.token_delay, fail_after=options.fail_after, max_model_len=1_000_000)
    )


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    options = Options(**json.loads(sys.argv[1]))
    config = ServerConfig(port=options.port, shutdown_timeout=options.shutdown_timeout)
    try:
        sys.exit(run(lambda: load(options), config))
    except RuntimeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
