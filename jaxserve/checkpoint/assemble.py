"""From a file's tensors to the parameters' fused layout (see `jaxserve.models.params`), checked before any is read."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.pieces import EMBEDDING_PIECE, HEAD_PIECE, piece_names
from jaxserve.checkpoint.tensor_names import TensorNames
from jaxserve.checkpoint.tensor_source import TensorSource, common_dtype, slabs
from jaxserve.config import ModelConfig

logger = logging.getLogger(__name__)

# The modules that each large weight of a layer is fused of. They share their input.
WEIGHT_MODULES = {"wqkv": ("q", "k", "v"), "wo": ("o",), "w_gate_up": ("gate", "up"), "w_down": ("down",)}
_BLOCK_ROWS, _BLOCK_COLUMNS = 512, 64
_MAX_THREADS = 8


@dataclass(frozen=True)
class _Rows:
    """Where a module's rows lie: in a tensor of its own, or among others in a fused one."""

    tensor: str
    first: int
    count: int


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
        names, joined = self._tensors_of(piece), {}
        if piece not in (EMBEDDING_PIECE, HEAD_PIECE):
            layer = self._layer_number(piece)
            joined = self._joined_dtypes(layer)
            modules = [module for weight in without for module in self.names.held_of(WEIGHT_MODULES[weight])]
            names = [name for name in names if name not in {self.names.in_layer(layer, module) for module in modules}]
        if self.dtype is not None:
            return sum(math.prod(self.expected[name]) * self.dtype.itemsize for name in names)
        dtypes = {name: self.source.dtype(name) for name in names} | {
            name: joined[name] for name in names if name in joined
        }
        return sum(math.prod(self.expected[name]) * dtype.itemsize for name, dtype in dtypes.items())

    def _joined_dtypes(self, layer: int) -> dict[str, np.dtype]:
        """Of a layer's tensors that are stored as parts of one array: its dtype."""
        dtypes: dict[str, np.dtype] = {}
        for modules in WEIGHT_MODULES.values():
            for part in ("weight", "bias"):
                rows = self._rows_of(layer, modules, part)
                if all(row.tensor in self.expected for row in rows):
                    dtypes |= dict.fromkeys([row.tensor for row in rows], self._common_dtype(rows))
        return dtypes

    def _tensors_of(self, piece: str) -> list[str]:
        if piece == EMBEDDING_PIECE:
            return [self.names.embedding]
        if piece == HEAD_PIECE:
            return [name for name in (self.names.final_norm, self.names.lm_head) if name in self.expected]
        prefix = self.names.layer.format(layer=self._layer_number(piece))
        return [name for name in self.expected if name.startswith(prefix)]

    def arrays(self, piece: str, advance: Callable[[int], None]) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays of one of `piece_names(config)`, one after the other, each with its name within the piece.

        Tensors are read some rows at a time, so that little is held beside an array while it is made.

        Args:
            advance: is told the bytes that were read.
        """
        if piece == EMBEDDING_PIECE:
            yield "embedding", self._weight(self.names.embedding, advance)
        elif piece == HEAD_PIECE:
            yield "final_norm", self._read(self.names.final_norm, advance)
            if not self.config.tie_word_embeddings:
                rows = _Rows(self.names.lm_head, 0, self.config.vocab_size)
                yield "lm_head", self._transposed([rows], 1, advance)
        else:
            yield from self._layer(self._layer_number(piece), advance)

    def _layer_number(self, piece: str) -> int:
        return piece_names(self.config).index(piece) - 1

    def _layer(self, layer: int, advance: Callable[[int], None]) -> Iterator[tuple[str, np.ndarray]]:
        config, name = self.config, self.names.in_layer
        hidden, kv_heads, group, head_dim = (
            config.hidden_size, config.num_kv_heads, config.group_size, config.head_dim,
        )  # fmt: skip

        def fused(weight: str, num_parts: int = 1) -> np.ndarray:
            return self._transposed(self._rows_of(layer, WEIGHT_MODULES[weight]), num_parts, advance)

        yield "attention_norm", self._read(name(layer, "attention_norm"), advance)
        yield "wqkv", fused("wqkv", kv_heads).reshape(hidden, kv_heads, group + 2, head_dim)
        yield "wo", fused("wo").reshape(kv_heads, group, head_dim, hidden)
        yield "mlp_norm", self._read(name(layer, "mlp_norm"), advance)
        yield "w_gate_up", fused("w_gate_up").reshape(hidden, 2, -1)
        yield "w_down", fused("w_down")
        if config.attention_bias:
            by_head = [bias.reshape(kv_heads, -1, head_dim) for bias in self._biases(layer, "wqkv", advance)]
            yield "bqkv", np.concatenate(by_head, axis=1)
        if config.attention_output_bias:
            yield "bo", self._weight(name(layer, "o", "bias"), advance)
        if config.mlp_bias:
            yield "b_gate_up", np.stack(self._biases(layer, "w_gate_up", advance))
            yield "b_down", self._weight(name(layer, "down", "bias"), advance)
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                yield norm, self._read(name(layer, norm), advance)

    def _rows_of(self, layer: int, modules: tuple[str, ...], part: str = "weight") -> list[_Rows]:
        """Of modules with one input, whether they lie apart or in one tensor."""
        config, fused = self.config, self.names.fused(modules)
        q, kv, ffn = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
        sizes = {
            "q": q, "k": kv, "v": kv, "o": config.hidden_size, "gate": ffn, "up": ffn, "down": config.hidden_size,
        }  # fmt: skip
        if fused is None:
            return [_Rows(self.names.in_layer(layer, module, part), 0, sizes[module]) for module in modules]
        first, rows = 0, []
        for module in modules:
            rows.append(_Rows(self.names.in_layer(layer, fused, part), first, sizes[module]))
            first += sizes[module]
        return rows

    def _biases(self, layer: int, weight: str, advance: Callable[[int], None]) -> list[np.ndarray]:
        """Of a weight's modules, in one dtype."""
        rows = self._rows_of(layer, WEIGHT_MODULES[weight], "bias")
        dtype = self._common_dtype(rows)
        biases = [self._read(part.tensor, advance, range(part.first, part.first + part.count)) for part in rows]
        return [bias.astype(dtype, copy=False) for bias in biases]

    def _transposed(self, modules: Sequence[_Rows], num_parts: int, advance: Callable[[int], None]) -> np.ndarray:
        """The transpose of modules' rows, fused.

        Args:
            num_parts: each module is cut into so many; then come the first part of each, the second of each, ...
        """
        inputs, width = self.expected[modules[0].tensor][1], sum(module.count for module in modules)
        dtype = self._common_dtype(modules)
        matrix = np.empty((inputs, width), dtype)
        parts = matrix.reshape(inputs, num_parts, width // num_parts)
        column = 0
        with _copying_threads() as threads:
            for module in modules:
                count = module.count // num_parts
                for part in range(num_parts):
                    first = module.first + part * count
                    for rows in slabs((count, inputs), self.source.dtype(module.tensor)):
                        slab = self._read(module.tensor, advance, range(first + rows.start, first + rows.stop))
                        place = parts[:, part, column + rows.start : column + rows.stop]
                        _transpose_into(place, slab.astype(dtype, copy=False), threads)
                        del slab  # before the next one is read
                column += count
        return matrix

    def _common_dtype(self, modules: Sequence[_Rows]) -> np.dtype:
        """The one that is asked for; else the one that holds every module without loss."""
        if self.dtype is not None:
            return self.dtype
        return common_dtype(self.source.dtype(module.tensor) for module in modules)

    def _weight(self, name: str, advance: Callable[[int], None]) -> np.ndarray:
        """A tensor as it lies, in the dtype that is asked for."""
        shape, dtype = self.expected[name], self.source.dtype(name)
        values = np.empty(shape, dtype if self.dtype is None else self.dtype)
        for rows in slabs(shape, dtype):
            values[rows.start : rows.stop] = self._read(name, advance, rows)
        return values

    def _read(self, name: str, advance: Callable[[int], None], rows: range | None = None) -> np.ndarray:
        values = self.source.read(name, rows)
        advance(values.nbytes)
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
    shape = source.shape(names.lm_head)
    if shape == source.shape(names.embedding) and all(
        np.array_equal(source.read(names.lm_head, rows), source.read(names.embedding, rows))
        for rows in slabs(shape, source.dtype(names.lm_head))
    ):
        return config
    logger.warning(
        "%s: the config ties the output head to the embedding, but there is a different head: using that one", where
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def transposed(matrix: np.ndarray) -> np.ndarray:
    """The transpose of a matrix, in row-major order."""
    copy = np.empty(matrix.shape[::-1], matrix.dtype)
    with _copying_threads() as threads:
        _transpose_into(copy, matrix, threads)
    return copy


def _copying_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))


def _transpose_into(place: np.ndarray, matrix: np.ndarray, threads: ThreadPoolExecutor) -> None:
    """Writes the transpose of a matrix to a place of its shape.

    In blocks that fit a cache, several at once: an array that is read along one axis and written along the other is slow.
    """
    source = matrix.T

    def copy_rows(start: int) -> None:
        rows = slice(start, start + _BLOCK_ROWS)
        for column in range(0, source.shape[1], _BLOCK_COLUMNS):
            columns = slice(column, column + _BLOCK_COLUMNS)
            place[rows, columns] = source[rows, columns]

    for _ in threads.map(copy_rows, range(0, source.shape[0], _BLOCK_ROWS)):
        pass
