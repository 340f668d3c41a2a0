"""What every file format looks like to the converter: named tensors, read one at a time, or some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import ml_dtypes
import numpy as np
from numpy.exceptions import DTypePromotionError


class TensorSource(Protocol):
    """Named tensors of one checkpoint. Shapes and dtypes come from headers; only `read` touches the data."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype:
        """The dtype of what `read` gives (float32 for quantized tensors)."""
        ...

    def read(self, name: str, rows: range | None = None) -> np.ndarray:
        """The whole tensor, or some of its rows (its first axis), in memory that is the caller's.

        Args:
            rows: of step one, within the tensor; None: all of it.

        Raises:
            CheckpointError: if the data is not what the header says.
        """
        ...


_SLAB_BYTES = 1 << 24  # what is read of a large tensor at a time


def slabs(shape: tuple[int, ...], dtype: np.dtype) -> Iterator[range]:
    """The rows of a tensor, some at a time, so that what is held beside its destination does not grow with it."""
    num_rows = shape[0] if shape else 0
    step = max(1, _SLAB_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
    for start in range(0, num_rows, step):
        yield range(start, min(start + step, num_rows))


def common_dtype(dtypes: Iterable[np.dtype]) -> np.dtype:
    """The one that holds the numbers of all without loss: float32 for two that NumPy knows none for.

    These are narrow floats with unlike exponents, such as float16 and bfloat16.
    """
    first, *others = dtypes
    for dtype in others:
        try:
            first = np.promote_types(first, dtype)
        except DTypePromotionError:
            first = np.promote_types(np.float32, first)
    return first


def joined(parts: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Arrays one after the other along an axis, in their `common_dtype`."""
    return np.concatenate(parts, axis=axis, dtype=common_dtype(part.dtype for part in parts))


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
