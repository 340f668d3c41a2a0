"""A decode layer between attention and the next attention as one persistent kernel, for Hopper in Pallas Mosaic GPU.

Such a layer takes as long as its weights take to be read. Between kernels the reading stops: a tail, a launch, small
kernels for norms, a ring to be filled. Here one thread block per multiprocessor stays from the first product to the
last. A warpgroup of it fetches weights through a deep ring and never waits for anything but room in it: while the
blocks exchange sums between two products, the next product's weights arrive. Another one fetches x, which is there
only when all blocks have finished the product before. The compute warpgroups multiply, leave the parts of sums in
memory (in practice: in L2), wait for all others, add up the tiles of the result that they own, and make the next x.

A norm needs no pass of its own: who adds up a tile leaves x times the norm's weights, and the tile's sum of squares;
the next product's results are scaled with the row's factor after they were added up.

How the work is dealt out is in decode_layer_plan, the second half of a phase in decode_layer_results.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxserve.kernels import grid_barrier
from jaxserve.kernels.decode_layer_plan import (
    BLOCK_K,
    MAX_ROWS,
    MULTIPROCESSORS,
    RESULT_COLUMNS,
    ROW_ALIGNMENT,
    TILE,
    TILES_PER_WARPGROUP,
    Phase,
    Problem,
    TuningConfig,
    choose_config,
)
from jaxserve.kernels.decode_layer_results import Worker, finish_phase, start_residual


def unsupported_reason(attended: Array, wo: Array, w_gate_up: Array, next_wqkv: Array | None) -> str | None:
    """Why the kernel can't take these arrays, or None if it can."""
    if jax.__version_info__ >= (0, 12):
        return f"jax {jax.__version__} wants stores of whole cache lines, which the kernel does not make; 0.11 does not"
    if attended.dtype != jnp.bfloat16:
        return f"the arrays are {attended.dtype}, they must be bfloat16"
    if not 1 <= attended.shape[0] <= MAX_ROWS:
        return f"{attended.shape[0]} rows are not in 1..{MAX_ROWS}"
    multiprocessors = getattr(jax.devices()[0], "core_count", MULTIPROCESSORS)
    if multiprocessors < MULTIPROCESSORS:
        return f"the device has {multiprocessors} multiprocessors, not {MULTIPROCESSORS}"
    columns = TILE * TILES_PER_WARPGROUP
    sizes = {"attended": wo.shape[0], "hidden": wo.shape[1], "ffn": w_gate_up.shape[2]}
    if next_wqkv is not None:
        sizes["qkv"] = next_wqkv.shape[1]
    for name, size in sizes.items():
        if size % columns:
            return f"{name}={size} must be a multiple of {columns}"
    return None


def _rem(a, b):
    return lax.rem(a, jnp.int32(b))


def _div(a, b):
    return lax.div(a, jnp.int32(b))


def _fetch_weights(problem: Problem, block, weight_refs, smem, barriers) -> None:
    """The first memory warpgroup: all phases' weights of this block, one after the other."""
    stages = problem.config.stages

    def fetch(phase: Phase, w_ref, unit, count):
        slot = _rem(count, stages)
        plgpu.barrier_wait(barriers["w_free"].at[slot])
        group, step = _div(unit, phase.steps), _rem(unit, phase.steps)
        rows = pl.ds(pl.multiple_of(step * BLOCK_K, BLOCK_K), BLOCK_K)
        for tile in range(problem.tiles):
            part, place = 0, tile
            if phase.is_swiglu:  # the first half of a group's tiles is gate
                part, place = divmod(tile, problem.tiles // 2)
            column = pl.multiple_of(group * phase.group_results + place * TILE, TILE)
            plgpu.copy_gmem_to_smem(
                w_ref.at[rows, part, pl.ds(column, TILE)], smem["w"].at[slot, tile], barriers["w_ready"].at[slot]
            )
        return count + 1

    count = jnp.int32(0)
    for phase, w_ref in zip(problem.phases, weight_refs, strict=True):
        start, end = phase.start(block, _div), phase.start(block + 1, _div)
        count = lax.fori_loop(start, end, functools.partial(fetch, phase, w_ref), count)
    for slot in range(stages):  # no barrier may be left with an arrival that nobody saw
        plgpu.barrier_wait(barriers["w_free"].at[slot])


def _fetch_x(problem: Problem, block, x_refs, worker: Worker) -> None:
    """The second memory warpgroup: x of this block's units, each phase's as soon as all of it is there."""
    smem, barriers, stages = worker.smem, worker.barriers, problem.config.x_stages

    def fetch(phase: Phase, x_ref, unit, count):
        slot = _rem(count, stages)
        plgpu.barrier_wait(barriers["x_free"].at[slot])
        columns = pl.ds(pl.multiple_of(_rem(unit, phase.steps) * BLOCK_K, BLOCK_K), BLOCK_K)
        # The box of the copy is as tall as the padded rows; what lies outside of x reads as zero.
        plgpu.copy_gmem_to_smem(
            x_ref.at[pl.ds(0, problem.padded_rows), columns],
            smem["x"].at[slot],
            barriers["x_ready"].at[slot],
            oob_mode=plgpu.OOBFillMode.ZEROS,
        )
        return count + 1

    count = jnp.int32(0)
    for index, (phase, x_ref) in enumerate(zip(problem.phases, x_refs, strict=True)):
        if index:
            worker.wait_for_all(2 * index - 1)
        start, end = phase.start(block, _div), phase.start(block + 1, _div)
        count = lax.fori_loop(start, end, functools.partial(fetch, phase, x_ref), count)
    for slot in range(stages):
        plgpu.barrier_wait(barriers["x_free"].at[slot])


def _multiply(problem: Problem, phase: Phase, worker: Worker, parts_ref, count):
    """A compute warpgroup's columns of this block's units; leaves one part of a sum for each group that they touch."""
    smem, barriers, config = worker.smem, worker.barriers, problem.config
    start, end = phase.start(worker.block, _div), phase.start(worker.block + 1, _div)
    first_group = _div(start, phase.steps)
    accumulator = plgpu.ACC((TILE, problem.padded_rows), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]

    def segment(index, carry):
        group = first_group + index
        begin = jnp.maximum(start, group * phase.steps)
        stop = jnp.minimum(end, (group + 1) * phase.steps)

        def multiply(*accumulators):
            def step(unit, carry):
                slot, x_slot = [_rem(count + unit - start, stages) for stages in (config.stages, config.x_stages)]
                plgpu.barrier_wait(barriers["w_ready"].at[slot])
                plgpu.barrier_wait(barriers["x_ready"].at[x_slot])
                x = smem["x"].at[x_slot].transpose((1, 0))  # [BLOCK_K, padded_rows]
                for tile, accumulator in enumerate(accumulators):
                    w = smem["w"].at[slot, worker.warpgroup * TILES_PER_WARPGROUP + tile]
                    plgpu.wgmma(accumulator, w.transpose((1, 0)), x)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(barriers["w_free"].at[slot])
                plgpu.barrier_arrive(barriers["x_free"].at[x_slot])
                return carry

            lax.fori_loop(begin, stop, step, None)
            return [accumulator[...] for accumulator in accumulators]

        results = pl.run_scoped(multiply, *[accumulator] * TILES_PER_WARPGROUP)
        for tile, result in enumerate(results):
            column = (worker.warpgroup * TILES_PER_WARPGROUP + tile) * TILE
            columns = pl.ds(pl.multiple_of(column, TILE), TILE)
            target = parts_ref.at[worker.block, index, :, columns].transpose((1, 0))  # [TILE, padded_rows]
            target[...] = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
        return carry

    lax.fori_loop(0, _div(end - 1, phase.steps) - first_group + 1, segment, None)
    return count + end - start


def _scratch(problem: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shared memory and barriers of a thread block."""
    config, rows, compute = problem.config, problem.padded_rows, problem.config.compute_warpgroups
    transforms = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
    hidden_rounds = problem.rounds(problem.phases[0])
    smem: dict[str, Any] = {
        "w": plgpu.SMEM((config.stages, problem.tiles, BLOCK_K, TILE), jnp.bfloat16, transforms=transforms),
        "x": plgpu.SMEM((config.x_stages, rows, BLOCK_K), jnp.bfloat16, transforms=transforms),
        # The tiles of the residual that the workers own, from the kernel's beginning to its end.
        "residual": plgpu.SMEM((compute, hidden_rounds, rows, RESULT_COLUMNS), jnp.bfloat16),
        "out": plgpu.SMEM((compute, rows, RESULT_COLUMNS), jnp.bfloat16),
        "scale": plgpu.SMEM((compute, rows), jnp.float32),
    }
    barriers: dict[str, Any] = {
        "w_ready": plgpu.Barrier(num_arrivals=problem.tiles, num_barriers=config.stages),
        "w_free": plgpu.Barrier(num_arrivals=compute, num_barriers=config.stages),
        "x_ready": plgpu.Barrier(num_barriers=config.x_stages),
        "x_free": plgpu.Barrier(num_arrivals=compute, num_barriers=config.x_stages),
        "residual": plgpu.Barrier(num_barriers=compute * hidden_rounds),
    }
    if not problem.on_device:
        barriers["grid"] = plgpu.ClusterBarrier(
            collective_axes=("block",), num_barriers=problem.grid_barriers, num_arrivals=compute
        )
    return smem, barriers


def _compute(problem: Problem, worker: Worker, refs: dict[str, Any]) -> None:
    """A compute warpgroup's way through the phases."""
    for slot in range(problem.config.stages):
        plgpu.barrier_arrive(worker.barriers["w_free"].at[slot])
    for slot in range(problem.config.x_stages):
        plgpu.barrier_arrive(worker.barriers["x_free"].at[slot])
    if problem.on_device:
        plgpu.griddepcontrol_wait()
    start_residual(problem, worker, refs["residual"])
    count = jnp.int32(0)
    for index, phase in enumerate(problem.phases):
        count = _multiply(problem, phase, worker, refs["parts"], count)
        finish_phase(problem, index, worker, refs)
        if 2 * index + 1 < problem.grid_barriers:
            worker.tell_all(2 * index + 1)
    plgpu.wait_smem_to_gmem(0)


def _kernel(problem: Problem, arrays: dict[str, Array], counters: Array) -> dict[str, Array]:
    rows, compute = problem.padded_rows, problem.config.compute_warpgroups
    outputs = {
        "x": ((problem.rows, problem.hidden), jnp.bfloat16),
        "normed": ((2, rows, problem.hidden), jnp.bfloat16),  # times the norm's weights, before its scale
        "squares": ((2, rows, problem.hidden // RESULT_COLUMNS), jnp.float32),
        "activated": ((rows, problem.ffn), jnp.bfloat16),
        "parts": ((problem.blocks, problem.max_segments, rows, problem.tiles * TILE), jnp.float32),
    }
    if problem.qkv is not None:
        outputs["qkv"] = ((problem.rows, problem.qkv), jnp.bfloat16)
    names = [*arrays, "counters", *outputs]

    def decode_layer(*flat, smem, barriers):
        refs = dict(zip(names, flat, strict=True))
        normed, weights = refs["normed"], [refs[name] for name in ("wo", "w_gate_up", "w_down")]
        x_refs = [refs["attended"], normed.at[0], refs["activated"]]
        if problem.qkv is not None:
            weights.append(refs["wqkv"])
            x_refs.append(normed.at[1])
        warpgroup = lax.axis_index("warpgroup")
        worker = Worker(problem, lax.axis_index("block"), warpgroup, smem, barriers, refs["counters"])

        @pl.when(warpgroup < compute)
        def _():
            _compute(problem, worker, refs)
            worker.leave()

        @pl.when(warpgroup == compute)
        def _():
            if problem.on_device and not problem.config.prefetch_weights:
                plgpu.griddepcontrol_wait()
            _fetch_weights(problem, worker.block, weights, smem, barriers)

        @pl.when(warpgroup == compute + 1)
        def _():
            if problem.on_device:
                # In this order: what a dependent kernel fetches before its own wait was complete before this one ran.
                plgpu.griddepcontrol_wait()
                plgpu.griddepcontrol_launch_dependents()
            _fetch_x(problem, worker.block, x_refs, worker)
            worker.leave()

    scratch, barrier_scratch = _scratch(problem)
    # A device's blocks all run at once, but only a cluster's do in the interpreter.
    grid = {"grid": (problem.blocks,), "grid_names": ("block",)}
    if not problem.on_device:
        grid = {"grid": (1,), "grid_names": ("grid",), "cluster": (problem.blocks,), "cluster_names": ("block",)}
    counters_ref = jax.new_ref(counters)
    results = plgpu.kernel(
        decode_layer,
        out_type=tuple(jax.ShapeDtypeStruct(*output) for output in outputs.values()),
        scratch_types={"smem": scratch, "barriers": barrier_scratch},
        num_threads=compute + 2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=problem.interpret,
        **grid,  # pyright: ignore[reportArgumentType]
    )(*arrays.values(), counters_ref)
    return dict(zip(outputs, results, strict=True)) | {"counters": counters_ref[...]}


# The inner jit lets all layers of a program share one lowered kernel; a call site costs nothing then.
@functools.partial(jax.jit, static_argnames=("eps", "config", "interpret"))
def decode_layer_mosaic_gpu(
    attended: Float[Array, "rows attended"],
    residual: Float[Array, "rows hidden"],
    wo: Float[Array, "attended hidden"],
    mlp_norm: Float[Array, " hidden"],
    w_gate_up: Float[Array, "hidden 2 ffn"],
    w_down: Float[Array, "ffn hidden"],
    next_norm: Float[Array, " hidden"] | None,
    next_wqkv: Float[Array, "hidden qkv"] | None,
    counters: Int32[Array, " counters"] | None = None,
    *,
    eps: float,
    config: TuningConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "rows hidden"], Float[Array, "rows qkv"] | None, Int32[Array, " counters"]]:
    """Computes what `decode_layer` documents, and returns the counters for the next call.

    `config=None` takes `choose_config`'s; `interpret` takes `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    rows, hidden = residual.shape
    if rows > ROW_ALIGNMENT and rows % ROW_ALIGNMENT:
        # The copy engine fills up fewer rows than a tile has, but not the last of several tiles.
        attended = jnp.pad(attended, ((0, -rows % ROW_ALIGNMENT), (0, 0)))
    qkv = None if next_wqkv is None else next_wqkv.shape[1]
    config = choose_config(rows) if config is None else config
    problem = Problem(rows, wo.shape[0], hidden, w_gate_up.shape[2], qkv, eps, config, interpret)
    columns = problem.tiles * TILE
    if any(phase.columns % phase.group_results for phase in problem.phases):
        raise ValueError(f"{config.compute_warpgroups=} needs multiples of {columns} columns in {problem}")
    arrays = {
        "attended": attended,
        "residual": residual,
        "wo": wo[:, None],
        "mlp_norm": mlp_norm,
        "w_gate_up": w_gate_up,
        "w_down": w_down[:, None],
    }
    if next_norm is not None and next_wqkv is not None:
        arrays |= {"next_norm": next_norm, "wqkv": next_wqkv[:, None]}
    if counters is None:
        counters = jnp.zeros(grid_barrier.COUNTERS, jnp.int32)
    results = _kernel(problem, arrays, counters)
    return results["x"], results.get("qkv"), results["counters"]
