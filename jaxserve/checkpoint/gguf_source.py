"""Tensors and metadata of a GGUF file, dequantized and in Hugging Face's row order."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.families import GGUF, Family, family_of_gguf
from jaxserve.checkpoint.tensor_source import BFLOAT16
from jaxserve.checkpoint.tokenizer_files import error_line

_Type = gguf.GGMLQuantizationType
_PLAIN = {
    _Type.F32: np.dtype(np.float32),
    _Type.F16: np.dtype(np.float16),
    _Type.BF16: BFLOAT16,
}
_QUANTIZED = (
    _Type.Q8_0, _Type.Q4_0, _Type.Q4_1, _Type.Q5_0, _Type.Q5_1, _Type.Q4_K, _Type.Q5_K, _Type.Q6_K,
)  # fmt: skip


class GGUFFile:
    """A `TensorSource` over one GGUF file, and its metadata.

    Attributes:
        path: of the file.
        family: what `general.architecture` names.
    """

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            CheckpointError: if the file is no GGUF, is damaged or cut short, or its architecture is not supported.
        """
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except Exception as error:  # the reader trusts the file: damage shows as an exception of any kind
            raise CheckpointError(f"{path} is no GGUF file or is damaged: fetch the file again") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        size = path.stat().st_size
        for tensor in self._reader.tensors:
            if int(tensor.data_offset) + int(tensor.n_bytes) > size:
                raise CheckpointError(f"{path} ends inside tensor {tensor.name!r}: fetch the file again")
        self.family: Family = family_of_gguf(str(self.get("general.architecture")), str(path))

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as plain Python, or the default."""
        field = self._reader.get_field(key)
        if field is None:
            return default
        try:
            return field.contents()
        except Exception as error:
            raise CheckpointError(f"{self.path}: metadata {key!r} is damaged ({error_line(error)})") from error

    def architecture(self, key: str, default: Any = None) -> Any:
        """A metadata value under the architecture's own prefix, such as `architecture("block_count")`."""
        return self.get(f"{self.family.gguf_architecture}.{key}", default)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._tensors.clear()

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> np.dtype:
        stored = self._tensors[name].tensor_type
        if stored in _PLAIN:
            return _PLAIN[stored]
        if stored in _QUANTIZED:
            return np.dtype(np.float32)
        supported = ", ".join(kind.name for kind in (*_PLAIN, *_QUANTIZED))
        raise CheckpointError(
            f"{self.path}: tensor {name!r} has type {stored.name}, which is not supported; supported are {supported}"
        )

    def read(self, name: str) -> np.ndarray:
        tensor, dtype, shape = self._tensors[name], self.dtype(name), self.shape(name)
        if tensor.tensor_type in _PLAIN:
            values = np.array(tensor.data).view(dtype)
        else:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.size != math.prod(shape):
            raise CheckpointError(f"{self.path}: tensor {name!r} has {values.size} values, its header says {shape}")
        return self._restore_rows(name, values.reshape(shape))

    def _restore_rows(self, name: str, values: np.ndarray) -> np.ndarray:
        """Undo the row order of Llama's q and k, each with its own number of heads; biases are ordered likewise."""
        if not self.family.gguf_permuted or not name.startswith("blk."):
            return values
        module = name.split(".", 2)[2].rsplit(".", 1)[0]
        if module not in (GGUF.q, GGUF.k):
            return values
        num_heads = self.num_heads if module == GGUF.q else self.num_kv_heads
        if values.shape[0] % (2 * num_heads):
            raise CheckpointError(f"{self.path}: tensor {name!r} of shape {values.shape} is not of {num_heads} heads")
        # Stored as [heads, pair, which of the pair]; rotate-half wants [heads, which of the pair, pair].
        pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)

    @property
    def num_heads(self) -> int:
        return self._head_count("attention.head_count", None)

    @property
    def num_kv_heads(self) -> int:
        return self._head_count("attention.head_count_kv", self.num_heads)

    def _head_count(self, key: str, default: int | None) -> int:
        value = self.architecture(key, default)
        counts = set(value) if isinstance(value, list) else {value}
        if len(counts) != 1 or not isinstance(count := counts.pop(), int) or count < 1:
            raise CheckpointError(f"{self.path}: {key}={value!r} must be one number of heads for all layers")
        return count
