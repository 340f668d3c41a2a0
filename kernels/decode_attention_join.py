"""The second kernel of decode attention on Hopper: joins the partial results of work that was cut between workers."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxserve.kernels.decode_attention_plan import KV_LEN, LOWEST_SCORE, Plan, Problem

JOIN_UNROLL = 16  # partial results in flight
JOIN_TILE = 128  # elements of a result that one thread block joins


def _merge_parts(problem: Problem, tile, first_worker, count, parts_ref, lses_ref):
    """The weighted mean of one tile of a pair's partial results, as a vector of JOIN_TILE elements."""
    layout = plgpu.Layout.WG_STRIDED((JOIN_TILE,), vec_size=1)
    elements = tile * JOIN_TILE + plgpu.broadcasted_iota(jnp.int32, (JOIN_TILE,), 0, layout=layout)
    heads = lax.div(elements, jnp.full_like(elements, problem.head_dim))
    first_head = lax.div(tile * JOIN_TILE, problem.head_dim)
    heads_in_tile = 1 if problem.head_dim % JOIN_TILE == 0 else JOIN_TILE // problem.head_dim + 1

    def chunk(i, state):
        acc, maximum, total = state
        values, scores = [], []
        for j in range(JOIN_UNROLL):
            index = i * JOIN_UNROLL + j
            part = (first_worker + jnp.minimum(index, count - 1)) * 2 + jnp.where(index == 0, 1, 0)
            values.append(plgpu.load(parts_ref.at[part, pl.ds(tile * JOIN_TILE, JOIN_TILE)], layout=layout))  # pyright: ignore[reportCallIssue]
            score = jnp.full((JOIN_TILE,), LOWEST_SCORE, jnp.float32)
            for head in range(heads_in_tile):
                # Rows past the padded group exist up to TILE_M, so the index is always in bounds.
                lse = jnp.where(index < count, lses_ref[part, first_head + head], LOWEST_SCORE)
                score = jnp.where(heads == first_head + head, jnp.broadcast_to(lse, (JOIN_TILE,)), score)
            scores.append(score)
        new_maximum = functools.reduce(jnp.maximum, scores, maximum)
        decay = jnp.exp2(maximum - new_maximum)
        acc, total = acc * decay, total * decay
        for value, score in zip(values, scores, strict=True):
            weight = jnp.exp2(score - new_maximum)
            acc, total = acc + weight * value, total + weight
        return acc, new_maximum, total

    zeros = jnp.zeros((JOIN_TILE,), jnp.float32)
    chunks = lax.div(count + JOIN_UNROLL - 1, JOIN_UNROLL)
    acc, _, total = lax.fori_loop(0, chunks, chunk, (zeros, jnp.full_like(zeros, LOWEST_SCORE), zeros))
    return acc / total


def join_parts(problem: Problem, plan: Plan, out: Array, parts: Array, lses: Array) -> Array:
    """Joins the partial results of the (row, KV head) pairs that several workers shared, and zeroes padding rows.

    The thread blocks (border, tile) see to the border between two workers' runs; they have work where the border cuts a
    pair and no earlier border does. What they read of the plan was complete before the main kernel began.
    """
    config, batch = problem.config, problem.batch
    borders = config.workers - 1
    size = problem.group * problem.head_dim
    tiles = -(-size // JOIN_TILE)
    layout = plgpu.Layout.WG_STRIDED((JOIN_TILE,), vec_size=1)

    def decode_attention_join(parts_ref, lses_ref, rows_ref, workers_ref, out_ref, result_smem):
        first_worker, tile = lax.axis_index("border"), lax.axis_index("tile")
        share = workers_ref[0, 1]
        border, end, row, first_unit, blocks = [workers_ref[first_worker + 1, column] for column in range(5)]
        head = lax.div(border - first_unit, jnp.maximum(blocks, 1))
        begin = first_unit + head * blocks
        is_live = (border < end) & (begin < border) & (begin >= border - share)

        def copy_out(row, head, length):
            target = out_ref.at[row, head, pl.ds(tile * JOIN_TILE, length)]
            plgpu.copy_smem_to_gmem(result_smem.at[pl.ds(0, length)], target)

        def store(value, row, heads):
            result_smem[...] = value.astype(problem.out_dtype)
            plgpu.commit_smem()
            whole_tiles, rest = divmod(size, JOIN_TILE)
            for head in heads:
                if whole_tiles:
                    pl.when(tile < whole_tiles)(functools.partial(copy_out, row, head, JOIN_TILE))
                if rest:
                    pl.when(tile == whole_tiles)(functools.partial(copy_out, row, head, rest))
            plgpu.wait_smem_to_gmem(0)

        if problem.on_device:
            # One block waits in any case, lest this kernel end, and its followers start, before the main kernel's end.
            pl.when(is_live | ((first_worker == 0) & (tile == 0)))(plgpu.griddepcontrol_wait)

        @pl.when(is_live)
        def _():
            count = lax.div(begin + blocks - 1, share) - first_worker + 1
            store(_merge_parts(problem, tile, first_worker, count, parts_ref, lses_ref), row, [head])

        def zero(row):
            zeros = plgpu.layout_cast(jnp.zeros((JOIN_TILE,), jnp.float32), layout)
            store(zeros, row, range(problem.kv_heads))

        for offset in range(0, batch, borders):
            padding_row = first_worker + offset
            kv_len = rows_ref[jnp.minimum(padding_row, batch - 1), KV_LEN]
            pl.when((padding_row < batch) & (kv_len == 0))(functools.partial(zero, padding_row))

    out_ref = jax.new_ref(out.reshape(batch, problem.kv_heads, size))
    plgpu.kernel(
        decode_attention_join,
        out_type=(),
        scratch_types=(plgpu.SMEM((JOIN_TILE,), problem.out_dtype),),
        grid=(borders, tiles),
        grid_names=("border", "tile"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=problem.interpret,
    )(parts.reshape(parts.shape[0], -1), lses, plan.rows, plan.workers, out_ref)
    return out_ref[...]
