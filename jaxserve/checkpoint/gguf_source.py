"""Tensors and metadata of a GGUF file, dequantized and in Hugging Face's row order."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.families import Family, family_of_gguf
from jaxserve.checkpoint.gguf_header import read_header
from jaxserve.checkpoint.rotary_rows import read_pairs_apart
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
_BLOCKS_AT_ONCE = 1 << 16  # that are unpacked: what that takes on the way is several times their size


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
        self._header = read_header(path)
        self._tensors = self._header.tensors
        self._check_places()
        parts = self.get("split.count", 1)
        if parts not in (0, 1):
            raise CheckpointError(f"{path} is one part of {parts}: join them first, with `llama-gguf-split --merge`")
        self.family: Family = family_of_gguf(str(self.get("general.architecture")), str(path))

    def _check_places(self) -> None:
        """Tensors follow each other, as the format has it: a size or type that is not the tensor's shows at the next one.

        Raises:
            CheckpointError: if one does not begin where the one before it ends, or the file ends inside it.
        """
        size, start, alignment = self.path.stat().st_size, self._header.data_start, self._header.alignment
        for name, tensor in self._tensors.items():
            if tensor.start != start:
                raise CheckpointError(
                    f"{self.path} is damaged, tensor {name!r} is at byte {tensor.start}, what is before it ends at {start}: "
                    "fetch the file again"
                )
            if start + tensor.nbytes > size:
                raise CheckpointError(f"{self.path} ends inside tensor {name!r}: fetch the file again")
            start += -(-tensor.nbytes // alignment) * alignment

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as plain Python, or the default."""
        value = self._header.metadata.get(key, default)
        try:
            if isinstance(value, bytes):
                return value.decode()
            if isinstance(value, list):
                return [text.decode() for text in value]
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: metadata {key!r} is damaged ({error_line(error)})") from error
        return value.tolist() if isinstance(value, np.ndarray) else value

    def architecture(self, key: str, default: Any = None) -> Any:
        """A metadata value under the architecture's own prefix, such as `architecture("block_count")`."""
        return self.get(f"{self.family.gguf_architecture}.{key}", default)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exception: object) -> None:
        pass  # no file is open between two reads

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        stored = self._tensors[name].kind
        if stored in _PLAIN:
            return _PLAIN[stored]
        if stored in _QUANTIZED:
            return np.dtype(np.float32)
        supported = ", ".join(kind.name for kind in (*_PLAIN, *_QUANTIZED))
        raise CheckpointError(
            f"{self.path}: tensor {name!r} has type {stored.name}, which is not supported; supported are {supported}"
        )

    def read(self, name: str, rows: range | None = None) -> np.ndarray:
        """As `TensorSource`. The file is read, not mapped: what was read counts as memory only as long as it is used."""
        shape, num_heads = self.shape(name), self._heads_of_pairs(name)
        if rows is None:
            rows = range(shape[0] if shape else 1)
        if num_heads is None:
            return self._read_rows(name, rows)
        where = f"{self.path}: tensor {name!r}"
        return read_pairs_apart(lambda rows: self._read_rows(name, rows), shape, num_heads, rows, where)

    def _read_rows(self, name: str, rows: range) -> np.ndarray:
        """As they lie in the file."""
        tensor, dtype, shape = self._tensors[name], self.dtype(name), self.shape(name)
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]  # 1 and its size, of plain types
        row_values = math.prod(shape[1:])
        first, end = rows.start * row_values // block_values, -(-rows.stop * row_values // block_values)
        start = tensor.start + first * block_bytes
        data = np.fromfile(self.path, np.uint8, (end - first) * block_bytes, offset=start)
        if data.size != (end - first) * block_bytes:
            raise CheckpointError(f"{self.path} ends inside tensor {name!r}: fetch the file again")
        is_plain = tensor.kind in _PLAIN
        values = data.view(dtype) if is_plain else _dequantized(data.reshape(-1, block_bytes), tensor.kind)
        skipped = rows.start * row_values - first * block_values  # of a block that begins in an earlier row
        return values[skipped : skipped + len(rows) * row_values].reshape(len(rows), *shape[1:])

    def _heads_of_pairs(self, name: str) -> int | None:
        """Of Llama's q and k, whose rows have an order of their own, biases too; None: of no such tensor."""
        if not self.family.gguf_permuted or not name.startswith("blk."):
            return None
        names = self.family.gguf_names
        module = name.split(".", 2)[2].rsplit(".", 1)[0]
        if module not in (names.q, names.k):
            return None
        return self.num_heads if module == names.q else self.num_kv_heads

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


def _dequantized(blocks: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The values of blocks [number, bytes], in a row."""
    block_values = gguf.GGML_QUANT_SIZES[kind][0]
    values = np.empty(len(blocks) * block_values, np.float32)
    for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
        unpacked = gguf.quants.dequantize(blocks[start : start + _BLOCKS_AT_ONCE], kind)
        values[start * block_values : start * block_values + unpacked.size] = unpacked.reshape(-1)
    return values
