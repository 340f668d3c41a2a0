"""Tensors of a Hugging Face folder: `model.safetensors`, or shards with their index."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tensor_source import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2
from jaxserve.checkpoint.tokenizer_files import error_line
from jaxserve.checkpoint.trusted_files import check_index, checked_file, has_entry, index_counts, index_of_files

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
_INTEGERS = {
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}


def has_safetensors(folder: Path) -> bool:
    return has_entry(folder, INDEX_FILE) or any(folder.glob("*.safetensors"))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, all there and inside it.

    Raises:
        CheckpointError: if a file is missing or leaves the folder, or it cannot be told which ones count.
    """
    if index_counts(folder, INDEX_FILE, SINGLE_FILE):
        return [checked_file(folder, name) for name in sorted(set(index_of_files(folder, INDEX_FILE).values()))]
    if has_entry(folder, SINGLE_FILE):
        return [checked_file(folder, SINGLE_FILE)]
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(found) == 1:
        return [checked_file(folder, found[0])]
    several = f"several safetensors files and no {INDEX_FILE}" if found else f"no {SINGLE_FILE}"
    raise CheckpointError(f"{folder} has {several}: fetch the checkpoint again")


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: bytes from `start` on in a file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


class SafetensorsSource:
    """A `TensorSource` over all files of a folder.

    Tensors are read, not mapped: what was read counts as this process's memory only as long as it is in use.
    """

    def __init__(self, folder: Path, *, integers: bool = False) -> None:
        """Checks every file's header.

        Args:
            integers: tensors may hold whole numbers as well, such as tables of tokens, or quantized weights.

        Raises:
            CheckpointError: if a file is missing, short, malformed or outside, or lacks a tensor that the index has.
        """
        self._dtypes = _DTYPES | _INTEGERS if integers else _DTYPES
        self._places: dict[str, _Place] = {}
        for path in weight_files(folder):
            for name, place in _places(path).items():
                if name in self._places:
                    raise CheckpointError(f"{path}: tensor {name!r} is also in {self._places[name].path.name}")
                self._places[name] = place
        if index_counts(folder, INDEX_FILE, SINGLE_FILE):
            check_index(folder, INDEX_FILE, {name: place.path.name for name, place in self._places.items()})

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self._places.clear()

    def names(self) -> list[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def dtype(self, name: str) -> np.dtype:
        place = self._places[name]
        if place.dtype not in self._dtypes:
            raise CheckpointError(f"{place.path}: tensor {name!r} has dtype {place.dtype}, which is not supported")
        return self._dtypes[place.dtype]

    def read(self, name: str, rows: range | None = None) -> np.ndarray:
        place, dtype = self._places[name], self.dtype(name)
        shape, start = place.shape, place.start
        if rows is not None:
            shape = (len(rows), *shape[1:])
            start += rows.start * math.prod(shape[1:]) * dtype.itemsize
        count = math.prod(shape) * dtype.itemsize
        values = np.fromfile(place.path, np.uint8, count, offset=start)
        if values.size != count:
            raise CheckpointError(f"{place.path} ends inside tensor {name!r}: fetch the file again")
        return values.view(dtype).reshape(shape)


def _places(path: Path) -> dict[str, _Place]:
    """Each tensor's place, once the library has found the header sound and the file as long as it says."""
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(header_size, path.stat().st_size)))
    except (safetensors.SafetensorError, OSError, ValueError) as error:  # the last where it changed in between
        raise CheckpointError(f"{path} is damaged ({error_line(error)}): fetch the file again") from error
    return {
        name: _Place(path, entry["dtype"], tuple(entry["shape"]), 8 + header_size + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }
