"""The memory warpgroup of decode attention on Hopper: keeps queries and pages coming, ahead of their use."""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels.decode_attention_plan import TABLE_CHUNK, Problem
from jaxserve.kernels.decode_attention_segments import first_position, for_each_segment

QUERY_SLOTS = 2  # segments whose queries are in shared memory


def query_rows(problem: Problem, index, size: int):
    """Rows of shared memory for the worker's index-th segment: the tile's padding may be the next segment's queries."""
    return pl.ds(pl.multiple_of(lax.rem(index, QUERY_SLOTS) * problem.padded_group, 8), size)


def fetch(problem: Problem, worker, pair, inputs, smem, barriers):
    """The memory warpgroup: queries and pages of all the worker's segments, as fast as the slots come free."""
    config = problem.config
    layer = inputs["layer"][0]

    def load_table(source):
        # In bounds by construction; to say so spares the copy a descriptor, and with it a fetch from memory.
        in_bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        plgpu.copy_gmem_to_smem(source, smem["table"].at[pair], barriers["table"].at[pair], oob_mode=in_bounds)

    def table_chunk(segment, position):
        first_page = lax.div(position, problem.page_size)
        return inputs["table"].at[segment.row, pl.ds(first_page - lax.rem(first_page, TABLE_CHUNK), TABLE_CHUNK)]

    def copy(segment, name, slot, j, position):
        """Fetches the block's j-th copy, or counts it as fetched where the row has no live token in it."""
        is_live = position < segment.kv_len
        if problem.window is not None:
            is_live &= position + problem.copy_tokens > first_position(problem, segment.kv_len)

        @pl.when(is_live)
        def _():
            page = smem["table"][pair, lax.rem(lax.div(position, problem.page_size), TABLE_CHUNK)]
            tokens = pl.ds(
                pl.multiple_of(lax.rem(position, problem.page_size), problem.copy_tokens), problem.copy_tokens
            )
            if problem.copy_tokens == problem.page_size:
                tokens = slice(None)
            plgpu.copy_gmem_to_smem(
                inputs[name].at[layer, page, tokens, segment.head, :],
                smem[name].at[slot, pl.ds(j * problem.copy_tokens, problem.copy_tokens)],
                barriers[name].at[slot],
            )

        pl.when(jnp.logical_not(is_live))(functools.partial(plgpu.barrier_arrive, barriers[name].at[slot]))

    def fetch_block(segment, i, step):
        start = (segment.first_block + i) * config.block_kv

        @pl.when((i > 0) & (lax.rem(start, TABLE_CHUNK * problem.page_size) == 0))
        def _():
            load_table(table_chunk(segment, start))
            plgpu.barrier_wait(barriers["table"].at[pair])

        slot = pair * config.stages + lax.rem(step, config.stages)
        pl.when(step >= config.stages)(functools.partial(plgpu.barrier_wait, barriers["consumed"].at[slot]))
        for name in ("k", "v"):
            for j in range(problem.copies_per_block):
                copy(segment, name, slot, j, start + j * problem.copy_tokens)
        return step + 1

    def fetch_segment(segment, carry):
        step, index = carry

        @pl.when(index > 0)
        def _():
            load_table(table_chunk(segment, segment.first_block * config.block_kv))

        slot = pair * QUERY_SLOTS + lax.rem(index, QUERY_SLOTS)

        @pl.when(index >= QUERY_SLOTS)
        def _():
            plgpu.barrier_wait(barriers["q_consumed"].at[slot])

        # What lies past the group reads as zero. From jax 0.12 on, a slice that is seen to reach past the end is an error,
        # whatever the mode of the copy: its start is not to be seen as a constant.
        first_query = segment.row * 0
        plgpu.copy_gmem_to_smem(
            inputs["q"].at[segment.row, segment.head, pl.ds(first_query, problem.padded_group)],
            smem["q"].at[pair, query_rows(problem, index, problem.padded_group)],
            barriers["q"].at[slot],
            oob_mode=plgpu.OOBFillMode.ZEROS,
        )
        plgpu.barrier_wait(barriers["table"].at[pair])
        return lax.fori_loop(0, segment.count, functools.partial(fetch_block, segment), step), index + 1

    load_table(inputs["first_pages"].at[worker])
    start = jnp.int32(0), jnp.int32(0)
    steps, segments = for_each_segment(problem, inputs["rows"], inputs["workers"], worker, fetch_segment, start)
    pl.when(segments == 0)(functools.partial(plgpu.barrier_wait, barriers["table"].at[pair]))
    for slots, used, name in ((config.stages, steps, "consumed"), (QUERY_SLOTS, segments, "q_consumed")):
        for slot in range(slots):
            pl.when(slot < used)(functools.partial(plgpu.barrier_wait, barriers[name].at[pair * slots + slot]))
