"""Files and folders that are whole or not there: made aside in the same file system, renamed last."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tokenizer_files import error_line
from jaxserve.checkpoint.trusted_files import require_utf8

logger = logging.getLogger(__name__)

_SUFFIX = ".partial"


@contextmanager
def made_aside(destination: Path) -> Iterator[Path]:
    """A path beside `destination` to make a file or folder at; on success it gets the destination's name, else it goes.

    Raises:
        FileExistsError: if the destination came into being meanwhile (by another process).
        CheckpointError: if the file system refuses (no space, no permission).
    """
    aside = destination.parent / f".{destination.name}.{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
    try:
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            yield aside
            flush(aside)
            if destination.is_dir() or (aside.is_dir() and destination.exists()):
                raise FileExistsError(errno.EEXIST, "is there already", str(destination))
            aside.rename(destination)
            flush_folder(destination.parent)
        except OSError as error:
            if isinstance(error, FileExistsError) or error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(errno.EEXIST, "is there already", str(destination)) from error
            raise CheckpointError(disk_message(error, destination)) from error
    finally:
        remove_after_failure(aside)


def require_free_name(destination: Path, source: Path) -> None:
    """Raises CheckpointError if a folder is there already, or would lie in the one that it is made from.

    Also if one of the two has a name that weights cannot be read from or written to.
    """
    require_utf8(source)
    require_utf8(destination)
    _require_short_name(destination)
    if destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination} exists: remove it or choose another folder")
    if source.resolve() in destination.resolve().parents:
        raise CheckpointError(f"{destination} lies inside {source}, which is only read: choose another folder")


def partial_path(destination: Path, maker: str) -> Path:
    """Where `maker` ("convert", "export") writes what gets the destination's name in the end."""
    return destination.parent / f".{destination.name}.{maker}{_SUFFIX}"


def _require_short_name(destination: Path) -> None:
    """Raises CheckpointError if the file system takes no such names; the folder need not be there yet."""
    path = partial_path(destination.absolute(), "convert")  # longer than the destination's
    existing = next(parent for parent in path.parents if os.path.exists(parent))
    for tried in (path, *(existing / name for name in path.relative_to(existing).parts)):
        try:
            os.lstat(tried)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise CheckpointError(f"too long a name, choose a shorter one: {destination}") from error


def remove_leftovers(destination: Path) -> None:
    """Remove what killed processes left beside `destination`. Call it only while no other process can be making it."""
    for leftover in destination.parent.glob(f".{destination.name}.*{_SUFFIX}"):
        remove(leftover)


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_after_failure(path: Path) -> None:
    """As `remove`, where something has gone wrong that matters more than what is left: that is told, and nothing raised."""
    try:
        remove(path)
    except OSError as error:
        logger.warning("%s is left, and may be removed (%s)", path, error_line(error))


def require_space(folder: Path, num_bytes: int, what: str) -> None:
    """Raises CheckpointError if the file system of `folder` (which need not be there yet) has less room than that."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise CheckpointError(
            f"no space for {what}: {existing} has {free / 1e6:.0f} MB free and {num_bytes / 1e6:.0f} MB are needed; "
            "free some, or set JAXSERVE_HOME to a folder on a larger disk"
        )


def disk_message(error: OSError, path: Path) -> str:
    """One line with the remedy, for an error of the file system."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left while writing {path}: free some, or set JAXSERVE_HOME to a folder on a larger disk"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"cannot write {path} ({error_line(error)}): set JAXSERVE_HOME to a folder that you may write to"
    return f"cannot write {path}: {error_line(error)}"


def flush(path: Path) -> None:
    """A file, or all of a folder, to the disk: before the rename that makes it count."""
    if not path.is_dir():
        _flush_file(path)
        return
    for folder, _, files in os.walk(path):
        for name in files:
            _flush_file(Path(folder, name))
        flush_folder(Path(folder))


def _flush_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """A folder's list of names, to the disk."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
