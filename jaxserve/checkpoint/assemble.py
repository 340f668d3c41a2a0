"""From a file's tensors to the parameters' fused layout (see `jaxserve.models.params`), checked before any is read."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.families import TensorNames
from jaxserve.checkpoint.tensor_source import TensorSource
from jaxserve.config import ModelConfig
from jaxserve.models.params import LayerParams, LlamaParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembler:
    """Reads one model. `checked` makes one; then `params` gives the arrays.

    Attributes:
        config: as asked, but for `tie_word_embeddings`, which says what the file really holds.
        total_bytes: of all tensors that will be read.
    """

    source: TensorSource
    names: TensorNames
    config: ModelConfig
    dtype: np.dtype | None
    total_bytes: int

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
        config = _settle_head(source, names, config, where, present)
        expected = expected_shapes(names, config)
        for name, shape in expected.items():
            if name not in present:
                raise CheckpointError(f"{where}: tensor {name!r} is missing: fetch the checkpoint again")
            if source.shape(name) != shape:
                raise CheckpointError(
                    f"{where}: tensor {name!r} has shape {source.shape(name)}, but its config says {shape}"
                )
        ignored = (*names.ignored, names.lm_head)
        strangers = sorted(name for name in present - set(expected) if not name.endswith(ignored))
        if strangers:
            more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
            raise CheckpointError(
                f"{where}: tensors {strangers[:3]}{more} are not part of this architecture, and cannot just be dropped"
            )
        total = sum(source.dtype(name).itemsize * int(np.prod(shape)) for name, shape in expected.items())
        return Assembler(source, names, config, dtype, total)

    def params(self, advance: Callable[[int], None]) -> LlamaParams:
        """All arrays, as NumPy. `advance` is told the bytes that were read."""
        layers = tuple(self._layer(layer, advance) for layer in range(self.config.num_layers))
        head = None
        if not self.config.tie_word_embeddings:
            head = self._weight(self.names.lm_head, advance, lambda head: head.T)
        return LlamaParams(
            embedding=self._weight(self.names.embedding, advance),
            layers=layers,
            final_norm=self._norm(self.names.final_norm, advance),
            lm_head=head,
        )

    def _layer(self, layer: int, advance: Callable[[int], None]) -> LayerParams:
        config, name = self.config, self.names.in_layer
        kv_heads, group, head_dim = config.num_kv_heads, config.group_size, config.head_dim

        def fuse_qkv(part: str) -> np.ndarray:
            pieces = [self._read(name(layer, module, part), advance) for module in ("q", "k", "v")]
            by_head = [piece.reshape(kv_heads, -1, head_dim, *piece.shape[1:]) for piece in pieces]
            return self._cast(_concatenate(by_head, axis=1))  # [kv_heads, group + 2, head_dim, ...]

        def stack_gate_up(part: str) -> np.ndarray:
            pieces = [self._read(name(layer, module, part), advance) for module in ("gate", "up")]
            return self._cast(_concatenate([piece[None] for piece in pieces], axis=0))  # [2, ffn, ...]

        return LayerParams(
            attention_norm=self._norm(name(layer, "attention_norm"), advance),
            wqkv=_contiguous(fuse_qkv("weight").transpose(3, 0, 1, 2)),
            bqkv=fuse_qkv("bias") if config.attention_bias else None,
            q_norm=self._norm(name(layer, "q_norm"), advance) if config.qk_norm else None,
            k_norm=self._norm(name(layer, "k_norm"), advance) if config.qk_norm else None,
            wo=self._weight(
                name(layer, "o"), advance, lambda wo: wo.T.reshape(kv_heads, group, head_dim, config.hidden_size)
            ),
            bo=self._weight(name(layer, "o", "bias"), advance) if config.attention_output_bias else None,
            mlp_norm=self._norm(name(layer, "mlp_norm"), advance),
            w_gate_up=_contiguous(stack_gate_up("weight").transpose(2, 0, 1)),
            b_gate_up=stack_gate_up("bias") if config.mlp_bias else None,
            w_down=self._weight(name(layer, "down"), advance, lambda down: down.T),
            b_down=self._weight(name(layer, "down", "bias"), advance) if config.mlp_bias else None,
        )

    def _weight(
        self,
        name: str,
        advance: Callable[[int], None],
        arrange: Callable[[np.ndarray], np.ndarray] = lambda values: values,
    ) -> np.ndarray:
        return _contiguous(arrange(self._cast(self._read(name, advance))))

    def _norm(self, name: str, advance: Callable[[int], None]) -> np.ndarray:
        return _contiguous(self._read(name, advance))

    def _read(self, name: str, advance: Callable[[int], None]) -> np.ndarray:
        values = self.source.read(name)
        advance(self.source.dtype(name).itemsize * values.size)
        return values

    def _cast(self, values: np.ndarray) -> np.ndarray:
        return values if self.dtype is None else values.astype(self.dtype, copy=False)


def expected_shapes(names: TensorNames, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a file must hold for this config, with its shape there ([out, in] for matrices)."""
    hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {names.embedding: (config.vocab_size, hidden), names.final_norm: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[names.lm_head] = (config.vocab_size, hidden)
    matrices = {
        "q": (q_size, hidden), "k": (kv_size, hidden), "v": (kv_size, hidden), "o": (hidden, q_size),
        "gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn),
    }  # fmt: skip
    has_bias = {
        **dict.fromkeys(("q", "k", "v"), config.attention_bias),
        "o": config.attention_output_bias,
        **dict.fromkeys(("gate", "up", "down"), config.mlp_bias),
    }
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


def _concatenate(pieces: list[np.ndarray], axis: int) -> np.ndarray:
    """In the dtype that holds every piece without loss."""
    dtype = pieces[0].dtype
    for piece in pieces[1:]:
        dtype = np.promote_types(dtype, piece.dtype)
    return np.concatenate([piece.astype(dtype, copy=False) for piece in pieces], axis=axis)


def _contiguous(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values)
