"""What every file format looks like to the converter: named tensors, read one at a time."""

from __future__ import annotations

from typing import Protocol

import ml_dtypes
import numpy as np


class TensorSource(Protocol):
    """Named tensors of one checkpoint. Shapes and dtypes come from headers; only `read` touches the data."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype:
        """The dtype of what `read` gives (float32 for quantized tensors)."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The whole tensor. Raises CheckpointError if the data is not what the header says."""
        ...


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
