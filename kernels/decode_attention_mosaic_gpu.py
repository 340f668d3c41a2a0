"""Paged decode attention for Hopper in Pallas Mosaic GPU.

The work is cut into units of `block_kv` tokens of one (row, KV head) pair. Every worker (a compute warpgroup with its
own memory warpgroup) takes an equal run of units whatever the rows' lengths are (stream-K, Osama et al.,
arXiv:2301.03598), so that all finish together. A run falls into segments, one for each pair that it touches. A pair
that lies within one run is finished there; of a pair that is shared, each worker leaves its normalised result with its
log-sum-exp, and the last of them to do so, or a second, small kernel, joins them (flash-decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

The memory warpgroup fetches queries and pages several blocks ahead, across segments, one TMA copy a page. The compute
warpgroup holds the query heads that share the KV head in the rows of one wgmma tile, and runs the online softmax.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxserve.kernels.decode_attention_fetch import QUERY_SLOTS, fetch, query_rows
from jaxserve.kernels.decode_attention_join import join_parts
from jaxserve.kernels.decode_attention_plan import (
    KV_LEN,
    LOWEST_SCORE,
    TABLE_CHUNK,
    TILE_M,
    Problem,
    TuningConfig,
    choose_config,
    make_plan,
)
from jaxserve.kernels.decode_attention_segments import first_position, for_each_segment
from jaxserve.kernels.decode_attention_shared_pairs import finish_shared_pair, store_part

LOG2_E = math.log2(math.e)


def _attend_block(problem: Problem, segment, pair, queries, score_scale, smem, barriers, step, i, carry):
    """One step of the online softmax over `block_kv` tokens."""
    acc, maximum, total = carry
    config = problem.config
    layout = plgpu.Layout.WGMMA
    wide_layout = plgpu.Layout.WGMMA_UPCAST_2X
    slot = pair * config.stages + lax.rem(step + i, config.stages)
    start = (segment.first_block + i) * config.block_kv
    first_visible = first_position(problem, segment.kv_len)

    def visible(shape, axis, layout):
        positions = start + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
        inside = positions < segment.kv_len
        return inside if problem.window is None else inside & (positions >= first_visible)

    def multiply(left, right, columns):
        def body(acc_ref):
            plgpu.wgmma(acc_ref, left, right)
            return acc_ref[...]

        return pl.run_scoped(body, plgpu.WGMMAAccumulatorRef((TILE_M, columns), jnp.float32))

    plgpu.barrier_wait(barriers["k"].at[slot])
    keys = smem["k"].at[slot]
    if problem.is_float8:
        narrow, keys = keys, smem["wide"].at[pair]
        keys[...] = plgpu.load(narrow, layout=wide_layout).astype(problem.dtype)  # pyright: ignore[reportCallIssue]
        plgpu.commit_smem()
    scores = multiply(queries, keys.transpose((1, 0)), config.block_kv)
    if problem.softcap is None:
        scores = scores * (score_scale * LOG2_E)
    else:
        scores = jnp.tanh(scores * (score_scale / problem.softcap)) * (problem.softcap * LOG2_E)
    scores = jnp.where(visible(scores.shape, 1, layout), scores, LOWEST_SCORE)
    new_maximum = jnp.maximum(maximum, scores.max(axis=1))
    decay = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_maximum, scores.shape, [0]))
    total = total * decay + weights.sum(axis=1)
    weights = weights.astype(problem.dtype)
    if not problem.on_device:  # the interpreter multiplies references only
        smem["weights"].at[pair][...] = weights
        weights = smem["weights"].at[pair]

    plgpu.barrier_wait(barriers["v"].at[slot])
    values = smem["v"].at[slot]
    values_shape = (config.block_kv, problem.head_dim)
    # What no row may read can be NaN, and 0 * NaN is NaN.
    if problem.is_float8:
        narrow, values = values, smem["wide"].at[pair]
        block = plgpu.load(narrow, layout=wide_layout).astype(problem.dtype)  # pyright: ignore[reportCallIssue]
        values[...] = jnp.where(visible(values_shape, 0, wide_layout), block, jnp.zeros_like(block))
        plgpu.commit_smem()
    else:

        @pl.when((start + config.block_kv > segment.kv_len) | (start < first_visible))
        def _clear_invisible_values():
            block = plgpu.load(values, layout=layout)  # pyright: ignore[reportCallIssue]
            values[...] = jnp.where(visible(values_shape, 0, layout), block, jnp.zeros_like(block))
            plgpu.commit_smem()

    weighted = multiply(weights, values, problem.head_dim)
    plgpu.barrier_arrive(barriers["consumed"].at[slot])
    return acc * lax.broadcast_in_dim(decay, acc.shape, [0]) + weighted, new_maximum, total


def _attend(problem: Problem, worker, pair, inputs, outputs, smem, barriers):
    """The compute warpgroup: each segment's softmax, and its result or partial result."""
    config = problem.config
    out_ref, *parts = outputs
    result_smem, part_smem = smem["staging"]
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    k_scale, v_scale = [inputs["scales"][i] if problem.has_scales else 1.0 for i in range(2)]
    score_scale = k_scale * problem.scale
    share = inputs["workers"][0, 1]  # read here, lest the last worker of a pair wait for it

    def attend_segment(segment, carry):
        step, index = carry
        q_slot = pair * QUERY_SLOTS + lax.rem(index, QUERY_SLOTS)
        queries = smem["q"].at[pair, query_rows(problem, index, TILE_M)]
        plgpu.barrier_wait(barriers["q"].at[q_slot])
        acc, maximum, total = lax.fori_loop(
            0,
            segment.count,
            functools.partial(_attend_block, problem, segment, pair, queries, score_scale, smem, barriers, step),
            (
                plgpu.layout_cast(jnp.zeros((TILE_M, problem.head_dim), jnp.float32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full((TILE_M,), LOWEST_SCORE, jnp.float32), row_layout),
                plgpu.layout_cast(jnp.zeros((TILE_M,), jnp.float32), row_layout),
            ),
        )
        plgpu.barrier_arrive(barriers["q_consumed"].at[q_slot])
        result = acc * lax.broadcast_in_dim(v_scale / total, acc.shape, [0])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last segment's copy out of the staging memory

        @pl.when(segment.is_whole_pair)
        def _store_result():
            result_smem.at[pair][...] = result.astype(problem.out_dtype)
            plgpu.commit_smem()
            rows = pl.ds(0, problem.group)
            plgpu.copy_smem_to_gmem(result_smem.at[pair, rows], out_ref.at[segment.row, segment.head])

        @pl.when(jnp.logical_not(segment.is_whole_pair))
        def _store_part():
            lse = maximum + jnp.log2(total)
            store_part(problem, worker, segment, result, lse, part_smem.at[pair], parts)
            if not config.separate_join:
                arrival = smem["arrival"].at[pl.ds(pair, 1)]
                finish_shared_pair(problem, worker, share, segment, inputs["counters"], parts, out_ref, arrival)

        return step + segment.count, index + 1

    start = jnp.int32(0), jnp.int32(0)
    for_each_segment(problem, inputs["rows"], inputs["workers"], worker, attend_segment, start)
    if not config.separate_join:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _clear_padding_rows(problem, worker, inputs["rows"], out_ref, result_smem.at[pair])
    # What is written is complete at the kernel's end; until it is read, its shared memory must live.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _clear_padding_rows(problem: Problem, worker, rows_ref, out_ref, result_smem):
    """Zeroes every row that has no tokens; the workers take turns."""

    def clear(i, carry):
        row = worker + i * problem.config.workers

        @pl.when(rows_ref[row, KV_LEN] == 0)
        def _():
            result_smem[...] = jnp.zeros((TILE_M, problem.head_dim), problem.out_dtype)
            plgpu.commit_smem()
            for head in range(problem.kv_heads):
                plgpu.copy_smem_to_gmem(result_smem.at[pl.ds(0, problem.group)], out_ref.at[row, head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        return carry

    workers = problem.config.workers
    lax.fori_loop(0, lax.div(problem.batch - worker + workers - 1, workers), clear, None)


def _transforms(head_dim: int, dtype) -> tuple:
    bits = jnp.finfo(dtype).bits
    swizzle = plgpu.find_swizzle(head_dim * bits)
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def _scratch(problem: Problem) -> tuple[dict, dict]:
    """Shared memory and barriers of a thread block; the first axis goes over its workers (times slots)."""
    pairs, stages, block_kv = problem.config.workers_per_sm, problem.config.stages, problem.config.block_kv
    head_dim, dtype = problem.head_dim, problem.dtype
    kv = plgpu.SMEM(
        (pairs * stages, block_kv, head_dim), problem.cache_dtype, transforms=_transforms(head_dim, problem.cache_dtype)
    )
    transforms = _transforms(head_dim, dtype)
    query_padding = (QUERY_SLOTS - 1) * problem.padded_group
    smem = {
        "k": kv,
        "v": kv,
        "q": plgpu.SMEM((pairs, TILE_M + query_padding, head_dim), dtype, transforms=transforms),
        # One or the other; a worker's part is as large in both.
        "staging": plgpu.RefUnion(
            plgpu.SMEM((pairs, TILE_M, head_dim), problem.out_dtype),
            plgpu.SMEM((pairs, TILE_M, head_dim // 2), jnp.float32),
        ),
        "arrival": plgpu.SMEM((pairs,), jnp.int32),
        "table": plgpu.SMEM((pairs, TABLE_CHUNK), jnp.int32),
    }
    if problem.is_float8:
        smem["wide"] = plgpu.SMEM((pairs, block_kv, head_dim), dtype, transforms=transforms)
    if not problem.on_device:
        smem["weights"] = plgpu.SMEM((pairs, TILE_M, block_kv), dtype)
    page_barriers = plgpu.Barrier(num_arrivals=problem.copies_per_block, num_barriers=pairs * stages)
    barriers = {
        "k": page_barriers,
        "v": page_barriers,
        "consumed": plgpu.Barrier(num_barriers=pairs * stages),
        "q": plgpu.Barrier(num_barriers=pairs * QUERY_SLOTS),
        "q_consumed": plgpu.Barrier(num_barriers=pairs * QUERY_SLOTS),
        "table": plgpu.Barrier(num_barriers=pairs),
    }
    return smem, barriers


def _attention_kernel(problem: Problem, inputs: dict[str, Any]):
    """Runs the main kernel: (out, partial results, their log-sum-exps)."""
    config = problem.config
    names = tuple(inputs)

    def decode_attention_split(*refs, smem, barriers):
        if problem.on_device:
            # In this order, so that what the dependent kernel reads at its start was complete before this one began.
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        inputs, outputs = dict(zip(names, refs, strict=False)), refs[len(names) :]
        warpgroup = lax.axis_index("warpgroup")
        pair = lax.div(warpgroup, 2)
        worker = lax.axis_index("block") * config.workers_per_sm + pair

        @pl.when(lax.rem(warpgroup, 2) == 0)
        def _():
            if config.workers_per_sm > 1:
                plgpu.set_max_registers(208, action="increase")
            _attend(problem, worker, pair, inputs, outputs, smem, barriers)

        @pl.when(lax.rem(warpgroup, 2) == 1)
        def _():
            if config.workers_per_sm > 1:
                plgpu.set_max_registers(40, action="decrease")
            fetch(problem, worker, pair, inputs, smem, barriers)

    smem, barriers = _scratch(problem)
    return plgpu.kernel(
        decode_attention_split,
        out_type=(
            jax.ShapeDtypeStruct((problem.batch, problem.kv_heads, problem.group, problem.head_dim), problem.out_dtype),
            jax.ShapeDtypeStruct((2 * config.workers, problem.padded_group, problem.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((2 * config.workers, TILE_M), jnp.float32),
        ),
        scratch_types={"smem": smem, "barriers": barriers},
        grid=(config.thread_blocks,),
        grid_names=("block",),
        num_threads=2 * config.workers_per_sm,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=problem.interpret,
    )(*inputs.values())


def unsupported_reason(q: Array, k_pages: Array) -> str | None:
    """Why the kernel can't take these arrays, or None if it can."""
    _, q_heads, head_dim = q.shape
    _, _, page_size, kv_heads, _ = k_pages.shape
    group = q_heads // kv_heads
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q.dtype=} is neither bfloat16 nor float16"
    if k_pages.dtype not in (q.dtype, jnp.float8_e4m3fn):
        return f"{k_pages.dtype=} is neither {q.dtype=} nor float8_e4m3fn"
    if head_dim not in (64, 96, 128, 256):
        return f"{head_dim=} is not one of 64, 96, 128, 256"
    if page_size not in (16, 32, 64, 128):
        return f"{page_size=} is not one of 16, 32, 64, 128"
    if group > TILE_M:
        return f"{group=} query heads a KV head are more than {TILE_M}"
    return None


# The inner jit lets all layers of a program share one lowered kernel; a call site costs nothing then.
@functools.partial(jax.jit, static_argnames=("scale", "window", "softcap", "config", "interpret"))
def decode_attention_mosaic_gpu(
    q: Float[Array, "batch q_heads head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    layer: Int32[Array, ""],
    page_table: Int32[Array, "batch pages_per_seq"],
    kv_lens: Int32[Array, " batch"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: Float[Array, ""] | None = None,
    v_scale: Float[Array, ""] | None = None,
    config: TuningConfig | None = None,
    interpret: Any = None,
) -> Float[Array, "batch q_heads head_dim"]:
    """Attends with one query a row to the row's pages; arguments as in `decode_attention`, already validated.

    `config=None` takes `choose_config`'s; `interpret` takes `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    batch, q_heads, head_dim = q.shape
    _, _, page_size, kv_heads, _ = k_pages.shape
    if config is None:
        config = choose_config(head_dim, q_heads // kv_heads, k_pages.dtype.itemsize, batch)
    problem = Problem(
        batch, kv_heads, q_heads // kv_heads, head_dim, page_size, q.dtype, k_pages.dtype,
        scale, window, softcap, k_scale is not None or v_scale is not None, config, interpret,
    )  # fmt: skip
    plan = make_plan(page_table, kv_lens, kv_heads, page_size, window, config)
    queries = q.astype(problem.dtype).reshape(batch, kv_heads, problem.group, head_dim)
    if problem.group > 8:
        # The copy engine fills up fewer rows than a tile has, but not the last of several tiles.
        queries = jnp.pad(queries, ((0, 0), (0, 0), (0, problem.padded_group - problem.group), (0, 0)))
    inputs = {
        "q": queries,
        "k": k_pages,
        "v": v_pages,
        "layer": layer[None],
        "scales": jnp.stack([jnp.float32(1) if s is None else s for s in (k_scale, v_scale)]),
        **dataclasses.asdict(plan),
    }
    if not config.separate_join:
        # XLA zeroes the counters of all layers at once.
        inputs["counters"] = jax.new_ref(jnp.zeros((config.workers,), jnp.int32))
    out, parts, lses = _attention_kernel(problem, inputs)
    if config.separate_join:
        out = join_parts(problem, plan, out, parts, lses)
    return out.reshape(batch, q_heads, head_dim)
