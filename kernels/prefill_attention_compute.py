"""The part of the Hopper prefill kernel that multiplies: online softmax over a tile's KV blocks, and the store."""

import dataclasses
import functools
import math

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from jaxserve.kernels.grid_barrier import count_in
from jaxserve.kernels.prefill_attention_tiles import Tile, column_group, divide_up, kv_blocks, num_parts

WARPGROUP_ROWS = 64
_LOG2_E = math.log2(math.e)
# A score that a query may not see, and the floor of the running maximum far above it: a KV block of which a query
# sees nothing adds exp2(-1e30 + 1e20) = 0, where two infinities would give NaN.
_MASKED_SCORE = -1e30
_LOWEST_MAXIMUM = -1e20


@dataclasses.dataclass(frozen=True)
class Options:
    """What is fixed when the kernel is compiled."""

    tile_tokens: int
    tile_heads: int
    scale: float
    window: int | None
    softcap: float | None
    tiles: int  # CUDA blocks of each group of heads
    groups_of_heads: int
    blocks_at_once: int  # as in `locate_tile`
    counts: bool  # whether who is last to leave a part is counted; else it is who has the first, which begins last


def compute_tile(
    out_ref, scales_ref, tile: Tile, options: Options,
    *, q_smem, out_smem, k_smem, v_smem, q_ready, k_ready, v_ready, k_free, v_free, **sharing,
) -> None:  # fmt: skip
    """Attend with this warpgroup's 64 rows of the tile, and store the result."""
    rows = pl.ds(lax.axis_index("warpgroup") * WARPGROUP_ROWS, WARPGROUP_ROWS)
    shape = (WARPGROUP_ROWS, q_smem.shape[1])
    first_block, end_block = kv_blocks(tile, k_smem.shape[1])
    v_scale = scales_ref[1]

    def store(acc: Array, maximum: Array, total: Array) -> None:
        del maximum
        # Padding sees nothing: its total is 0, and so is what it gives.
        factor = jnp.where(total > 0.0, v_scale / total, 0.0)
        _store(
            acc * lax.broadcast_in_dim(factor, acc.shape, [0]), out_ref=out_ref, tile=tile, options=options,
            tiled_smem=q_smem.at[rows], plain_smem=out_smem.at[rows],
        )  # fmt: skip

    finish = store
    if options.blocks_at_once:
        shared = {name: sharing[name] for name in ("parts_ref", "part_rows_ref", "counters_ref", "arrival")}
        finish = functools.partial(_share_out, store, tile, k_smem.shape[1], options, **shared)
    plgpu.barrier_wait(q_ready)

    @pl.when(end_block > first_block)
    def _():
        attend = functools.partial(
            _attend, q_rows=q_smem.at[rows], scales_ref=scales_ref, tile=tile, options=options, k_smem=k_smem,
            v_smem=v_smem, k_ready=k_ready, v_ready=v_ready, k_free=k_free, v_free=v_free,
        )  # fmt: skip
        finish(*pl.run_scoped(attend, plgpu.WGMMAAccumulatorRef(shape, jnp.float32)))

    # Whoever has no part of a tile that is cut into fewer leaves it to the others.
    @pl.when((end_block <= first_block) & (tile.part == 0))
    def _():
        nothing = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        finish(nothing, _row_vector(_LOWEST_MAXIMUM), _row_vector(0.0))


def _share_out(
    store, tile: Tile, kv_block: int, options: Options, acc: Array, maximum: Array, total: Array,
    *, parts_ref, part_rows_ref, counters_ref, arrival,
) -> None:  # fmt: skip
    """Store a tile that one CUDA block has; leave a part of one in global memory, and join all once none is missing.

    So nobody waits for another. As parts are joined in their order, whoever does it, every run gives the same bits.
    """
    count, heads = num_parts(tile, kv_block), lax.axis_index("heads")

    def place(part: Array) -> Array:
        return (tile.number + part * tile.stride) * options.groups_of_heads + heads

    @pl.when(count == 1)
    def _():
        store(acc, maximum, total)

    @pl.when(count > 1)
    def _():
        own = place(tile.part)
        parts_ref.at[own][...] = acc
        part_rows_ref.at[own, 0][...] = maximum
        part_rows_ref.at[own, 1][...] = total
        if options.counts:
            counter = counters_ref.at[pl.ds(place(jnp.int32(0)), 1)]
            is_last = count_in(counter, arrival) == count - 1  # pyright: ignore[reportCallIssue] (the decorator passes the context)
        else:
            is_last = tile.part == 0

        @pl.when(is_last)
        def _():
            store(*_join_parts(count, place, parts_ref, part_rows_ref))


def _join_parts(count: Array, place, parts_ref, part_rows_ref) -> tuple[Array, Array, Array]:
    """What all parts of a tile come to: weighted values, each row's maximum, and its total."""

    def load(ref, layout) -> Array:
        return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue] (jax 0.10)

    def add(part: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, maximum, total = state
        other_acc = load(parts_ref.at[place(part)], plgpu.Layout.WGMMA)
        other_maximum, other_total = (
            load(part_rows_ref.at[place(part), row], plgpu.Layout.WGMMA.reduce(1)) for row in range(2)
        )
        largest = jnp.maximum(maximum, other_maximum)
        own_share, other_share = jnp.exp2(maximum - largest), jnp.exp2(other_maximum - largest)
        acc = acc * lax.broadcast_in_dim(own_share, acc.shape, [0])
        acc = acc + other_acc * lax.broadcast_in_dim(other_share, acc.shape, [0])
        return acc, largest, total * own_share + other_total * other_share

    shape = parts_ref.shape[1:]
    nothing = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(0, count, add, (nothing, _row_vector(_LOWEST_MAXIMUM), _row_vector(0.0)))


def _attend(
    acc_ref, *, q_rows, scales_ref, tile: Tile, options: Options, k_smem, v_smem, k_ready, v_ready, k_free, v_free
) -> tuple[Array, Array, Array]:
    """Go through the CUDA block's KV blocks; the softmax of a block runs before the products of its weights and values.

    These are started together with the next block's scores, so that the tensor cores get more work at a time.

    Returns:
        Weighted values that are to be divided by their total, each row's maximum, and its total.
    """
    stages, kv_block, _ = k_smem.shape
    dtype = q_rows.dtype
    first_block, end_block = kv_blocks(tile, kv_block)
    first_full, end_full = _unmasked_blocks(tile, kv_block, options.window)
    k_scale = scales_ref[0]
    # Scores times `factor` are in units of log2: exp2 is what the hardware has.
    factor = k_scale * (options.scale * _LOG2_E) if options.softcap is None else options.softcap * _LOG2_E

    def finish_scores(scores: Array, block: Array, masked: bool) -> Array:
        if options.softcap is not None:
            scores = jnp.tanh(scores * (k_scale * (options.scale / options.softcap)))
        return _mask(scores, block, tile, options) if masked else scores

    def stage_of(block: Array) -> Array:
        return lax.rem(block - first_block, jnp.int32(stages))

    def first_product(scores_ref) -> Array:
        plgpu.wgmma(scores_ref, q_rows, k_smem.at[0].transpose((1, 0)))
        return scores_ref[...]

    plgpu.barrier_wait(k_ready.at[0])
    scores = pl.run_scoped(first_product, plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, kv_block), jnp.float32))
    plgpu.barrier_arrive(k_free.at[0])
    scores = finish_scores(scores, first_block, masked=True)
    weights, maximum, total, _ = _softmax_step(scores, _row_vector(_LOWEST_MAXIMUM), _row_vector(0.0), factor, dtype)

    def step(block: Array, carry: tuple[Array, Array, Array], masked: bool) -> tuple[Array, Array, Array]:
        weights, maximum, total = carry
        stage, previous = stage_of(block), stage_of(block - 1)
        plgpu.barrier_wait(k_ready.at[stage])
        plgpu.barrier_wait(v_ready.at[previous])
        if options.window is not None:
            _clear_unseen(v_smem.at[previous], block - 1, tile)

        def products(scores_ref) -> Array:
            # In this order: an operand in registers may not be made while other products are in flight.
            plgpu.wgmma(acc_ref, weights, v_smem.at[previous])
            plgpu.wgmma(scores_ref, q_rows, k_smem.at[stage].transpose((1, 0)))
            return scores_ref[...]

        scores = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, kv_block), jnp.float32))
        plgpu.barrier_arrive(v_free.at[previous])
        plgpu.barrier_arrive(k_free.at[stage])
        scores = finish_scores(scores, block, masked)
        weights, maximum, total, shrink = _softmax_step(scores, maximum, total, factor, dtype)
        acc_ref[...] = acc_ref[...] * lax.broadcast_in_dim(shrink, acc_ref.shape, [0])
        return weights, maximum, total

    carry = (weights, maximum, total)
    next_block = first_block + 1
    if options.window is not None:
        end_low = jnp.clip(first_full, next_block, end_block)
        carry = lax.fori_loop(next_block, end_low, functools.partial(step, masked=True), carry)
        next_block = end_low
    start_high = jnp.clip(end_full, next_block, end_block)
    carry = lax.fori_loop(next_block, start_high, functools.partial(step, masked=False), carry)
    weights, maximum, total = lax.fori_loop(start_high, end_block, functools.partial(step, masked=True), carry)

    last = stage_of(end_block - 1)
    plgpu.barrier_wait(v_ready.at[last])
    _clear_unseen(v_smem.at[last], end_block - 1, tile)
    plgpu.wgmma(acc_ref, weights, v_smem.at[last])
    acc = acc_ref[...]
    plgpu.barrier_arrive(v_free.at[last])
    return acc, maximum, total


def _unmasked_blocks(tile: Tile, kv_block: int, window: int | None) -> tuple[Array, Array]:
    """The first and one past the last of the blocks that every live token sees whole."""
    end_full = lax.div(tile.first_position + tile.live_start + 1, jnp.int32(kv_block))
    if window is None:
        return jnp.int32(0), end_full
    return divide_up(jnp.maximum(tile.end_visible - window, 0), kv_block), end_full


def _row_vector(value: float) -> Array:
    return plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def _softmax_step(
    scores: Array, maximum: Array, total: Array, factor: Array | float, dtype: jnp.dtype
) -> tuple[Array, Array, Array, Array]:
    """Weights of one KV block; the running maximum (times factor) and total; what to multiply earlier sums by."""
    new_maximum = jnp.maximum(maximum, scores.max(axis=1) * factor)
    shrink = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_maximum, scores.shape, [0]))
    return weights.astype(dtype), new_maximum, total * shrink + weights.sum(axis=1), shrink


def _mask(scores: Array, block: Array, tile: Tile, options: Options) -> Array:
    """Replace the scores of positions that a row's token does not see."""
    row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
    token = (row + lax.axis_index("warpgroup") * WARPGROUP_ROWS) & (options.tile_tokens - 1)
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    column = column + (block * scores.shape[1] - tile.first_position)
    visible = column <= token
    if options.window is not None:
        visible = visible & (column > token - options.window)
    return jnp.where(visible, scores, _MASKED_SCORE)


def _clear_unseen(v_block_ref, block: Array, tile: Tile) -> None:
    """Zero the values that no live token sees: NaN there would survive a weight of 0.

    Every computing warpgroup does this for itself. They write the same bits, so they need not wait for each other.
    """
    kv_block, head_dim = v_block_ref.shape
    columns = column_group(head_dim)
    for first_row in range(0, kv_block, WARPGROUP_ROWS):
        position = block * kv_block + first_row

        @pl.when((position < tile.first_visible) | (position + WARPGROUP_ROWS > tile.end_visible))
        def _(first_row=first_row, position=position):
            for column in range(0, head_dim, columns):
                part = v_block_ref.at[pl.ds(first_row, WARPGROUP_ROWS), pl.ds(column, columns)]
                values = plgpu.load(part, layout=plgpu.Layout.WGMMA)  # pyright: ignore[reportCallIssue] (jax 0.10)
                positions = position + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
                seen = (positions >= tile.first_visible) & (positions < tile.end_visible)
                part[...] = jnp.where(seen, values, jnp.zeros((), values.dtype))
            plgpu.commit_smem()


def _store(out: Array, *, out_ref, tile: Tile, options: Options, tiled_smem, plain_smem) -> None:
    """Write the live tokens of this warpgroup's [64, head_dim] result, in q's type."""
    out = out.astype(out_ref.dtype)
    tile_tokens = options.tile_tokens
    # A warpgroup holds several heads of a short tile, or part of the tokens of one head.
    segment = min(tile_tokens, WARPGROUP_ROWS)
    is_full = (tile.live_start == 0) & (tile.live_end == tile_tokens)

    def destinations() -> list[tuple[int, Array, Array]]:
        first_row = lax.axis_index("warpgroup") * WARPGROUP_ROWS
        first_head = lax.axis_index("heads") * options.tile_heads
        rows = [first_row + offset for offset in range(0, WARPGROUP_ROWS, segment)]
        heads = [first_head + lax.div(row, jnp.int32(tile_tokens)) for row in rows]
        tokens = [lax.rem(row, jnp.int32(tile_tokens)) for row in rows]
        return list(zip(range(0, WARPGROUP_ROWS, segment), heads, tokens, strict=True))

    @pl.when(is_full)
    def _():
        tiled_smem[...] = out
        plgpu.commit_smem()
        for offset, head, token in destinations():
            plgpu.copy_smem_to_gmem(
                tiled_smem.at[pl.ds(offset, segment)], out_ref.at[pl.ds(tile.start + token, segment), head]
            )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # A copy's size is fixed when compiling: n tokens go as two overlapping copies of the largest power of two up to n.
    @pl.when(jnp.logical_not(is_full))
    def _():
        _store_plain(plain_smem, out)
        plgpu.commit_smem()
        for offset, head, token in destinations():
            start = jnp.clip(tile.live_start - token, 0, segment)
            end = jnp.clip(tile.live_end - token, 0, segment)
            size = segment
            while size > 0:

                @pl.when((end - start >= size) & (end - start < 2 * size))
                def _(size=size, offset=offset, head=head, token=token, start=start, end=end):
                    for first in (start, end - size):
                        plgpu.copy_smem_to_gmem(
                            plain_smem.at[pl.ds(offset + first, size)],
                            out_ref.at[pl.ds(tile.start + token + first, size), head],
                        )

                size //= 2
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store_plain(smem, values: Array) -> None:
    """Store to shared memory that is laid out row by row, which costs bank conflicts."""
    store = getattr(plgpu, "store", None)
    if store is None:
        smem[...] = values
    else:  # jax 0.12 wants to hear that the conflicts are meant
        store(smem, values, optimized=False)
