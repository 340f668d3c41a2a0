"""Where fetched and converted models are kept: one folder a user, shared by all processes."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from jaxserve.checkpoint.atomic import disk_message, remove_leftovers
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.manifest import FORMAT_VERSION, is_converted
from jaxserve.progress import Progress


def cache_home() -> Path:
    """`JAXSERVE_HOME`, by default `~/.cache/jaxserve`. It need not exist."""
    return Path(os.environ.get("JAXSERVE_HOME") or Path.home() / ".cache" / "jaxserve").expanduser().absolute()


def cached_model(name: str, fingerprint: str, make: Callable[[Path], None], progress: Progress) -> Path:
    """The cache's folder for a model, made when it is not there.

    Two processes that ask at once make it once: the second waits for the first.

    Args:
        name: for people who look into the cache.
        fingerprint: of what the model is made from; another one is another folder.
        make: is given the folder to make, which it must do as a whole or not at all.
    """
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"
    folder = cache_home() / "models" / f"{readable}-{fingerprint[:12]}-v{FORMAT_VERSION}"
    if not is_converted(folder):
        with locked(folder, progress):
            if not is_converted(folder):
                remove_leftovers(folder)
                make(folder)
    return folder


@contextmanager
def locked(target: Path, progress: Progress) -> Iterator[None]:
    """Hold the right to make `target`; waits while another process has it. A process that dies gives it up."""
    lock = filelock.FileLock(target.parent / f".{target.name}.lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            with progress.task(f"Waiting for another process that makes {target.name}", None, "B"):
                lock.acquire()
    except OSError as error:
        raise CheckpointError(disk_message(error, target)) from error
    try:
        yield
    finally:
        lock.release()


def fingerprint_of(path: Path) -> str:
    """Of a local model: its files' names, sizes and times. Reading gigabytes at every start would take too long."""
    root = path.resolve()
    files = [root] if root.is_file() else sorted(file for file in root.iterdir() if file.is_file())
    digest = hashlib.sha256(str(root).encode())
    for file in files:
        status = file.stat()
        digest.update(f"\0{file.name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()
