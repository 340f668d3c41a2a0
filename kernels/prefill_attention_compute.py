"""The part of the Hopper prefill kernel that multiplies: online softmax over a tile's KV blocks, and the store."""

import dataclasses
import functools
import math

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from jaxserve.kernels.prefill_attention_tiles import Tile, column_group, divide_up, kv_blocks

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
    takes_turns: bool  # two warpgroups have the same rows, and every other KV block each

    @property
    def turns(self) -> int:
        """Warpgroups among which a tile's KV blocks are dealt."""
        return 2 if self.takes_turns else 1

    @property
    def warpgroup_row(self) -> Array | int:
        """The tile row with which this warpgroup's 64 begin."""
        return 0 if self.takes_turns else lax.axis_index("warpgroup") * WARPGROUP_ROWS


def compute_tile(
    out_ref, scales_ref, tile: Tile, options: Options,
    *, q_smem, out_smem, k_smem, v_smem, q_ready, k_ready, v_ready, k_free, v_free, **others,
) -> None:  # fmt: skip
    """Attend with this warpgroup's 64 rows of the tile, and store the result."""
    rows = pl.ds(options.warpgroup_row, WARPGROUP_ROWS)
    shape = (WARPGROUP_ROWS, q_smem.shape[1])
    first_block, end_block = _own_blocks(tile, k_smem.shape[1], options)
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
    if options.takes_turns:
        partials = {name: others[name] for name in ("partial_smem", "partial_rows_smem", "partial_ready")}
        finish = functools.partial(_join, store=store, **partials)
    plgpu.barrier_wait(q_ready)

    @pl.when(end_block > first_block)
    def _():
        attend = functools.partial(
            _attend, q_rows=q_smem.at[rows], scales_ref=scales_ref, tile=tile, options=options, k_smem=k_smem,
            v_smem=v_smem, k_ready=k_ready, v_ready=v_ready, k_free=k_free, v_free=v_free,
        )  # fmt: skip
        finish(*pl.run_scoped(attend, plgpu.WGMMAAccumulatorRef(shape, jnp.float32)))

    @pl.when(end_block <= first_block)
    def _():
        nothing = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        finish(nothing, _row_vector(_LOWEST_MAXIMUM), _row_vector(0.0))


def _join(acc: Array, maximum: Array, total: Array, *, store, partial_smem, partial_rows_smem, partial_ready) -> None:
    """Add up what both warpgroups have: the second one hands its part over, the first one stores the sum."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 1)
    def _():
        partial_smem[...] = acc
        partial_rows_smem[0] = maximum
        partial_rows_smem[1] = total
        plgpu.barrier_arrive(partial_ready)

    @pl.when(warpgroup == 0)
    def _():
        plgpu.barrier_wait(partial_ready)
        other_acc, other_maximum, other_total = (
            plgpu.load(ref, layout=layout)  # pyright: ignore[reportCallIssue] (jax 0.10)
            for ref, layout in (
                (partial_smem, plgpu.Layout.WGMMA),
                (partial_rows_smem.at[0], plgpu.Layout.WGMMA.reduce(1)),
                (partial_rows_smem.at[1], plgpu.Layout.WGMMA.reduce(1)),
            )
        )
        largest = jnp.maximum(maximum, other_maximum)
        own_share, other_share = jnp.exp2(maximum - largest), jnp.exp2(other_maximum - largest)
        both = acc * lax.broadcast_in_dim(own_share, acc.shape, [0])
        both = both + other_acc * lax.broadcast_in_dim(other_share, acc.shape, [0])
        store(both, largest, total * own_share + other_total * other_share)


def _own_blocks(tile: Tile, kv_block: int, options: Options) -> tuple[Array, Array]:
    """The first of the tile's KV blocks that this warpgroup takes, every `options.turns`-th from there, and their end."""
    first_block, end_block = kv_blocks(tile, kv_block)
    return first_block + (lax.axis_index("warpgroup") if options.takes_turns else 0), end_block


def _attend(
    acc_ref, *, q_rows, scales_ref, tile: Tile, options: Options, k_smem, v_smem, k_ready, v_ready, k_free, v_free
) -> tuple[Array, Array, Array]:
    """Go through the warpgroup's KV blocks; the softmax of a block runs before the products of its weights and values.

    These are started together with the next block's scores, so that the tensor cores get more work at a time.

    Returns:
        Weighted values that are to be divided by their total, each row's maximum, and its total.
    """
    stages, kv_block, _ = k_smem.shape
    dtype = q_rows.dtype
    turns = options.turns
    tile_first_block, _ = kv_blocks(tile, kv_block)
    first_block, end_block = _own_blocks(tile, kv_block, options)
    count = divide_up(end_block - first_block, turns)
    first_full, end_full = _unmasked_blocks(tile, kv_block, options.window)
    k_scale = scales_ref[0]
    # Scores times `factor` are in units of log2: exp2 is what the hardware has.
    factor = k_scale * (options.scale * _LOG2_E) if options.softcap is None else options.softcap * _LOG2_E

    def finish_scores(scores: Array, block: Array, masked: bool) -> Array:
        if options.softcap is not None:
            scores = jnp.tanh(scores * (k_scale * (options.scale / options.softcap)))
        return _mask(scores, block, tile, options) if masked else scores

    def stage_of(block: Array) -> Array:
        return lax.rem(block - tile_first_block, jnp.int32(stages))

    def steps_before(block: Array) -> Array:
        """How many of the warpgroup's blocks come before one of the tile."""
        return divide_up(jnp.maximum(block - first_block, 0), turns)

    def first_product(scores_ref) -> Array:
        plgpu.wgmma(scores_ref, q_rows, k_smem.at[stage_of(first_block)].transpose((1, 0)))
        return scores_ref[...]

    plgpu.barrier_wait(k_ready.at[stage_of(first_block)])
    scores = pl.run_scoped(first_product, plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, kv_block), jnp.float32))
    plgpu.barrier_arrive(k_free.at[stage_of(first_block)])
    scores = finish_scores(scores, first_block, masked=True)
    weights, maximum, total, _ = _softmax_step(scores, _row_vector(_LOWEST_MAXIMUM), _row_vector(0.0), factor, dtype)

    def step(index: Array, carry: tuple[Array, Array, Array], masked: bool) -> tuple[Array, Array, Array]:
        weights, maximum, total = carry
        block = first_block + index * turns
        stage, previous = stage_of(block), stage_of(block - turns)
        plgpu.barrier_wait(k_ready.at[stage])
        plgpu.barrier_wait(v_ready.at[previous])
        if options.window is not None:
            _clear_unseen(v_smem.at[previous], block - turns, tile)

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
    low = jnp.int32(1)
    if options.window is not None:
        end_low = jnp.clip(steps_before(first_full), low, count)
        carry = lax.fori_loop(low, end_low, functools.partial(step, masked=True), carry)
        low = end_low
    high = jnp.clip(steps_before(end_full), low, count)
    carry = lax.fori_loop(low, high, functools.partial(step, masked=False), carry)
    weights, maximum, total = lax.fori_loop(high, count, functools.partial(step, masked=True), carry)

    last_block = first_block + (count - 1) * turns
    last = stage_of(last_block)
    plgpu.barrier_wait(v_ready.at[last])
    _clear_unseen(v_smem.at[last], last_block, tile)
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
    token = (row + options.warpgroup_row) & (options.tile_tokens - 1)
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
        first_head = lax.axis_index("heads") * options.tile_heads
        rows = [jnp.int32(options.warpgroup_row + offset) for offset in range(0, WARPGROUP_ROWS, segment)]
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
