"""A worker's run of work on Hopper, cut where the (row, KV head) pairs end."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxserve.kernels.decode_attention_plan import ROW_COLUMNS, Problem


class Segment(NamedTuple):
    """A run of blocks of one (row, KV head) pair; scalars on the device.

    The units of work are numbered through all pairs: the pair has the `pair_blocks` units from `pair_begin` on.
    """

    row: Array
    head: Array
    first_block: Array
    count: Array
    kv_len: Array
    pair_begin: Array
    pair_blocks: Array
    starts_pair: Array
    is_whole_pair: Array


def for_each_segment(problem: Problem, rows_ref, workers_ref, worker, body, carry):
    """Calls `carry = body(segment, carry)` for each segment of the worker's run and returns the last carry."""
    begin, end, *row_state = [workers_ref[worker, column] for column in range(3 + ROW_COLUMNS)]

    def step(state):
        unit, row_state, carry = state
        row, first_unit, blocks, first_block, kv_len, next_row = row_state
        # Read here, needed only when this segment is done.
        following = jnp.minimum(next_row, problem.batch - 1)
        following_state = [following, *[rows_ref[following, column] for column in range(ROW_COLUMNS)]]
        local = unit - first_unit
        head = lax.div(local, blocks)
        first = local - head * blocks
        count = jnp.minimum(blocks - first, end - unit)
        segment = Segment(
            row, head, first_block + first, count, kv_len, unit - first, blocks, first == 0, count == blocks
        )
        carry = body(segment, carry)
        row_is_done = (head == problem.kv_heads - 1) & (first + count == blocks)
        row_state = [jnp.where(row_is_done, new, old) for new, old in zip(following_state, row_state, strict=True)]
        return unit + count, row_state, carry

    return lax.while_loop(lambda state: state[0] < end, step, (begin, row_state, carry))[2]


def first_position(problem: Problem, kv_len):
    return jnp.int32(0) if problem.window is None else jnp.maximum(kv_len - problem.window, 0)
