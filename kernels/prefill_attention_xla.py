"""Prefill attention in plain XLA: the reference, the path for CPUs and the fall-back of `prefill_attention`.

The work follows the live rows and lengths: a loop over rows, over each row's query tiles, and over the KV blocks that
a tile can see. Softmax runs online over the KV blocks (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018), in float32, so that no score matrix larger than one tile by one KV block is ever held.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

# A score that a query may not see. Finite, because a query whose first KV block is all masked would otherwise compute
# -inf minus -inf.
_MASKED_SCORE = -1e30
_QUERY_TILE = 32
_KV_BLOCK = 64


def prefill_attention_xla(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    layer: Int32[Array, ""],
    page_table: Int32[Array, "rows pages_per_seq"],
    query_starts: Int32[Array, "rows+1"],
    kv_lens: Int32[Array, "rows"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: Float[Array, ""] | None = None,
    v_scale: Float[Array, ""] | None = None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Compute what `prefill_attention` documents, from arguments that it has validated."""
    tokens, q_heads, head_dim = q.shape
    kv_heads = k_pages.shape[3]
    query_tile = min(_QUERY_TILE, tokens)
    score_scale = jnp.float32(scale) if k_scale is None else jnp.float32(scale) * k_scale
    # The last tile may reach past the tokens; without the padding its slice would be shifted back.
    padded_q = jnp.pad(q, ((0, query_tile), (0, 0), (0, 0)))

    def attend_row(row: Array, out: Array) -> Array:
        query_start = query_starts[row]
        query_len = query_starts[row + 1] - query_start
        context_len = kv_lens[row] - query_len

        def attend_tile(tile: Array, out: Array) -> Array:
            offset = tile * query_tile
            q_tile = lax.dynamic_slice_in_dim(padded_q, query_start + offset, query_tile)
            result = _attend_tile(
                q_tile.reshape(query_tile, kv_heads, q_heads // kv_heads, head_dim).astype(jnp.float32) * score_scale,
                k_pages,
                v_pages,
                layer,
                page_table[row],
                first_position=context_len + offset,
                end_position=context_len + jnp.minimum(offset + query_tile, query_len),
                window=window,
                softcap=softcap,
            )
            if v_scale is not None:
                result = result * v_scale
            # What this tile holds past the row's end belongs to the next row, or is padding: keep what is there.
            live = offset + lax.iota(jnp.int32, query_tile) < query_len
            before = lax.dynamic_slice_in_dim(out, query_start + offset, query_tile)
            after = jnp.where(live[:, None, None], result.reshape(q_tile.shape).astype(out.dtype), before)
            return lax.dynamic_update_slice_in_dim(out, after, query_start + offset, axis=0)

        return lax.fori_loop(0, -(-query_len // query_tile), attend_tile, out)

    return lax.fori_loop(0, kv_lens.shape[0], attend_row, jnp.zeros_like(padded_q))[:tokens]


def _attend_tile(
    q_tile: Float[Array, "query_tile kv_heads group head_dim"],  # float32, scaled
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    layer: Int32[Array, ""],
    page_ids: Int32[Array, "pages_per_seq"],
    *,
    first_position: Int32[Array, ""],  # of the tile's first query
    end_position: Int32[Array, ""],  # one past the tile's last live query
    window: int | None,
    softcap: float | None,
) -> Float[Array, "query_tile kv_heads group head_dim"]:
    """Attention of one tile of one row's queries over the KV that any of them can see, float32."""
    query_tile, kv_heads, group, head_dim = q_tile.shape
    page_size = k_pages.shape[2]
    pages_per_block = max(1, min(_KV_BLOCK // page_size, page_ids.shape[0]))
    kv_block = pages_per_block * page_size
    query_positions = first_position + lax.iota(jnp.int32, query_tile)
    first_visible = jnp.int32(0) if window is None else jnp.maximum(first_position - (window - 1), 0)

    def attend_block(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, weighted = carry
        slots = block * pages_per_block + lax.iota(jnp.int32, pages_per_block)
        ids = page_ids.at[slots].get(mode="clip")
        positions = block * kv_block + lax.iota(jnp.int32, kv_block)
        written = (positions >= first_visible) & (positions < end_position)
        k_block = _read_pages(k_pages, layer, ids, written)
        v_block = _read_pages(v_pages, layer, ids, written)

        scores = jnp.einsum("qhgd,khd->hgqk", q_tile, k_block, precision=lax.Precision.HIGHEST)
        if softcap is not None:
            scores = jnp.tanh(scores / softcap) * softcap
        visible = positions[None, :] <= query_positions[:, None]
        if window is not None:
            visible &= positions[None, :] > query_positions[:, None] - window
        scores = jnp.where(visible[None, None], scores, _MASKED_SCORE)

        new_maximum = jnp.maximum(maximum, scores.max(axis=-1))
        weights = jnp.where(visible[None, None], jnp.exp(scores - new_maximum[..., None]), 0.0)
        shrink = jnp.exp(maximum - new_maximum)
        update = jnp.einsum("hgqk,khd->hgqd", weights, v_block, precision=lax.Precision.HIGHEST)
        return new_maximum, total * shrink + weights.sum(axis=-1), weighted * shrink[..., None] + update

    rows_shape = (kv_heads, group, query_tile)
    carry = (
        jnp.full(rows_shape, _MASKED_SCORE, jnp.float32),
        jnp.zeros(rows_shape, jnp.float32),
        jnp.zeros((*rows_shape, head_dim), jnp.float32),
    )
    _, total, weighted = lax.fori_loop(first_visible // kv_block, -(-end_position // kv_block), attend_block, carry)
    # Queries past the row's end may have seen nothing; the caller drops them, but 0 / 0 would trip NaN checks.
    normalised = weighted / jnp.where(total > 0.0, total, 1.0)[..., None]
    return normalised.transpose(2, 0, 1, 3)


def _read_pages(
    pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    layer: Int32[Array, ""],
    ids: Int32[Array, "pages_per_block"],
    written: Array,  # [pages_per_block * page_size] bool
) -> Float[Array, "kv_block kv_heads head_dim"]:
    """Gather pages as float32, with zeros where nothing was written: NaN there would survive a weight of 0."""
    block = pages.at[layer, ids].get(mode="clip")  # [pages_per_block, page_size, kv_heads, head_dim]
    block = block.reshape(-1, *block.shape[2:]).astype(jnp.float32)
    return jnp.where(written[:, None, None], block, 0.0)
