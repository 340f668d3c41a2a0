"""Files of a model's folder, by names that other files of it give: none may lead out of the folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tokenizer_files import error_line, read_json


def checked_file(folder: Path, name: str) -> Path:
    """A file inside a folder, by the name that some other file gives it.

    Links may lead anywhere inside the folder, or inside the repository's root of a Hugging Face Hub cache (where
    `snapshots/REVISION/FILE` is a link to `blobs/HASH`), and nowhere else.

    Raises:
        CheckpointError: for a name that leaves the folder, or a file that is not there or no plain file (a pipe would
            never end). Nothing is opened.
    """
    if not name.isprintable() or Path(name).is_absolute() or len(Path(name).parts) != 1 or name in ("", ".", ".."):
        raise CheckpointError(f"{folder}: refuses the file name {name!r}: it must be a plain name inside the folder")
    path = folder / name
    try:
        if not path.exists():
            raise CheckpointError(f"{folder}: {name} is missing: fetch the checkpoint again")
        if not path.resolve().is_relative_to(_allowed_root(folder)):
            raise CheckpointError(f"{folder}: refuses {name}: it is a link that leaves the folder")
        if not path.is_file():
            raise CheckpointError(f"{folder}: refuses {name}: it is no plain file")
    except OSError as error:  # such as a name that is too long
        raise CheckpointError(f"{folder}: cannot open {name!r}: {error_line(error)}") from error
    return path


def require_utf8(path: Path) -> None:
    """Raises CheckpointError if a path, or what it leads to, has bytes that are no text.

    Linux allows any; the libraries that read and write weights do not, and tell of it late and in words of their own.
    """
    for each in (path.absolute(), path.resolve()):
        try:
            str(each).encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(f"the name {str(each)!r} is not UTF-8: rename it, or choose another one") from error


def has_entry(folder: Path, name: str) -> bool:
    """Whether a folder has something of that name: also a link to what is not there (as where fetching stopped half-way).

    What is only looked at when it exists would be left out without a word; `checked_file` tells of it.
    """
    return os.path.lexists(folder / name)


def _allowed_root(folder: Path) -> Path:
    resolved = folder.resolve()
    repository = resolved.parent.parent
    if resolved.parent.name == "snapshots" and (repository / "blobs").is_dir():
        return repository
    return resolved


def index_counts(folder: Path, index_file: str, single_file: str) -> bool:
    """Whether a folder's weights are the files of its index: a single file beside them counts alone, as in transformers.

    An index may also name that file; then it counts.

    Raises:
        CheckpointError: if both are there and the index is damaged.
    """
    if not has_entry(folder, index_file) or not has_entry(folder, single_file):
        return has_entry(folder, index_file)
    return single_file in index_of_files(folder, index_file).values()


def index_of_files(folder: Path, index_file: str) -> dict[str, str]:
    """The `weight_map` of an index: the file of each tensor. The names are not yet checked.

    Raises:
        CheckpointError: if it is damaged.
    """
    weight_map = read_json(checked_file(folder, index_file)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{folder / index_file}: weight_map must map tensor names to file names")
    return weight_map


def check_index(folder: Path, index_file: str, found: Mapping[str, str]) -> None:
    """Raises CheckpointError if a tensor is not in the file that an index says.

    Args:
        found: the file of each tensor.
    """
    for name, file in index_of_files(folder, index_file).items():
        if found.get(name) != file:
            raise CheckpointError(
                f"{folder / file} lacks tensor {name!r}, which {index_file} promises: fetch the file again"
            )
