"""Pairs of a row and a KV head that several workers share: partial results, and the last worker's joining of them.

Each worker stores its part and then counts itself in, in a counter of the pair; the one that completes the count joins
the parts. So nobody waits for another, whatever order thread blocks start in, and as the parts are joined in the order
of the workers, whoever does it, the result is the same to the bit in every run.
"""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxserve.kernels.decode_attention_plan import LOWEST_SCORE, TILE_M, Problem
from jaxserve.kernels.decode_attention_segments import Segment
from jaxserve.kernels.grid_barrier import count_in
from jaxserve.kernels.register_layout import LANES, WARPS, spread_layout

REGISTERS = 32  # elements of parts that a thread has in flight
MOST_IN_FLIGHT = 8  # parts


def _load(ref, layout) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue] (jax 0.10)


def store_part(problem: Problem, worker, segment: Segment, result, lse, staging, parts):
    """Leaves the segment's normalised result [TILE_M, head_dim] and its log-sum-exp [TILE_M] in global memory.

    With plain stores: a copy by the copy engine would have to be waited for.
    """
    parts_ref, lses_ref = parts
    # The first segment of a run may continue a pair, the last one may start a pair: two places are enough.
    part = worker * 2 + jnp.where(segment.starts_pair, 1, 0)
    lses_ref.at[part][...] = lse
    half = problem.head_dim // 2
    layout = spread_layout((problem.group, half))
    for column in (0, half):
        staging[...] = lax.slice(result, (0, column), (TILE_M, column + half))
        value = _load(staging.at[pl.ds(0, problem.group)], layout)
        parts_ref.at[part, pl.ds(0, problem.group), pl.ds(column, half)][...] = value


def finish_shared_pair(problem: Problem, worker, share, segment: Segment, counters_ref, parts, out_ref, arrival):
    """Counts this worker's part in, and joins all parts of the pair if no other worker's is missing any more.

    `share` is the number of units in a worker's run.
    """
    first_worker = lax.div(segment.pair_begin, share)
    last_worker = lax.div(segment.pair_begin + segment.pair_blocks - 1, share)
    if problem.on_device:
        counter = counters_ref.at[pl.ds(first_worker, 1)]
        before = count_in(counter, arrival)  # pyright: ignore[reportCallIssue] (the decorator passes the context)
        is_last = before == last_worker - first_worker
    else:
        is_last = worker == last_worker  # the interpreter runs one thread block after the other

    @pl.when(is_last)
    def _():
        _join(problem, first_worker, last_worker - first_worker + 1, parts, out_ref.at[segment.row, segment.head])


def _join(problem: Problem, first_worker, count, parts, out_ref):
    """Stores the weighted mean of a pair's partial results to out_ref [group, head_dim]."""
    # Columns at a time: what a thread's registers hold.
    columns = problem.head_dim
    while problem.group * columns > REGISTERS * WARPS * LANES:
        columns //= 2
    unroll = max(1, REGISTERS * WARPS * LANES // (problem.group * columns))
    for column in range(0, problem.head_dim, columns):
        mean = _weighted_mean(problem, first_worker, count, parts, pl.ds(column, columns), min(unroll, MOST_IN_FLIGHT))
        out_ref.at[:, pl.ds(column, columns)][...] = mean.astype(problem.out_dtype)


def _weighted_mean(problem: Problem, first_worker, count, parts, columns, unroll: int) -> Array:
    """The mean of the parts' columns, weighted by the sums of exponentials that stand behind them."""
    parts_ref, lses_ref = parts
    rows = pl.ds(0, problem.group)
    shape = (problem.group, columns.size)
    layout = spread_layout(shape)
    row_layout = layout.reduce((1,))

    def spread(x):
        return lax.broadcast_in_dim(x, shape, (0,))

    def step(i, state):
        mean, maximum, total = state
        values, scores = [], []
        for j in range(unroll):
            index = i * unroll + j
            part = (first_worker + jnp.minimum(index, count - 1)) * 2 + jnp.where(index == 0, 1, 0)
            values.append(_load(parts_ref.at[part, rows, columns], layout))
            lse = _load(lses_ref.at[part, rows], row_layout)
            scores.append(lse + jnp.where(index < count, 0.0, LOWEST_SCORE))
        new_maximum = functools.reduce(jnp.maximum, scores, maximum)
        decay = jnp.exp2(maximum - new_maximum)
        mean, total = mean * spread(decay), total * decay
        for value, score in zip(values, scores, strict=True):
            weight = jnp.exp2(score - new_maximum)
            mean, total = mean + spread(weight) * value, total + weight
        return mean, new_maximum, total

    start = (
        plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout),
        plgpu.layout_cast(jnp.full((problem.group,), LOWEST_SCORE, jnp.float32), row_layout),
        plgpu.layout_cast(jnp.zeros((problem.group,), jnp.float32), row_layout),
    )
    mean, _, total = lax.fori_loop(0, lax.div(count + unroll - 1, unroll), step, start)
    return mean / spread(total)
