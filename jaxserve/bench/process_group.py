"""A command together with all processes that it starts: none of them outlives it, and keeps a device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any

GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS = 0.05


def run_in_group(
    command: Sequence[str],
    *,
    environment: dict[str, str],
    timeout: float | None = None,
    stdout: IO[Any] | int | None = None,
) -> int:
    """Runs a command in a session of its own, and ends what is left of it when the command ends, when time is up, and when
    this process is interrupted or told to end: signals of the terminal do not reach that session.

    Returns:
        Its exit code; negative: the signal that ended it.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    with (
        _ended_by_signals(),
        subprocess.Popen(command, env=environment, stdout=stdout, start_new_session=True) as process,
    ):
        try:
            return process.wait(timeout)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while _signal(process, 0) and time.monotonic() < deadline:
            process.poll()  # else it stays a member of the group when it has ended
            time.sleep(_POLL_SECONDS)
    finally:  # also where one does not want to wait for it
        _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Sends it to the whole group; returns whether that still is."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit here, so that they end the group too."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # handlers belong to the main thread
        return
    before = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in before.items():
        if handler == signal.SIG_DFL:  # `nohup` ignores SIGHUP
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler == signal.SIG_DFL:
                signal.signal(number, handler)
