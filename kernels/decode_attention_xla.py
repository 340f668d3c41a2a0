"""Paged decode attention in plain XLA: the reference, the CPU path and the fall-back."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

# KV tokens per loop iteration, for every row of the batch. Measured on CPU: 128 and 256 are level, 512 leaves the cache.
TOKENS_PER_BLOCK = 128

# Stands for minus infinity in the running maximum: a row whose first block is wholly masked must not compute inf - inf.
LOWEST_SCORE = -1e30


def decode_attention_xla(
    q: Float[Array, "batch q_heads head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    layer: Int32[Array, ""],
    page_table: Int32[Array, "batch pages_per_seq"],
    kv_lens: Int32[Array, "batch"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: Float[Array, ""] | None = None,
    v_scale: Float[Array, ""] | None = None,
) -> Float[Array, "batch q_heads head_dim"]:
    """Attends with one query a row to the row's pages; arguments as in `decode_attention`, already validated.

    Loops over blocks of pages with the online softmax (Milakov and Gimelshein, arXiv:1805.02867) in float32. The loop
    runs from the first block that any live row's window reaches to the end of the longest row, so the work follows the
    rows and not the width of the page table.
    """
    batch, q_heads, head_dim = q.shape
    layers, pages, page_size, kv_heads, _ = k_pages.shape
    group = q_heads // kv_heads
    pages_per_block = max(1, TOKENS_PER_BLOCK // page_size)
    tokens_per_block = pages_per_block * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_per_block)))
    all_k = k_pages.reshape(layers * pages, page_size, kv_heads, head_dim)
    all_v = v_pages.reshape(layers * pages, page_size, kv_heads, head_dim)
    score_scale = jnp.float32(scale) if k_scale is None else jnp.float32(scale) * k_scale
    queries = (q.astype(jnp.float32) * score_scale).reshape(batch, kv_heads, group, head_dim)
    first_positions = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(kv_lens - window, 0)

    def attend_block(block, state):
        maximum, total, weighted = state
        page_ids = lax.dynamic_slice(table, (0, block * pages_per_block), (batch, pages_per_block))
        rows = jnp.clip(page_ids, 0, pages - 1) + layer * pages
        positions = block * tokens_per_block + jnp.arange(tokens_per_block, dtype=jnp.int32)[None, :]
        valid = (positions < kv_lens[:, None]) & (positions >= first_positions[:, None])  # [batch, tokens]
        # Tied to the loop counter: XLA's CPU compiler would otherwise widen the whole cache to float32 before the loop.
        block_k, block_v, _ = lax.optimization_barrier((all_k, all_v, block))
        k = _gather_tokens(block_k, rows)  # [batch, kv_heads, tokens, head_dim]
        v = jnp.where(valid[:, None, :, None], _gather_tokens(block_v, rows), 0.0)  # 0 * NaN would be NaN
        scores = jnp.einsum("bkgd,bktd->bkgt", queries, k)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        visible = valid[:, None, None, :]
        scores = jnp.where(visible, scores, LOWEST_SCORE)
        new_maximum = jnp.maximum(maximum, scores.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - new_maximum[..., None]), 0.0)
        decay = jnp.exp(maximum - new_maximum)
        weighted = weighted * decay[..., None] + jnp.einsum("bkgt,bktd->bkgd", weights, v)
        return new_maximum, total * decay + weights.sum(axis=-1), weighted

    # A padding row must not pull the loop's start down to position zero.
    start = jnp.where(kv_lens > 0, first_positions, jnp.iinfo(jnp.int32).max).min() // tokens_per_block
    stop = (kv_lens.max() + tokens_per_block - 1) // tokens_per_block
    _, total, weighted = lax.fori_loop(
        start,
        stop,
        attend_block,
        (
            jnp.full((batch, kv_heads, group), LOWEST_SCORE, jnp.float32),
            jnp.zeros((batch, kv_heads, group), jnp.float32),
            jnp.zeros((batch, kv_heads, group, head_dim), jnp.float32),
        ),
    )
    if v_scale is not None:
        weighted = weighted * v_scale
    total = jnp.where(total > 0, total, 1.0)  # padding rows: 0 / 1
    return (weighted / total[..., None]).reshape(batch, q_heads, head_dim).astype(q.dtype)


def _gather_tokens(
    pages: Float[Array, "pages page_size kv_heads head_dim"], page_ids: Int32[Array, "batch pages_per_block"]
) -> Float[Array, "batch kv_heads tokens head_dim"]:
    """The tokens of the pages in float32, with the heads in front so that the products are batched over them."""
    _, page_size, kv_heads, head_dim = pages.shape
    batch, pages_per_block = page_ids.shape
    tokens = pages.at[page_ids].get(mode="promise_in_bounds")  # [batch, pages_per_block, page_size, kv_heads, head_dim]
    tokens = tokens.reshape(batch, pages_per_block * page_size, kv_heads, head_dim)
    # Without the barrier the CPU's dot product reads the gather element by element.
    return lax.optimization_barrier(tokens.transpose(0, 2, 1, 3).astype(jnp.float32))
