"""Tensors of a Hugging Face folder: `model.safetensors`, or shards with their index. Pickles are never opened."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tensor_source import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2
from jaxserve.checkpoint.tokenizer_files import error_line, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "F8_E4M3": FLOAT8_E4M3,
    "F8_E5M2": FLOAT8_E5M2,
}


def checked_file(folder: Path, name: str) -> Path:
    """A file inside a folder, by the name that some other file gives it.

    Links may lead anywhere inside the folder, or inside the repository's root of a Hugging Face Hub cache (where
    `snapshots/REVISION/FILE` is a link to `blobs/HASH`), and nowhere else.

    Raises:
        CheckpointError: for a name that leaves the folder, or a file that is not there. Nothing is opened.
    """
    if Path(name).is_absolute() or len(Path(name).parts) != 1 or name in ("", ".", ".."):
        raise CheckpointError(f"{folder}: refuses the file name {name!r}: it must be a plain name inside the folder")
    path = folder / name
    if not path.exists():
        raise CheckpointError(f"{folder}: {name} is missing: fetch the checkpoint again")
    if not path.resolve().is_relative_to(_allowed_root(folder)):
        raise CheckpointError(f"{folder}: refuses {name}: it is a link that leaves the folder")
    return path


def _allowed_root(folder: Path) -> Path:
    resolved = folder.resolve()
    repository = resolved.parent.parent
    if resolved.parent.name == "snapshots" and (repository / "blobs").is_dir():
        return repository
    return resolved


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, all there and inside it.

    Raises:
        CheckpointError: if a file is missing or leaves the folder, or only pickled weights are there.
    """
    if (folder / INDEX_FILE).exists():
        return [checked_file(folder, name) for name in sorted(set(_weight_map(folder).values()))]
    if (folder / SINGLE_FILE).exists():
        return [checked_file(folder, SINGLE_FILE)]
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(found) == 1:
        return [checked_file(folder, found[0])]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder} has only pickled weights, which can run code when opened: get the model's safetensors version"
        )
    several = f"several safetensors files and no {INDEX_FILE}" if found else f"no {SINGLE_FILE}"
    raise CheckpointError(f"{folder} has {several}: fetch the checkpoint again")


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json(checked_file(folder, INDEX_FILE)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX_FILE}: weight_map must map tensor names to file names")
    return weight_map


class SafetensorsSource:
    """A `TensorSource` over all files of a folder. A context manager: it holds the files open."""

    def __init__(self, folder: Path) -> None:
        """Opens and checks every file's header.

        Raises:
            CheckpointError: if a file is missing, short, malformed or outside, or lacks a tensor that the index has.
        """
        self._stack = contextlib.ExitStack()
        self._handles: dict[str, tuple[Any, Path]] = {}
        try:
            for path in weight_files(folder):
                self._open(path)
            if (folder / INDEX_FILE).exists():
                self._check_index(folder, _weight_map(folder))
        except BaseException:
            self._stack.close()
            raise

    def _open(self, path: Path) -> None:
        try:
            handle = self._stack.enter_context(safetensors.safe_open(path, framework="numpy"))
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged ({error_line(error)}): fetch the file again") from error
        for name in handle.keys():  # noqa: SIM118  the handle is no mapping
            if name in self._handles:
                raise CheckpointError(f"{path}: tensor {name!r} is also in {self._handles[name][1].name}")
            self._handles[name] = (handle, path)

    def _check_index(self, folder: Path, weight_map: Mapping[str, str]) -> None:
        for name, file in weight_map.items():
            if name not in self._handles or self._handles[name][1].name != file:
                raise CheckpointError(
                    f"{folder / file} lacks tensor {name!r}, which {INDEX_FILE} promises: fetch the file again"
                )

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self._handles.clear()
        self._stack.close()

    def names(self) -> list[str]:
        return list(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name][0].get_slice(name).get_shape())

    def dtype(self, name: str) -> np.dtype:
        handle, path = self._handles[name]
        stored = handle.get_slice(name).get_dtype()
        if stored not in _DTYPES:
            raise CheckpointError(f"{path}: tensor {name!r} has dtype {stored}, which is not supported")
        return _DTYPES[stored]

    def read(self, name: str) -> np.ndarray:
        handle, path = self._handles[name]
        dtype = self.dtype(name)
        if dtype.itemsize == 1:
            return _read_bytes(path, name).view(dtype).reshape(self.shape(name))
        return handle.get_tensor(name)


def _read_bytes(path: Path, name: str) -> np.ndarray:
    """A tensor's raw bytes: the library's NumPy side knows no 8-bit floats. The header was checked on opening."""
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(header_size))[name]["data_offsets"]
        file.seek(8 + header_size + begin)
        return np.frombuffer(file.read(end - begin), np.uint8)
