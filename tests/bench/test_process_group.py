"""Commands that start processes of their own: none is left, however the command ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxserve.bench import process_group
from jaxserve.bench.process_group import run_in_group

# Starts a process that ignores SIGTERM if told so, notes its id, and waits for it.
PARENT = """
import pathlib, subprocess, sys
child = "import signal, time; signal.signal(signal.SIGTERM, signal.{}); print(flush=True); time.sleep(60)"
with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE) as process:
    process.stdout.readline()
    note = pathlib.Path(sys.argv[1])
    note.with_suffix(".new").write_text(str(process.pid))
    note.with_suffix(".new").rename(note)
    {}
"""


def command(note: Path, handler: str = "SIG_DFL", then: str = "process.wait()") -> list[str]:
    return [sys.executable, "-c", PARENT.format(handler, then), str(note)]


def wait_for(note: Path) -> int:
    deadline = time.monotonic() + 30
    while not note.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return int(note.read_text())


def assert_ended(pid: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":  # nobody has asked for its exit code yet
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} is left")


@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN"])
def test_time_that_is_up_ends_all_of_it(handler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "GRACE_SECONDS", 0.3)
    with pytest.raises(subprocess.TimeoutExpired):
        run_in_group(command(tmp_path / "pid", handler), environment=dict(os.environ), timeout=3)
    assert_ended(wait_for(tmp_path / "pid"))


def test_a_command_that_dies_leaves_nothing(tmp_path: Path) -> None:
    assert run_in_group(command(tmp_path / "pid", then="import os; os._exit(3)"), environment=dict(os.environ)) == 3
    assert_ended(wait_for(tmp_path / "pid"))


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)]
)
def test_an_interruption_ends_all_of_it(number: int, error: type[BaseException], tmp_path: Path) -> None:
    """Ctrl-C reaches the terminal's own group only."""

    def interrupt() -> None:
        wait_for(tmp_path / "pid")
        os.kill(os.getpid(), number)

    # A shell starts what it runs in the background with SIGINT ignored, these tests too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(error):
            run_in_group(command(tmp_path / "pid"), environment=dict(os.environ), timeout=40)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert_ended(wait_for(tmp_path / "pid"))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN"])
def test_a_process_that_is_killed_leaves_nothing(handler: str, tmp_path: Path) -> None:
    """As by the kernel when memory runs out: it can end nobody any more."""
    program = "import os, sys; from jaxserve.bench import process_group\n"
    program += "process_group.GRACE_SECONDS = 1\n"
    program += "process_group.run_in_group(sys.argv[1:], environment=dict(os.environ))"
    with subprocess.Popen([sys.executable, "-c", program, *command(tmp_path / "pid", handler)]) as process:
        child = wait_for(tmp_path / "pid")
        process.kill()
    assert_ended(child)
