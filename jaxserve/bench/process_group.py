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
# Its input ends when the process that started it does, however that ends; then the group in $1 has $2 seconds to end.
_GUARD = """
read -r _
kill -s TERM -- "-$1"
left=$2
while [ "$left" -gt 0 ] && kill -s 0 -- "-$1"; do sleep 1; left=$((left - 1)); done
kill -s KILL -- "-$1"
"""


def run_in_group(
    command: Sequence[str],
    *,
    environment: dict[str, str],
    timeout: float | None = None,
    stdout: IO[Any] | int | None = None,
) -> int:
    """Runs a command in a session of its own, and ends what is left of it when the command ends, when time is up, and when
    this process is interrupted, told to end, or killed: signals of the terminal do not reach that session.

    Returns:
        Its exit code; negative: the signal that ended it.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    with (
        _ended_by_signals(),
        subprocess.Popen(command, env=environment, stdout=stdout, start_new_session=True) as process,
        _ended_with_this_process(process.pid),
    ):
        try:
            return process.wait(timeout)
        finally:
            _end(process)


@contextmanager
def _ended_with_this_process(group: int) -> Iterator[None]:
    """A process beside the group ends it when this one was killed, and can do nothing any more."""
    arguments = ["/bin/sh", "-c", _GUARD, "guard", str(group), str(round(GRACE_SECONDS))]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as guard:
        try:
            yield
        finally:
            guard.kill()  # before its input ends


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
