"""A first walk over a GGUF's metadata, before its reader builds objects by the numbers that the file claims."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from jaxserve.checkpoint.errors import CheckpointError

MOST_ELEMENTS = 1 << 24  # of all arrays together; the largest vocabularies have some hundred thousand tokens and merges
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value, by its type's number
_STRING, _ARRAY = 8, 9
_HEADER = struct.Struct("<4sIQQ")  # magic, version, tensors, metadata entries


def check_header(path: Path) -> None:
    """Whether every length in the metadata fits the file.

    Raises:
        CheckpointError: if one does not, or the file is no GGUF.
    """
    damaged = CheckpointError(f"{path} is no GGUF file or is damaged: fetch the file again")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            magic, _, tensors, entries = _HEADER.unpack_from(content, 0)
            if magic != b"GGUF" or tensors > MOST_ELEMENTS or entries > MOST_ELEMENTS:
                raise damaged
            _Walk(content).entries(entries)
    except (struct.error, ValueError, OverflowError) as error:  # ended too soon, or empty
        raise damaged from error


class _Walk:
    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._place = _HEADER.size
        self._elements_left = MOST_ELEMENTS

    def entries(self, count: int) -> None:
        for _ in range(count):
            self._string()
            self._value(self._number("<I"))

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            self._array()
        elif kind in _SIZES:
            self._skip(_SIZES[kind])
        else:
            raise ValueError(f"type {kind}")

    def _array(self) -> None:
        kind, count = self._number("<I"), self._number("<Q")
        self._elements_left -= count
        if self._elements_left < 0 or kind == _ARRAY:  # arrays of arrays are not used by any model
            raise ValueError(f"{count} elements of type {kind}")
        if kind in _SIZES:
            self._skip(count * _SIZES[kind])
        else:
            for _ in range(count):
                self._value(kind)

    def _string(self) -> None:
        self._skip(self._number("<Q"))

    def _number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._content, self._place)
        self._place += struct.calcsize(form)
        return value

    def _skip(self, count: int) -> None:
        self._place += count
        if self._place > len(self._content):
            raise ValueError(f"the file ends before byte {self._place}")
