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
    MAX_COPY_COLUMNS,
    MAX_ROWS,
    MULTIPROCESSORS,
    ROW_ALIGNMENT,
    TILE,
    Phase,
    Problem,
    TuningConfig,
    choose_config,
)
from jaxserve.kernels.decode_layer_results import Worker, finish_phase, load_scale, segments


def unsupported_reason(attended: Array, wo: Array, w_gate_up: Array, next_wqkv: Array | None) -> str | None:
    """Why the kernel can't take these arrays, or None if it can."""
    if jax.__version_info__ >= (0, 12):
        return f"jax {jax.__version__} wants stores of whole cache lines, which the kernel does not make; 0.11 does not"
    if attended.dtype != jnp.bfloat16:
        return f"the arrays are {attended.dtype}, they must be bfloat16"
    rows = attended.shape[0]
    if not 1 <= rows <= MAX_ROWS:
        return f"{rows} rows are not in 1..{MAX_ROWS}"
    multiprocessors = getattr(jax.devices()[0], "core_count", MULTIPROCESSORS)
    if multiprocessors < MULTIPROCESSORS:
        return f"the device has {multiprocessors} multiprocessors, not {MULTIPROCESSORS}"
    qkv = None if next_wqkv is None else next_wqkv.shape[1]
    return _problem(rows, wo, w_gate_up, qkv, 0.0, choose_config(rows), None).misfit()


def _problem(
    rows: int, wo: Array, w_gate_up: Array, qkv: int | None, eps: float, config: TuningConfig, interpret: Any
) -> Problem:
    return Problem(rows, wo.shape[0], wo.shape[1], w_gate_up.shape[2], qkv, eps, config, interpret)


def _rem(a, b):
    return lax.rem(a, jnp.int32(b))


def _div(a, b):
    return lax.div(a, jnp.int32(b))


def _fetch_weights(problem: Problem, block, weight_refs, smem, barriers) -> None:
    """The first memory warpgroup: all phases' weights of this block, one after the other."""
    stages, copy_rows = problem.config.stages, problem.config.copy_rows

    def fetch(phase: Phase, w_ref, unit, count):
        slot = _rem(count, stages)
        plgpu.barrier_wait(barriers["w_free"].at[slot])
        group, step = _div(unit, phase.steps), _rem(unit, phase.steps)
        first_column = group * phase.group_results
        for first_row in range(0, phase.unit_k, copy_rows):
            rows = pl.ds(pl.multiple_of(step * phase.unit_k + first_row, copy_rows), copy_rows)
            k_tile, row = divmod(first_row, BLOCK_K)
            for tile in range(phase.cut.tiles):
                # The first half of a warpgroup's tiles is gate, the other up.
                warpgroup, tile_of_it = divmod(tile, phase.warpgroup_tiles)
                part, place = divmod(tile_of_it, phase.warpgroup_tiles // phase.parts)
                column = first_column + warpgroup * phase.warpgroup_results + place * TILE
                plgpu.copy_gmem_to_smem(
                    w_ref.at[rows, part, pl.ds(pl.multiple_of(column, TILE), TILE)],
                    smem["w"].at[slot, k_tile * phase.cut.tiles + tile, pl.ds(row, copy_rows)],
                    barriers["w_ready"].at[slot],
                )
        return count + 1

    count = jnp.int32(0)
    for phase, w_ref in zip(problem.phases, weight_refs, strict=True):
        start, end, _, _ = segments(phase, block)
        count = lax.fori_loop(start, end, functools.partial(fetch, phase, w_ref), count)
    for slot in range(stages):  # no barrier may be left with an arrival that nobody saw
        plgpu.barrier_wait(barriers["w_free"].at[slot])


def _fetch_x(problem: Problem, block, refs: dict[str, Any], x_refs, worker: Worker) -> None:
    """The second memory warpgroup: x of this block's units, each phase's as soon as all of it is there."""
    smem, barriers, stages = worker.smem, worker.barriers, problem.config.x_stages
    is_layer = problem.config.extent == "layer"

    def fetch(phase: Phase, x_ref, k_tile, count):
        slot = _rem(count, stages)
        plgpu.barrier_wait(barriers["x_free"].at[slot])
        columns = pl.ds(pl.multiple_of(_rem(k_tile, phase.steps * phase.k_tiles) * BLOCK_K, BLOCK_K), BLOCK_K)
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
        if index and is_layer:
            worker.wait_for_all(2 * index - 1)
        start, end, _, _ = segments(phase, block)
        fetch_phase = functools.partial(fetch, phase, x_ref)
        count = lax.fori_loop(start * phase.k_tiles, end * phase.k_tiles, fetch_phase, count)
        if is_layer and phase.name in ("gate_up", "qkv"):
            load_scale(problem, worker, refs["squares_output" if phase.name == "gate_up" else "squares_down"])
    for slot in range(stages):
        plgpu.barrier_wait(barriers["x_free"].at[slot])


def _multiply(problem: Problem, phase: Phase, worker: Worker, refs: dict[str, Any], counts):
    """A compute warpgroup's columns of this block's units; leaves one part of a sum for each group that they touch.

    `counts` are the stages of weights and of x that went through the rings before.
    """
    smem, barriers, config = worker.smem, worker.barriers, problem.config
    start, end, first_group, segment_count = segments(phase, worker.block)
    tiles = phase.warpgroup_tiles
    accumulator = plgpu.ACC((TILE, problem.padded_rows), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]

    def slots(unit):
        done = unit - start
        x_slots = [_rem(counts[1] + done * phase.k_tiles + k_tile, config.x_stages) for k_tile in range(phase.k_tiles)]
        return _rem(counts[0] + done, config.stages), x_slots

    def give_back(slot, x_slot):
        if slot is not None:
            plgpu.barrier_arrive(barriers["w_free"].at[slot])
        plgpu.barrier_arrive(barriers["x_free"].at[x_slot])

    def step(accumulators, is_first, unit):
        slot, x_slots = slots(unit)
        plgpu.barrier_wait(barriers["w_ready"].at[slot])
        for k_tile, x_slot in enumerate(x_slots):
            plgpu.barrier_wait(barriers["x_ready"].at[x_slot])
            x = smem["x"].at[x_slot].transpose((1, 0))  # [BLOCK_K, padded_rows]
            for tile, accumulator in enumerate(accumulators):
                w = smem["w"].at[slot, k_tile * phase.cut.tiles + worker.warpgroup * tiles + tile]
                plgpu.wgmma(accumulator, w.transpose((1, 0)), x)
            if not config.multiplies_ahead:
                plgpu.wgmma_wait(0)
                give_back(slot if k_tile == phase.k_tiles - 1 else None, x_slot)
            elif k_tile or not is_first:  # the tiles before are done
                plgpu.wgmma_wait(tiles)
                before = (None, x_slots[k_tile - 1])
                if k_tile == 0:
                    slot_before, x_slots_before = slots(unit - 1)
                    before = slot_before, x_slots_before[-1]
                give_back(*before)

    def segment(index, carry):
        group = first_group + index
        begin = jnp.maximum(start, group * phase.steps)
        stop = jnp.minimum(end, (group + 1) * phase.steps)
        if phase.name == "output" and config.extent == "layer":
            _fetch_residual(problem, phase, worker, refs["residual"], group)

        def multiply(*accumulators):
            def following(unit, carry):
                step(accumulators, False, unit)
                return carry

            if config.multiplies_ahead:
                step(accumulators, True, begin)
                lax.fori_loop(begin + 1, stop, following, None)
                plgpu.wgmma_wait(0)
                slot, x_slots = slots(stop - 1)
                give_back(slot, x_slots[-1])
            else:
                lax.fori_loop(begin, stop, following, None)
            return [accumulator[...] for accumulator in accumulators]

        results = pl.run_scoped(multiply, *[accumulator] * tiles)
        if phase.name == "output" and config.extent == "layer":
            results = _add_residual(worker, results, begin == group * phase.steps)
        for tile, result in enumerate(results):
            columns = pl.ds(pl.multiple_of((worker.warpgroup * tiles + tile) * TILE, TILE), TILE)
            target = refs["parts"].at[worker.block, index, :, columns].transpose((1, 0))  # [TILE, padded_rows]
            target[...] = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
        return carry

    lax.fori_loop(0, segment_count, segment, None)
    return counts[0] + end - start, counts[1] + (end - start) * phase.k_tiles


def _fetch_residual(problem: Problem, phase: Phase, worker: Worker, residual_ref, group) -> None:
    first_column = (group * phase.warpgroups + worker.warpgroup) * phase.warpgroup_results
    plgpu.commit_smem()  # all threads have read what lies there
    width = min(phase.warpgroup_results, MAX_COPY_COLUMNS)
    for offset in range(0, phase.warpgroup_results, width):
        columns = pl.ds(pl.multiple_of(first_column + offset, TILE), width)
        plgpu.copy_gmem_to_smem(
            residual_ref.at[pl.ds(0, problem.padded_rows), columns],
            worker.smem["residual"].at[worker.warpgroup, offset // width],
            worker.barriers["residual"].at[worker.warpgroup],
            oob_mode=plgpu.OOBFillMode.ZEROS,
        )


def _add_residual(worker: Worker, results: list[Array], is_first) -> list[Array]:
    """Adds the residual to a group's first part; all others fetch it as well, which costs no branch."""
    plgpu.barrier_wait(worker.barriers["residual"].at[worker.warpgroup])
    sums = []
    for tile, result in enumerate(results):
        copy, column = divmod(tile * TILE, MAX_COPY_COLUMNS)
        kept = worker.smem["residual"].at[worker.warpgroup, copy, :, pl.ds(column, TILE)].transpose((1, 0))
        kept = plgpu.load(kept, layout=plgpu.Layout.WGMMA, optimized=False)  # pyright: ignore[reportCallIssue]
        sums.append(result + jnp.where(is_first, kept.astype(jnp.float32), jnp.float32(0)))
    return sums


def _pass_weights(problem: Problem, worker: Worker) -> None:
    """Gives the stages of weights back as they come."""

    def step(count, carry):
        slot = _rem(count, problem.config.stages)
        plgpu.barrier_wait(worker.barriers["w_ready"].at[slot])
        plgpu.barrier_arrive(worker.barriers["w_free"].at[slot])
        return carry

    ranges = [segments(phase, worker.block)[:2] for phase in problem.phases]
    lax.fori_loop(0, functools.reduce(jnp.add, [end - start for start, end in ranges]), step, None)


def _scratch(problem: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shared memory and barriers of a thread block."""
    config, rows, compute = problem.config, problem.padded_rows, problem.config.compute_warpgroups
    transforms = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
    phases = {phase.name: phase for phase in problem.phases}
    residual_columns = min(phases["output"].warpgroup_results, MAX_COPY_COLUMNS)
    residual_copies = phases["output"].warpgroup_results // residual_columns
    smem: dict[str, Any] = {
        "w": plgpu.SMEM((config.stages, config.stage_tiles, BLOCK_K, TILE), jnp.bfloat16, transforms=transforms),
        "x": plgpu.SMEM((config.x_stages, rows, BLOCK_K), jnp.bfloat16, transforms=transforms),
        "residual": plgpu.SMEM((compute, residual_copies, rows, residual_columns), jnp.bfloat16),
        "out_down": plgpu.SMEM((compute, rows, phases["down"].result_columns), jnp.bfloat16),
        "scale": plgpu.SMEM((rows,), jnp.float32),
        "arrival": plgpu.SMEM((compute, 1), jnp.int32),
    }
    if "qkv" in phases:
        smem["out_qkv"] = plgpu.SMEM((compute, rows, phases["qkv"].result_columns), jnp.bfloat16)
    copies = config.stage_tiles * BLOCK_K // config.copy_rows
    barriers: dict[str, Any] = {
        "w_ready": plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
        "w_free": plgpu.Barrier(num_arrivals=compute, num_barriers=config.stages),
        "x_ready": plgpu.Barrier(num_barriers=config.x_stages),
        "x_free": plgpu.Barrier(num_arrivals=compute, num_barriers=config.x_stages),
        "residual": plgpu.Barrier(num_arrivals=residual_copies, num_barriers=compute),
        "scale": plgpu.Barrier(),
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
    if problem.config.extent == "weights":
        _pass_weights(problem, worker)
        return
    counts = jnp.int32(0), jnp.int32(0)
    for index, phase in enumerate(problem.phases):
        counts = _multiply(problem, phase, worker, refs, counts)
        if problem.config.extent == "layer":
            finish_phase(problem, index, worker, refs)
            if 2 * index + 1 < problem.grid_barriers:
                worker.tell_all(2 * index + 1)
    plgpu.wait_smem_to_gmem(0)


def _outputs(problem: Problem) -> dict[str, Any]:
    """The results, and what blocks leave for each other."""
    rows, hidden = problem.padded_rows, problem.hidden
    columns = {
        f"squares_{phase.name}": hidden // phase.result_columns for phase in (problem.phases[0], problem.phases[2])
    }
    outputs = {
        "x": ((problem.rows, hidden), jnp.bfloat16),
        "after_attention": ((rows, hidden), jnp.bfloat16),
        "normed": ((2, rows, hidden), jnp.bfloat16),  # times the norm's weights, before its scale
        **{name: ((rows, count), jnp.float32) for name, count in columns.items()},
        "activated": ((rows, problem.ffn), jnp.bfloat16),
        "parts": ((problem.blocks, problem.max_segments, rows, problem.part_columns), jnp.float32),
    }
    if problem.qkv is not None:
        outputs["qkv"] = ((problem.rows, problem.qkv), jnp.bfloat16)
    return {name: jax.ShapeDtypeStruct(*output) for name, output in outputs.items()}


def _kernel(problem: Problem, arrays: dict[str, Array], counters: Array) -> dict[str, Array]:
    compute, extent = problem.config.compute_warpgroups, problem.config.extent
    outputs = _outputs(problem)
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
            if extent == "layer":
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
            if extent != "weights":
                _fetch_x(problem, worker.block, refs, x_refs, worker)
            if extent == "layer":
                worker.leave()

    scratch, barrier_scratch = _scratch(problem)
    # A device's blocks all run at once, but only a cluster's do in the interpreter.
    grid = {"grid": (problem.blocks,), "grid_names": ("block",)}
    if not problem.on_device:
        grid = {"grid": (1,), "grid_names": ("grid",), "cluster": (problem.blocks,), "cluster_names": ("block",)}
    counters_ref = jax.new_ref(counters)
    results = plgpu.kernel(
        decode_layer,
        out_type=tuple(outputs.values()),
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
    rows = residual.shape[0]
    if rows > ROW_ALIGNMENT and rows % ROW_ALIGNMENT:
        # The copy engine fills up fewer rows than a tile has, but not the last of several tiles.
        attended = jnp.pad(attended, ((0, -rows % ROW_ALIGNMENT), (0, 0)))
    qkv = None if next_wqkv is None else next_wqkv.shape[1]
    config = choose_config(rows) if config is None else config
    problem = _problem(rows, wo, w_gate_up, qkv, eps, config, interpret)
    if (reason := problem.misfit()) is not None:
        raise ValueError(f"{reason}: {config}")
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
