"""The parts of a decoder layer that are not attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxserve.models.params import LayerParams
from jaxserve.sharding.collectives import Collectives


def rms_norm(x: Float[Array, "*rows size"], weight: Float[Array, " size"], eps: float) -> Float[Array, "*rows size"]:
    """Root-mean-square norm (https://arxiv.org/abs/1910.07467) in float32; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return (wide * scale * weight).astype(x.dtype)


def add_bias(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias[None].astype(x.dtype)


def embed(
    embedding: Float[Array, "vocab_shard hidden"], token_ids: Int32[Array, " tokens"], collectives: Collectives
) -> Float[Array, "tokens hidden"]:
    """Rows of the embedding, whose vocabulary may be cut over devices: each gives the rows it has, zeros elsewhere."""
    if collectives.size == 1:
        return jnp.take(embedding, token_ids, axis=0, mode="clip")
    shard = embedding.shape[0]
    local = token_ids - collectives.index() * shard
    mine = (local >= 0) & (local < shard)
    rows = jnp.take(embedding, local, axis=0, mode="clip")
    return collectives.all_reduce(jnp.where(mine[:, None], rows, jnp.zeros_like(rows)))


def swiglu_mlp(
    x: Float[Array, "tokens hidden"], layer: LayerParams, collectives: Collectives
) -> Float[Array, "tokens hidden"]:
    """down(silu(gate(x)) * up(x)), summed over devices (https://arxiv.org/abs/2002.05202)."""
    hidden, _, ffn = layer.w_gate_up.shape
    gate_up = (x @ layer.w_gate_up.reshape(hidden, 2 * ffn)).reshape(-1, 2, ffn)  # [tokens, 2, ffn]
    gate_up = add_bias(gate_up, layer.b_gate_up)
    activated = jax.nn.silu(gate_up[:, 0].astype(jnp.float32)) * gate_up[:, 1].astype(jnp.float32)
    return add_bias(collectives.all_reduce(activated.astype(x.dtype) @ layer.w_down), layer.b_down)
