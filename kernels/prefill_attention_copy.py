"""The part of the Hopper prefill kernel that copies: queries and KV pages to shared memory, float8 pages widened."""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from jaxserve.kernels.prefill_attention_tiles import Tile, column_group, kv_blocks

RAW_STAGES = 2


def copy_tile(
    q_ref, k_pages_ref, v_pages_ref, layer_ref, page_table_ref, tile: Tile,
    *, q_smem, k_smem, v_smem, q_ready, k_ready, v_ready, k_free, v_free, **_,
) -> None:  # fmt: skip
    """Copy the tile's queries, then KV blocks as the computing warpgroups free their places."""
    stages, kv_block, _ = k_smem.shape
    first_block, end_block = kv_blocks(tile, kv_block)
    steps = end_block - first_block
    kv_head = _copy_queries(q_ref, k_pages_ref.shape[3], tile, q_smem, q_ready)
    layer = layer_ref[0]

    def copy_block(step: Array, _: None) -> None:
        stage = lax.rem(step, jnp.int32(stages))
        pages = _page_ids(page_table_ref, tile, first_block + step, kv_block, k_pages_ref)
        for pages_ref, smem, ready, free in (
            (k_pages_ref, k_smem, k_ready, k_free),
            (v_pages_ref, v_smem, v_ready, v_free),
        ):
            pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, free.at[stage]))
            _copy_pages(pages_ref, layer, pages, kv_head, smem.at[stage], ready.at[stage])

    lax.fori_loop(0, steps, copy_block, None)
    _await_free(steps, stages, k_free, v_free)


def copy_and_widen_tile(
    q_ref, k_pages_ref, v_pages_ref, layer_ref, page_table_ref, tile: Tile,
    *, q_smem, k_smem, v_smem, raw_k_smem, raw_v_smem, q_ready, k_ready, v_ready, k_free, v_free,
    raw_k_ready, raw_v_ready, **_,
) -> None:  # fmt: skip
    """Like `copy_tile`, for a float8 cache: the tensor cores want both sides in one type, so widen on the way."""
    stages, kv_block, _ = k_smem.shape
    first_block, end_block = kv_blocks(tile, kv_block)
    steps = end_block - first_block
    kv_head = _copy_queries(q_ref, k_pages_ref.shape[3], tile, q_smem, q_ready)
    layer = layer_ref[0]

    def fetch(step: Array) -> None:
        raw_stage = lax.rem(step, jnp.int32(RAW_STAGES))
        pages = _page_ids(page_table_ref, tile, first_block + step, kv_block, k_pages_ref)
        for pages_ref, raw, ready in (
            (k_pages_ref, raw_k_smem, raw_k_ready),
            (v_pages_ref, raw_v_smem, raw_v_ready),
        ):
            _copy_pages(pages_ref, layer, pages, kv_head, raw.at[raw_stage], ready.at[raw_stage])

    def widen_block(step: Array, _: None) -> None:
        pl.when(step + 1 < steps)(functools.partial(fetch, step + 1))
        stage, raw_stage = lax.rem(step, jnp.int32(stages)), lax.rem(step, jnp.int32(RAW_STAGES))
        for raw, raw_ready, wide, ready, free in (
            (raw_k_smem, raw_k_ready, k_smem, k_ready, k_free),
            (raw_v_smem, raw_v_ready, v_smem, v_ready, v_free),
        ):
            plgpu.barrier_wait(raw_ready.at[raw_stage])
            pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, free.at[stage]))
            _widen(raw.at[raw_stage], wide.at[stage])
            plgpu.barrier_arrive(ready.at[stage])

    pl.when(steps > 0)(functools.partial(fetch, jnp.int32(0)))
    lax.fori_loop(0, steps, widen_block, None)
    _await_free(steps, stages, k_free, v_free)


def _copy_queries(q_ref, kv_heads: int, tile: Tile, q_smem, q_ready) -> Array:
    """Start copying the tile's queries, rows ordered [head, token]; returns the tile's KV head."""
    tile_heads = q_ready.dtype.num_arrivals
    tile_tokens = q_smem.shape[0] // tile_heads
    first_head = lax.axis_index("heads") * tile_heads
    for head in range(tile_heads):
        plgpu.copy_gmem_to_smem(
            q_ref.at[pl.ds(tile.start, tile_tokens), first_head + head],
            q_smem.at[pl.ds(head * tile_tokens, tile_tokens)],
            q_ready,
        )
    return lax.div(first_head, jnp.int32(q_ref.shape[1] // kv_heads))


def _page_ids(page_table_ref, tile: Tile, block: Array, kv_block: int, k_pages_ref) -> list[Array]:
    """The ids of a block's pages. Slots behind the row's end may hold any number; what they name is never used."""
    _, pages, page_size, _, _ = k_pages_ref.shape
    pages_per_block = kv_block // page_size
    last_slot = page_table_ref.shape[1] - 1
    slots = [jnp.minimum(block * pages_per_block + i, last_slot) for i in range(pages_per_block)]
    return [jnp.clip(page_table_ref[tile.row, slot], 0, pages - 1) for slot in slots]


def _copy_pages(pages_ref, layer: Array, pages: list[Array], kv_head: Array, block_smem, ready) -> None:
    page_size = pages_ref.shape[2]
    for i, page in enumerate(pages):
        plgpu.copy_gmem_to_smem(
            pages_ref.at[layer, page, :, kv_head], block_smem.at[pl.ds(i * page_size, page_size)], ready
        )


def _widen(raw_block, wide_block) -> None:
    """Convert a [kv_block, head_dim] float8 block in shared memory."""
    kv_block, head_dim = wide_block.shape
    columns = column_group(head_dim)
    for row in range(0, kv_block, 64):
        for column in range(0, head_dim, columns):
            part = pl.ds(row, 64), pl.ds(column, columns)
            raw_part = raw_block.at[part]
            values = plgpu.load(raw_part, layout=plgpu.Layout.WGMMA_UPCAST_2X)  # pyright: ignore[reportCallIssue] (jax 0.10)
            wide_block.at[part][...] = values.astype(wide_block.dtype)
    plgpu.commit_smem()


def _await_free(steps: Array, stages: int, k_free, v_free) -> None:
    """Wait until the last blocks were used, so that no barrier is left with an arrival that nobody saw."""

    def drain(step: Array, _: None) -> None:
        stage = lax.rem(step, jnp.int32(stages))
        plgpu.barrier_wait(k_free.at[stage])
        plgpu.barrier_wait(v_free.at[stage])

    lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)
