"""The header of a GGUF file: its metadata, and where each tensor lies.

The file is read, not mapped: whoever reads of a map while the file becomes shorter is killed by the operating system, where
a read only comes back with less. And nothing is made by the numbers that the file claims before they were compared with its
size.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tokenizer_files import error_line

_MOST_NAMES = 1 << 16  # of tensors, and of metadata; no model has nearly as many
# Of all arrays together; the largest vocabularies have some hundred thousand tokens and merges.
_MOST_ELEMENTS = 1 << 22
_MOST_BYTES = 1 << 28  # of the header; the largest vocabularies take some 30 MB
_MOST_AXES = 4  # that the format knows
_VERSIONS = (2, 3)  # the first had other numbers
_ALIGNMENT_KEY = "general.alignment"
# By type's number, as `struct` calls them.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor, as the header describes it.

    Attributes:
        shape: the last axis is that whose numbers lie together.
        kind: how its numbers are held.
        start: of its bytes in the file.
    """

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    start: int

    @property
    def nbytes(self) -> int:
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block_values * block_bytes


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says before its tensors.

    Attributes:
        metadata: by key: numbers and truth values, texts as bytes, lists of texts as lists of bytes, other lists as arrays.
        tensors: by name, in the file's order.
        alignment: tensors begin at its multiples.
        data_start: where the first one lies.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    alignment: int
    data_start: int


def read_header(path: Path) -> GGUFHeader:
    """
    Raises:
        CheckpointError: if the file is no GGUF, or of a kind that is not supported, or a length or a type in its header
            cannot be.
    """
    try:
        with path.open("rb") as file:
            return _Reader(file, path.stat().st_size, path).header()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error_line(error)}") from error
    except (struct.error, ValueError) as error:  # ended too soon, or no text
        raise CheckpointError(f"{path} is damaged ({error_line(error)}): fetch the file again") from error


class _Reader:
    """Its methods raise ValueError for what cannot be, and struct.error where the file has become shorter.

    What a sound file may have and is not supported is a CheckpointError.
    """

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._file, self._path = file, path
        self._bytes_left = min(size, _MOST_BYTES)
        self._elements_left = _MOST_ELEMENTS

    def header(self) -> GGUFHeader:
        self._check_kind()
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        if max(num_tensors, num_entries) > _MOST_NAMES:
            raise ValueError(f"{num_tensors} tensors and {num_entries} metadata entries, at most {_MOST_NAMES} of each")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._text().decode()
            if key in metadata:
                raise ValueError(f"{key} is there twice")
            metadata[key] = self._value(key, self._number("I"))
        tensors: dict[str, GGUFTensor] = {}
        for _ in range(num_tensors):
            name = self._text().decode()
            if name in tensors:
                raise ValueError(f"{name} is there twice")
            tensors[name] = self._tensor()
        alignment = metadata.get(_ALIGNMENT_KEY, gguf.GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment}")
        start = -(-self._file.tell() // alignment) * alignment
        placed = {name: GGUFTensor(one.shape, one.kind, start + one.start) for name, one in tensors.items()}
        return GGUFHeader(metadata, placed, alignment, start)

    def _check_kind(self) -> None:
        if self._bytes(4) != b"GGUF":
            raise CheckpointError(f"{self._path} is no GGUF file: give one, or the folder of a model in another format")
        version = self._number("I")
        if version in (number << 24 for number in _VERSIONS):
            raise CheckpointError(
                f"{self._path} has its bytes in the other order (big-endian), which is not supported: fetch the "
                "little-endian file, or make it with `gguf-convert-endian`"
            )
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise CheckpointError(
                f"{self._path}: version {version} of GGUF is not supported, only {known}: fetch a file of those"
            )

    def _tensor(self) -> GGUFTensor:
        """Its start counts from that of all tensors."""
        num_axes = self._number("I")
        if num_axes > _MOST_AXES:
            raise ValueError(f"{num_axes} axes")
        shape = tuple(self._number("Q") for _ in range(num_axes))[::-1]
        kind = gguf.GGMLQuantizationType(self._number("I"))
        if (shape or (1,))[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            raise ValueError(f"shape {shape} has no whole blocks of {kind.name}")
        return GGUFTensor(shape, kind, self._number("Q"))

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(key)
        return self._number(_scalar(kind))

    def _array(self, key: str) -> list[bytes] | np.ndarray:
        kind, count = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            raise CheckpointError(
                f"{self._path}: metadata {key!r} is a list of lists, which is not supported: make a file without it, with "
                f"`gguf-new-metadata --remove-metadata {key}`"
            )
        self._elements_left -= count
        if self._elements_left < 0:
            raise ValueError(f"{count} elements")
        if kind == _STRING:
            return [self._text() for _ in range(count)]
        dtype = np.dtype("<" + _scalar(kind))
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)

    def _text(self) -> bytes:
        return self._bytes(self._number("Q"))

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack("<" + form, self._bytes(struct.calcsize("<" + form)))
        return value

    def _bytes(self, count: int) -> bytes:
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise ValueError(f"the file ends within {count} bytes")
        content = self._file.read(count)
        if len(content) != count:
            raise ValueError(f"the file ended within {count} bytes")
        return content


def _scalar(kind: int) -> str:
    """How `struct` and NumPy call the type of a number."""
    if kind not in _SCALARS:
        raise ValueError(f"type {kind}")
    return _SCALARS[kind]
