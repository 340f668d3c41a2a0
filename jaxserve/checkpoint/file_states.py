"""Whether files are still what they were when work with them began, told by what the file system notes of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxserve.checkpoint.errors import CheckpointError

_State = tuple[int, int, int, int, int]  # device, inode, bytes, times of the last change in nanoseconds


class FileStates:
    """How the files of a model were before the first of them was read."""

    def __init__(self, source: Path) -> None:
        """
        Args:
            source: a file, or a folder with files; whatever else there is, or is not, has no state.
        """
        paths = source.iterdir() if source.is_dir() else (source,)
        self._states = {path: _state(path) for path in paths}

    def check(self, files: Iterable[Path]) -> None:
        """Raises CheckpointError if one of the files is another now, or was written to, or is gone."""
        for path in files:
            state = _state(path)
            if state is None or state != self._states.get(path):
                raise CheckpointError(
                    f"{path} changed while it was converted: wait until nothing writes there, and convert again"
                )

    @contextlib.contextmanager
    def explain(self, files: Iterable[Path]) -> Iterator[None]:
        """What goes wrong in the body comes of a change, where there was one, and that is told then."""
        try:
            yield
        except (OSError, CheckpointError):
            self.check(files)
            raise


def _state(path: Path) -> _State | None:
    """Of what a link leads to; None: there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    # The second time is the system's own: whoever writes to a file can set the first one back, as `cp --preserve` does.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
