"""From a file's tensors to the parameters' fused layout (see `jaxserve.models.params`), checked before any is read."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.pieces import EMBEDDING_PIECE, HEAD_PIECE, piece_names
from jaxserve.checkpoint.tensor_names import TensorNames
from jaxserve.checkpoint.tensor_source import TensorSource
from jaxserve.config import ModelConfig

logger = logging.getLogger(__name__)

# The modules that each large weight of a layer is fused of. They share their input.
WEIGHT_MODULES = {"wqkv": ("q", "k", "v"), "wo": ("o",), "w_gate_up": ("gate", "up"), "w_down": ("down",)}
_BLOCK_ROWS, _BLOCK_COLUMNS = 512, 64
_MAX_THREADS = 8


@dataclass(frozen=True)
class Assembler:
    """Reads one model, a piece at a time. `checked` makes one; then `piece` gives the arrays.

    Attributes:
        config: as asked, but for `tie_word_embeddings`, which says what the file really holds.
        expected: every tensor that will be read, with its shape.
    """

    source: TensorSource
    names: TensorNames
    config: ModelConfig
    dtype: np.dtype | None
    expected: Mapping[str, tuple[int, ...]]

    @staticmethod
    def checked(
        source: TensorSource, names: TensorNames, config: ModelConfig, dtype: np.dtype | None, where: str
    ) -> Assembler:
        """Compare what the file holds with what the config says; no data is read, but for a tied head's.

        Args:
            dtype: of every array but the norms; None: as the file has it.
            where: the file's or folder's name, for messages.

        Raises:
            CheckpointError: if a tensor is missing, has another shape, or is none of this architecture's.
        """
        present = set(source.names())
        check_number_of_layers(config, len(present), where)
        config = _settle_head(source, names, config, where, present)
        expected = expected_shapes(names, config)
        for name, shape in expected.items():
            if name not in present:
                raise CheckpointError(f"{where}: tensor {name!r} is missing: fetch the checkpoint again")
            if source.shape(name) != shape:
                raise CheckpointError(
                    f"{where}: tensor {name!r} has shape {source.shape(name)}, but its config says {shape}"
                )
            source.dtype(name)  # raises for one that cannot be read
        ignored = (*names.ignored, names.lm_head)
        strangers = sorted(name for name in present - set(expected) if not name.endswith(ignored))
        if strangers:
            more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
            raise CheckpointError(
                f"{where}: tensors {strangers[:3]}{more} are not part of this architecture, and cannot just be dropped"
            )
        return Assembler(source, names, config, dtype, expected)

    def piece_bytes(self, piece: str) -> int:
        """Of all tensors that `piece` reads."""
        return sum(self._bytes_of(name) for name in self._tensors_of(piece))

    def stored_bytes(self, piece: str, without: Collection[str]) -> int:
        """Of the arrays that `piece` gives, but for some of a layer's weights, such as "wqkv"."""
        names = self._tensors_of(piece)
        if piece not in (EMBEDDING_PIECE, HEAD_PIECE):
            layer = self._layer_number(piece)
            modules = [module for weight in without for module in self.names.held_of(WEIGHT_MODULES[weight])]
            names = [name for name in names if name not in {self.names.in_layer(layer, module) for module in modules}]
        if self.dtype is None:
            return sum(self._bytes_of(name) for name in names)
        return sum(math.prod(self.expected[name]) * self.dtype.itemsize for name in names)

    def _tensors_of(self, piece: str) -> list[str]:
        if piece == EMBEDDING_PIECE:
            return [self.names.embedding]
        if piece == HEAD_PIECE:
            return [name for name in (self.names.final_norm, self.names.lm_head) if name in self.expected]
        prefix = self.names.layer.format(layer=self._layer_number(piece))
        return [name for name in self.expected if name.startswith(prefix)]

    def piece(self, piece: str, advance: Callable[[int], None]) -> dict[str, np.ndarray]:
        """The arrays of one of `piece_names(config)`, by their names within it.

        Args:
            advance: is told the bytes that were read.
        """
        if piece == EMBEDDING_PIECE:
            return {"embedding": self._weight(self.names.embedding, advance)}
        if piece == HEAD_PIECE:
            arrays = {"final_norm": self._read(self.names.final_norm, advance)}
            if not self.config.tie_word_embeddings:
                arrays["lm_head"] = transposed(self._weight(self.names.lm_head, advance))
            return arrays
        return self._layer(self._layer_number(piece), advance)

    def _layer_number(self, piece: str) -> int:
        return piece_names(self.config).index(piece) - 1

    def _layer(self, layer: int, advance: Callable[[int], None]) -> dict[str, np.ndarray]:
        config, name = self.config, self.names.in_layer
        hidden, kv_heads, group, head_dim = (
            config.hidden_size, config.num_kv_heads, config.group_size, config.head_dim,
        )  # fmt: skip

        def fuse_qkv(part: str) -> np.ndarray:
            pieces = self._parts(layer, ("q", "k", "v"), part, advance)
            by_head = [piece.reshape(kv_heads, -1, head_dim, *piece.shape[1:]) for piece in pieces]
            return _concatenate(by_head, axis=1, dtype=self.dtype)  # [kv_heads, group + 2, head_dim, ...]

        def stack_gate_up(part: str) -> np.ndarray:
            pieces = self._parts(layer, ("gate", "up"), part, advance)
            return _concatenate([piece[None] for piece in pieces], axis=0, dtype=self.dtype)  # [2, ffn, ...]

        arrays = {
            "attention_norm": self._read(name(layer, "attention_norm"), advance),
            "wqkv": transposed(fuse_qkv("weight").reshape(-1, hidden)).reshape(hidden, kv_heads, group + 2, head_dim),
            "wo": transposed(self._weight(name(layer, "o"), advance)).reshape(kv_heads, group, head_dim, hidden),
            "mlp_norm": self._read(name(layer, "mlp_norm"), advance),
            "w_gate_up": transposed(stack_gate_up("weight").reshape(-1, hidden)).reshape(hidden, 2, -1),
            "w_down": transposed(self._weight(name(layer, "down"), advance)),
        }
        if config.attention_bias:
            arrays["bqkv"] = fuse_qkv("bias")
        if config.attention_output_bias:
            arrays["bo"] = self._weight(name(layer, "o", "bias"), advance)
        if config.mlp_bias:
            arrays |= {
                "b_gate_up": stack_gate_up("bias"),
                "b_down": self._weight(name(layer, "down", "bias"), advance),
            }
        if config.qk_norm:
            arrays |= {norm: self._read(name(layer, norm), advance) for norm in ("q_norm", "k_norm")}
        return arrays

    def _parts(
        self, layer: int, modules: tuple[str, ...], part: str, advance: Callable[[int], None]
    ) -> list[np.ndarray]:
        """Tensors of modules with one input, whether they lie apart or in one tensor."""
        fused = self.names.fused(modules)
        if fused is None:
            return [self._read(self.names.in_layer(layer, module, part), advance) for module in modules]
        config = self.config
        q, kv, ffn = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
        rows = self._read(self.names.in_layer(layer, fused, part), advance)
        return np.split(rows, [q, q + kv] if modules[0] == "q" else [ffn])

    def _weight(self, name: str, advance: Callable[[int], None]) -> np.ndarray:
        values = self._read(name, advance)
        return values if self.dtype is None else values.astype(self.dtype, copy=False)

    def _read(self, name: str, advance: Callable[[int], None]) -> np.ndarray:
        values = self.source.read(name)
        advance(self._bytes_of(name))
        return values

    def _bytes_of(self, name: str) -> int:
        return self.source.dtype(name).itemsize * math.prod(self.expected[name])


def check_number_of_layers(config: ModelConfig, num_tensors: int, where: str) -> None:
    """Raises CheckpointError if there are more layers than tensors: before a list of them is made."""
    if config.num_layers > num_tensors:
        raise CheckpointError(
            f"{where}: the config says {config.num_layers} layers, but there are {num_tensors} tensors in all"
        )


def expected_shapes(names: TensorNames, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a file must hold for this config, with its shape there ([out, in] for matrices)."""
    hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {names.embedding: (config.vocab_size, hidden), names.final_norm: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[names.lm_head] = (config.vocab_size, hidden)
    matrices: dict[str, tuple[int, ...]] = {}
    has_bias = {"o": config.attention_output_bias, "down": config.mlp_bias}
    for modules, rows, with_bias in (
        (("q", "k", "v"), (q_size, kv_size, kv_size), config.attention_bias),
        (("gate", "up"), (ffn, ffn), config.mlp_bias),
    ):
        fused = names.fused(modules)
        sizes = dict(zip(modules, rows, strict=True)) if fused is None else {fused: sum(rows)}
        matrices |= {module: (size, hidden) for module, size in sizes.items()}
        has_bias |= dict.fromkeys(sizes, with_bias)
    matrices |= {"o": (hidden, q_size), "down": (hidden, ffn)}
    for layer in range(config.num_layers):
        for module, shape in matrices.items():
            shapes[names.in_layer(layer, module)] = shape
            if has_bias[module]:
                shapes[names.in_layer(layer, module, "bias")] = shape[:1]
        for module in ("attention_norm", "mlp_norm"):
            shapes[names.in_layer(layer, module)] = (hidden,)
        if config.qk_norm:
            shapes[names.in_layer(layer, "q_norm")] = shapes[names.in_layer(layer, "k_norm")] = (head_dim,)
    return shapes


def _settle_head(
    source: TensorSource, names: TensorNames, config: ModelConfig, where: str, present: set[str]
) -> ModelConfig:
    """A tied config beside a head of its own: the head counts if it differs, as transformers 5 has it."""
    if not config.tie_word_embeddings or not {names.lm_head, names.embedding} <= present:
        return config
    if np.array_equal(source.read(names.lm_head), source.read(names.embedding)):
        return config
    logger.warning(
        "%s: the config ties the output head to the embedding, but there is a different head: using that one", where
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def _concatenate(pieces: list[np.ndarray], axis: int, dtype: np.dtype | None) -> np.ndarray:
    """In `dtype`; None: in the one that holds every piece without loss."""
    if dtype is None:
        dtype = pieces[0].dtype
        for piece in pieces[1:]:
            dtype = np.promote_types(dtype, piece.dtype)
    return np.concatenate([piece.astype(dtype, copy=False) for piece in pieces], axis=axis)


def transposed(matrix: np.ndarray) -> np.ndarray:
    """The transpose of a matrix, in row-major order.

    In blocks that fit a cache, several at once: an array that is read along one axis and written along the other is slow.
    """
    source = matrix.T
    copy = np.empty(source.shape, source.dtype)

    def copy_rows(start: int) -> None:
        rows = slice(start, start + _BLOCK_ROWS)
        for column in range(0, source.shape[1], _BLOCK_COLUMNS):
            columns = slice(column, column + _BLOCK_COLUMNS)
            copy[rows, columns] = source[rows, columns]

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        for _ in threads.map(copy_rows, range(0, source.shape[0], _BLOCK_ROWS)):
            pass
    return copy
