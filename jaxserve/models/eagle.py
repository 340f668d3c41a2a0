"""EAGLE and EAGLE-3 heads: one decoder layer that goes on with the hidden states of the model that is served.

EAGLE (Li et al., 2024, https://arxiv.org/abs/2401.15077) guesses the next hidden state of the model, after its final norm,
from this one and from the embedding of the token that was drawn of it, and leaves the scores to the model's own head.
EAGLE-3 (Li et al., 2025, https://arxiv.org/abs/2503.01840) takes in hidden states of three depths of the model and has a
head of its own, perhaps over the commoner tokens alone. What is called EAGLE-3.1 (2026,
https://arxiv.org/abs/2605.09992) norms the hidden states that it takes in, and those that it goes on with.

A *pair* is a hidden state of place p and the token of place p + 1. Its keys and values lie at place p, in pages with the
numbers of the model's own, so that the same page table serves both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxserve.config import ModelConfig
from jaxserve.kernels.add_rms_norm import add_rms_norm
from jaxserve.kernels.rms_norm_xla import rms_norm
from jaxserve.models import llama
from jaxserve.models.batch import Batch
from jaxserve.models.embedding import embed
from jaxserve.models.kv_cache import KVCache
from jaxserve.models.linear import column_parallel, head_scores
from jaxserve.models.param_spec import ParamSpec
from jaxserve.models.params import LayerParams, LlamaParams, param_specs
from jaxserve.sharding.collectives import Collectives


@dataclass(frozen=True)
class EagleConfig:
    """Sizes of a head.

    Attributes:
        version: 1: EAGLE; 3: EAGLE-3.
        layer: of its decoder layer; its vocabulary is the model's.
        target_hidden_size: of the model.
        tap_layers: layers of the model whose inputs it takes in (EAGLE-3); (): the hidden state after the final norm.
        draft_vocab_size: tokens that its own head has scores for; None: it has no head, and the model's serves.
        has_embedding: it has an embedding of its own; otherwise the model's serves.
        has_bias: of the product that takes the hidden states in.
        norms_residual: the hidden state is normed before it begins the residual stream, not beside it (EAGLE-3).
        input_norm: how the model's hidden states are normed before `fc`: all of a token's as one vector, or each by itself;
            None: they are not.
        norms_output: the next pair takes in the hidden state after the final norm, not before it.

    Raises:
        ValueError: sizes that do not go together.
    """

    version: Literal[1, 3]
    layer: ModelConfig
    target_hidden_size: int
    tap_layers: tuple[int, ...] = ()
    draft_vocab_size: int | None = None
    has_embedding: bool = False
    has_bias: bool = False
    norms_residual: bool = False
    input_norm: Literal["together", "each"] | None = None
    norms_output: bool = False

    def __post_init__(self) -> None:
        if self.layer.num_layers != 1 or self.layer.quantization is not None:
            raise ValueError(f"an EAGLE head has one layer that is not quantized, not {self.layer}")
        if (self.version == 3) != bool(self.tap_layers) or (self.version == 3) != (self.draft_vocab_size is not None):
            raise ValueError(
                f"version={self.version} with tap_layers={self.tap_layers}, draft_vocab_size={self.draft_vocab_size}: "
                "EAGLE-3 has both, EAGLE neither"
            )
        if self.version == 1 and (self.input_norm is not None or self.norms_output):
            raise ValueError(f"input_norm={self.input_norm!r}, norms_output={self.norms_output}: EAGLE has neither")
        shares = self.version == 1 or not self.has_embedding
        if shares and self.layer.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size={self.layer.hidden_size} of the head must be the model's, {self.target_hidden_size}"
            )

    @property
    def num_inputs(self) -> int:
        """Elements that `fc` takes in."""
        if self.version == 1:
            return 2 * self.layer.hidden_size
        return len(self.tap_layers) * self.target_hidden_size


@struct.dataclass
class EagleParams:
    """A head. Leaves are arrays, or `ParamSpec`s where only the declaration is wanted.

    `layer.attention_norm` is None in EAGLE, and the norm over hidden states in EAGLE-3, whose `layer.wqkv` has twice as
    many inputs: the embedding, then the hidden state.
    """

    fc: Any  # [inputs, hidden]: of the embedding, then the hidden state; or of hidden states, that of the first layer first
    fc_bias: Any  # [hidden] or None
    embedding: Any  # [vocab, hidden] or None
    embedding_norm: Any  # [hidden] or None
    layer: LayerParams
    final_norm: Any  # [hidden] or None
    lm_head: Any  # [hidden, draft_vocab] or None
    token_ids: Any  # [draft_vocab] int32, the model's id of each token that the head has; or None
    input_norm: Any = None  # [inputs] or None


def default_tap_layers(num_layers: int) -> tuple[int, ...]:
    """Layers of the model whose inputs published EAGLE-3 heads take in."""
    return 2, num_layers // 2, num_layers - 3


def eagle_specs(config: EagleConfig) -> EagleParams:
    """The declaration of every array."""
    hidden, vocab = config.layer.hidden_size, config.layer.vocab_size
    norm = ParamSpec((hidden,), ("hidden",), None)
    layer = param_specs(config.layer).layers[0]
    if config.version == 1:
        layer = dataclasses.replace(layer, attention_norm=None)
    else:
        wqkv = dataclasses.replace(
            layer.wqkv, shape=(2 * hidden, *layer.wqkv.shape[1:]), standard_deviation=(2 * hidden) ** -0.5
        )
        layer = dataclasses.replace(layer, wqkv=wqkv)
    drafts = config.draft_vocab_size
    return EagleParams(
        fc=ParamSpec((config.num_inputs, hidden), ("inputs", "hidden"), config.num_inputs**-0.5),
        fc_bias=ParamSpec((hidden,), ("hidden",), 0.0) if config.has_bias else None,
        embedding=ParamSpec((vocab, hidden), ("vocab", "hidden"), 1.0) if config.has_embedding else None,
        embedding_norm=norm if config.version == 3 else None,
        layer=layer,
        final_norm=norm if config.version == 3 else None,
        lm_head=None if drafts is None else ParamSpec((hidden, drafts), ("hidden", "vocab"), hidden**-0.5),
        token_ids=None if drafts is None else ParamSpec((drafts,), ("draft_vocab",), 0.0, dtype="int32"),
        input_norm=None if config.input_norm is None else ParamSpec((config.num_inputs,), ("inputs",), None),
    )


def take_in(
    params: EagleParams, features: Float[Array, "tokens features"], *, config: EagleConfig
) -> Float[Array, "tokens hidden"]:
    """The hidden states of the head's first pairs, from the model's: EAGLE takes them as they are."""
    if params.embedding_norm is None:
        return features
    with jax.named_scope("eagle_fc"):
        if config.input_norm is not None:
            vectors = len(config.tap_layers) if config.input_norm == "each" else 1
            parts = features.reshape(-1, vectors, features.shape[1] // vectors)
            weights = params.input_norm.reshape(vectors, -1)
            normed = [rms_norm(parts[:, part], weights[part], config.layer.rms_norm_eps) for part in range(vectors)]
            features = jnp.concatenate(normed, axis=1)
        return column_parallel(features, params.fc, params.fc_bias)


def eagle_forward(
    params: EagleParams,
    target: LlamaParams,
    cache: KVCache,
    batch: Batch,
    hidden: Float[Array, "tokens hidden"],
    *,
    config: EagleConfig,
    collectives: Collectives,
) -> tuple[Float[Array, "tokens hidden"], KVCache]:
    """The head's guess of what follows each pair, and its cache with the pairs' keys and values written.

    Runs inside `jax.shard_map`, as `llama.forward`.

    Args:
        target: the model's arrays; `layers` is not looked at.
        batch: of pairs: the token is the one after the place that `positions` names.
        hidden: of each pair: what `take_in` gives, or what this function gave for the pair before.
    """
    embedding = target.embedding if params.embedding is None else params.embedding
    with jax.named_scope("eagle_embed"):
        tokens = embed(embedding, batch.token_ids, collectives)
    eps = config.layer.rms_norm_eps
    if params.embedding_norm is None:
        residual = column_parallel(jnp.concatenate([tokens, hidden], axis=1), params.fc, params.fc_bias)
        inputs = residual
    else:
        normed = rms_norm(hidden, params.layer.attention_norm, eps)
        residual = normed if config.norms_residual else hidden
        inputs = jnp.concatenate([rms_norm(tokens, params.embedding_norm, eps), normed], axis=1)
    stream, cache = llama.layer_of_normed(
        params.layer,
        jnp.int32(0),
        residual,
        inputs,
        cache,
        batch,
        llama.rotary_tables(batch, config=config.layer),
        config=config.layer,
        collectives=collectives,
    )
    guess = llama.stream_sum(stream)
    return (_final_norm(params, guess, config) if config.norms_output else guess), cache


def eagle_logits(
    params: EagleParams,
    target: LlamaParams,
    hidden: Float[Array, "rows hidden"],
    *,
    config: EagleConfig,
    collectives: Collectives,
) -> Float[Array, "rows vocab"]:
    """Float32 scores over the model's vocabulary, from what `eagle_forward` gave; -inf for tokens the head does not have."""
    vocab_size = config.layer.vocab_size
    if params.lm_head is None:
        return llama.logits(target, hidden, collectives=collectives)[:, :vocab_size]
    with jax.named_scope("eagle_lm_head"):
        normed = hidden if config.norms_output else _final_norm(params, hidden, config)
        scores = collectives.all_gather_last(head_scores(normed, params.lm_head))
        everything = jnp.full((hidden.shape[0], vocab_size), -jnp.inf, jnp.float32)
        return everything.at[:, params.token_ids].set(scores)


def _final_norm(
    params: EagleParams, hidden: Float[Array, "rows hidden"], config: EagleConfig
) -> Float[Array, "rows hidden"]:
    return add_rms_norm(hidden, jnp.zeros_like(hidden), params.final_norm, config.layer.rms_norm_eps)[1]
