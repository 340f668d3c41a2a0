"""The parts of a decoder layer that are not attention."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxserve.sharding.collectives import Collectives


def rms_norm(x: Float[Array, "*rows size"], weight: Float[Array, " size"], eps: float) -> Float[Array, "*rows size"]:
    """Root-mean-square norm (https://arxiv.org/abs/1910.07467) in float32; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return (wide * scale * weight).astype(x.dtype)


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
