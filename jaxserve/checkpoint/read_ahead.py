"""Files read into the system's cache before they are asked for, so that the disk works while arrays go to their devices."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_USUAL_STEP = 128 << 10  # bytes: what Linux reads ahead where nobody has changed it


@contextmanager
def reading_ahead(folders: Sequence[Path], num_ahead: int) -> Iterator[Callable[[], None]]:
    """Has the files of some folders read, in the folders' order, while the body goes through them in the same order.

    Whoever reads several folders at once, all of the same size, has read all of them at about the same time; then the disk
    would wait until their contents have been worked on. Without `posix_fadvise` nothing is read ahead.

    Args:
        num_ahead: so many folders are read before the first one is done, then one more after each that is done.

    Yields:
        What must be called after each folder that is done.
    """
    room, stopped = threading.Semaphore(num_ahead), threading.Event()

    def advise() -> None:
        for folder in folders:
            room.acquire()
            if stopped.is_set():
                return
            for path in sorted(folder.rglob("*")):
                if stopped.is_set():
                    return
                with suppress(OSError):  # a file that cannot be read is told by whoever needs what is in it
                    _advise(path, stopped)

    thread = threading.Thread(target=advise, name="jaxserve-read-ahead", daemon=True)
    if hasattr(os, "posix_fadvise"):
        thread.start()
    try:
        yield room.release
    finally:
        stopped.set()
        room.release()
        if thread.ident is not None:
            thread.join()


def _advise(path: Path, stopped: threading.Event) -> None:
    if not path.is_file():
        return
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        step = _step(status.st_dev)
        for start in range(0, status.st_size, step):
            if stopped.is_set():
                return
            os.posix_fadvise(file.fileno(), start, step, os.POSIX_FADV_WILLNEED)


def _step(device: int) -> int:
    """Bytes that may be asked for at a time: of more the system would read the first ones alone, without a word."""
    try:
        kilobytes = int(Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text())
    except (OSError, ValueError):  # a file system of several devices, or of none
        return _USUAL_STEP
    return max(kilobytes << 10, _USUAL_STEP)
