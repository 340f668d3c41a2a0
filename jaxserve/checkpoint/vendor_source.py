"""A vendor's quantized checkpoint as a source of plain tensors: numbers without their scales."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxserve.checkpoint.tensor_source import TensorSource

_WORD_BITS = 32
_INT8 = np.dtype(np.int8)


class VendorSource:
    """A `TensorSource` without some tensors of another, and with weights that it packs into words as tensors of int8."""

    def __init__(
        self, source: TensorSource, hidden: frozenset[str], packed: Mapping[str, str] | None = None, bits: int = 8
    ) -> None:
        """
        Args:
            hidden: names that are left out.
            packed: names of packed weights by those that they get here. They are int32 [rows, words], each word with
                `32 / bits` numbers, the first in its lowest bits, from which half of their range was taken away.
            bits: of a packed number: 4 or 8.
        """
        self._source = source
        self._packed = packed or {}
        self._hidden = hidden | frozenset(self._packed.values())
        self._bits = bits

    def names(self) -> list[str]:
        return [*(name for name in self._source.names() if name not in self._hidden), *self._packed]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return self._source.shape(name)
        *rows, words = self._source.shape(self._packed[name]) or (0,)
        return (*rows, words * (_WORD_BITS // self._bits))

    def dtype(self, name: str) -> np.dtype:
        return _INT8 if name in self._packed else self._source.dtype(name)

    def read(self, name: str, rows: range | None = None) -> np.ndarray:
        if name not in self._packed:
            return self._source.read(name, rows)
        data = self._source.read(self._packed[name], rows).view(np.uint8)  # four bytes a word, the lowest first
        if self._bits == 4:
            data = np.stack([data & 0x0F, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)
        return (data - np.uint8(1 << (self._bits - 1))).view(np.int8)  # wraps around, as it should
