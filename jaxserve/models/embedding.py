"""Rows of the embedding, on one device or cut over several."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.sharding.collectives import Collectives


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
