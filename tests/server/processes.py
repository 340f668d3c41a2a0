"""Starting a server as a process, and finding out where it listens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
_LISTENING = re.compile(r"listening on (https?\S*://\S+)")


class ServerProcess:
    """A running server. What it writes to stderr is kept in a file, and is part of every failure's message."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def url(self, seconds: float = 60.0) -> str:
        """Where it listens, once it does."""
        deadline = time.monotonic() + seconds
        while (found := _LISTENING.search(self.log)) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server does not listen:\n{self.log}")
            time.sleep(0.02)
        return found[1]

    def wait_ready(self, seconds: float = 120.0) -> str:
        """Where it listens, once it is healthy."""
        url = self.url(seconds)
        deadline = time.monotonic() + seconds
        while httpx.get(f"{url}/health").status_code != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server does not get ready:\n{self.log}")
            time.sleep(0.05)
        return url

    def exit_code(self, seconds: float = 20.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server does not exit:\n{self.log}") from None


@contextmanager
def server_process(arguments: list[str], log: Path) -> Iterator[ServerProcess]:
    """Runs `python ARGUMENTS` from the checkout; it is killed at the end if it still runs.

    Programs are kept as users' are, and not in jax's own cache: servers of the same sizes need not even trace them.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    environment["JAXSERVE_HOME"] = str(Path(environment.pop("JAX_COMPILATION_CACHE_DIR")) / "of-servers")
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, stderr=output)
    try:
        yield ServerProcess(process, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
