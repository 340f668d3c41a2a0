"""What is on its way: a folder beside the destination, which a later conversion can go on with after a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from jaxserve.checkpoint.atomic import disk_message, flush, flush_folder, partial_path, remove, remove_after_failure
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.manifest import WEIGHTS_FOLDER, ArrayInfo, file_sizes
from jaxserve.checkpoint.tokenizer_files import error_line, read_json
from jaxserve.json_fields import from_json

logger = logging.getLogger(__name__)

_STATE_FILE = "conversion.json"
_LOCK_FILE = "conversion.lock"


class UnfinishedFolder:
    """Where a conversion writes. It is renamed when it is whole.

    Attributes:
        path: of the folder.
        weights: the folder in it that each piece gets a folder in.
        finished: pieces that are written, flushed, and were told so, with their arrays.
    """

    def __init__(self, path: Path, origin: Mapping[str, Any]) -> None:
        """Takes over what an earlier run of the same conversion finished, and drops what that was at.

        Args:
            origin: what is converted, and how: hashes of its files, dtype, quantization; JSON's types only.

        Raises:
            CheckpointError: if the earlier run had another origin, or what it left is not readable, or elsewhere.
        """
        self.path, self.weights = path, path / WEIGHTS_FOLDER
        self.finished: dict[str, dict[str, ArrayInfo]] = {}
        self._files: dict[str, dict[str, int]] = {}  # sizes of each finished piece's
        self._origin = dict(origin)
        _refuse_link(self.weights)
        self.weights.mkdir(exist_ok=True)
        if (path / _STATE_FILE).exists():
            self._take_over(read_json(path / _STATE_FILE, "convert without --resume"))
        for entry in list(self.weights.iterdir()):
            if entry.name not in self.finished:
                remove(entry)
        self._write_state()

    def _take_over(self, earlier: Mapping[str, Any]) -> None:
        """Pieces whose files are no longer as they were written are not finished."""
        if earlier.get("origin") != self._origin:
            raise CheckpointError(
                f"{self.path} is an unfinished conversion of another model or with other options: remove it, or convert "
                "without --resume"
            )
        folders = {entry.name for entry in self.weights.iterdir() if entry.is_dir() and not entry.is_symlink()}
        try:
            for piece, arrays in earlier["finished"].items():
                files = earlier["files"][piece]
                if piece in folders and file_sizes(self.weights / piece) == files:
                    self.finished[piece] = {name: from_json(ArrayInfo, info) for name, info in arrays.items()}
                    self._files[piece] = files
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path / _STATE_FILE} is damaged ({error_line(error)}): convert without --resume"
            ) from error

    def add_finished(self, piece: str, arrays: dict[str, ArrayInfo]) -> None:
        """Note that a piece is written, so that it is not written again."""
        flush(self.weights / piece)
        self.finished[piece], self._files[piece] = arrays, file_sizes(self.weights / piece)
        self._write_state()

    def forget(self, piece: str) -> None:
        """Remove a finished piece, so that it is written again."""
        del self.finished[piece], self._files[piece]
        self._write_state()
        remove(self.weights / piece)

    def written_files(self) -> dict[str, int]:
        """Path and size of each file that will be there in the end, but for the manifest."""
        return {name: size for name, size in file_sizes(self.path).items() if name not in (_STATE_FILE, _LOCK_FILE)}

    def _write_state(self) -> None:
        state = self.path / _STATE_FILE
        aside = state.with_suffix(".new")
        finished = {
            piece: {name: dataclasses.asdict(info) for name, info in arrays.items()}
            for piece, arrays in self.finished.items()
        }
        written = {"origin": self._origin, "finished": finished, "files": self._files}
        aside.write_text(json.dumps(written), encoding="utf-8")
        flush(aside)
        aside.replace(state)
        flush_folder(self.path)


@contextlib.contextmanager
def unfinished_folder(destination: Path, origin: Mapping[str, Any], *, resume: bool) -> Iterator[UnfinishedFolder]:
    """A folder to convert into; when the body ends, it gets the destination's name.

    Args:
        origin: see `UnfinishedFolder`.
        resume: go on with what an earlier run left, and leave what is finished if this one fails. Otherwise an earlier
            run's folder is cleared, and this one's is removed if it fails; a kill leaves it in either case.

    Raises:
        CheckpointError: if another process is at it, the destination exists, or the file system refuses.
    """
    path = unfinished_path(destination)
    with _partial_folder(path, destination, keep=resume):
        if not resume and _clear(path):
            logger.warning("%s: starting over what an earlier run left unfinished (--resume goes on with it)", path)
        yield UnfinishedFolder(path, origin)


@contextlib.contextmanager
def partial_folder(destination: Path, maker: str) -> Iterator[Path]:
    """An empty folder beside the destination, whose name it gets when the body ends; if that fails, it is removed.

    A kill leaves it, and the next process that makes the same destination clears it.

    Args:
        maker: what writes there, such as "export"; another one has a folder of its own.

    Raises:
        CheckpointError: if another process is at it, the destination exists, or the file system refuses.
    """
    path = partial_path(destination, maker)
    with _partial_folder(path, destination, keep=False):
        _clear(path)
        yield path


@contextlib.contextmanager
def _partial_folder(path: Path, destination: Path, *, keep: bool) -> Iterator[None]:
    """Holds the right to write there. What lies there is the caller's business, until the folder is renamed or removed."""
    _refuse_link(path)
    lock = filelock.FileLock(path / _LOCK_FILE, timeout=0)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout as error:
        raise CheckpointError(f"another process is making {destination}: wait for it") from error
    except OSError as error:
        raise CheckpointError(disk_message(error, destination)) from error
    try:
        yield
        _finish(path, destination)
    except BaseException as error:
        if not keep:
            remove_after_failure(path)
        if isinstance(error, OSError):
            raise CheckpointError(disk_message(error, destination)) from error
        raise
    finally:
        lock.release()


def unfinished_path(destination: Path) -> Path:
    return partial_path(destination, "convert")


def _refuse_link(path: Path) -> None:
    """What is not finished is removed, and that may be nothing that lies elsewhere."""
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link, and conversion removes what is in that folder: remove the link")


def _clear(path: Path) -> bool:
    """Whether there was anything to remove."""
    left = [entry for entry in path.iterdir() if entry.name != _LOCK_FILE]
    for entry in left:
        remove(entry)
    return bool(left)


def _finish(path: Path, destination: Path) -> None:
    remove(path / _STATE_FILE)
    flush(path)
    if destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination} exists: remove it or choose another folder")
    try:
        path.rename(destination)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise CheckpointError(f"{destination} exists: remove it or choose another folder") from error
        raise
    flush_folder(destination.parent)
    remove(destination / _LOCK_FILE)
