"""Products of a few rows with a large quantized weight matrix, for Hopper in Pallas Mosaic GPU.

Not measured on a card yet, so it runs only where it is asked for by name.

As in `decode_matmul_mosaic_gpu.py`, such a product takes as long as its weights take to be read. A thread block owns 64 or
128 outputs. Its memory warpgroup fetches tiles of 64 outputs by 128 bytes of inputs, and the tiles of x beside them,
through a ring in shared memory. The outputs are the rows of the tensor cores' result and x's rows, padded to 8, its
columns. Where the outputs alone make too few thread blocks, a cluster of blocks shares k.

What the compute warpgroup does with a tile depends on the weights:

* float8 with rounded activations: both sides go to the tensor cores as they lie. These sum float8 products with some 14
  bits, so that a tile's result is added to the others in float32.
* float8 alone: the tile is widened in registers to float16, which takes one instruction for two numbers and is exact; to
  bfloat16 there is none. x's rows come in float16 as well, each divided by a power of two that fits it into the range.
* int8: widened in registers to bfloat16, exactly.
* int4: the same, and multiplied with the group's scales, rounded once, as XLA's twin does.

Scales of outputs and factors of rows are multiplied with the sums, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.kernels.decode_matmul_finish import (
    ROW_ALIGNMENT,
    TILE,
    has_rows,
    join,
    launch,
    out_columns,
    rank_rows,
)
from jaxserve.kernels.quantized_matmul_plan import (
    W_DTYPES,
    X_DTYPES,
    Problem,
    TuningConfig,
    choose_config,
    form_of,
)
from jaxserve.kernels.quantized_matmul_widen import INT4_EXPONENT, INT8_EXPONENT, widen_int4, widen_int8
from jaxserve.kernels.quantized_matmul_xla import quantize_rows

_FLOAT16_TOP = 2.0**12  # what rows in float16 are scaled to: their sums, and numbers 2**26 times smaller, stay in range


def _fetch(problem: Problem, block, rank, refs, smem, barriers) -> None:
    """The memory warpgroup: tiles of the weights, of x, and of the groups' scales, and the residual."""
    stages, steps = problem.config.stages, problem.steps
    first_step = rank * steps
    outputs = pl.ds(pl.multiple_of(block * problem.block_columns, TILE), problem.block_columns)
    parts = pl.ds(0, problem.parts)

    def along_k(step, length):
        return pl.ds(pl.multiple_of((first_step + step) * length, length), length)

    def fetch(step, slot):
        ready = barriers["ready"].at[slot]
        plgpu.copy_gmem_to_smem(refs["w"].at[parts, outputs, along_k(step, problem.block_k)], smem["w"].at[slot], ready)
        if problem.form == "int4":
            groups = along_k(step, problem.groups_per_step)
            plgpu.copy_gmem_to_smem(refs["scales"].at[groups, parts, outputs], smem["scales"].at[slot], ready)
        # The box of the copy is as tall as the padded rows; what lies outside of x reads as zero.
        plgpu.copy_gmem_to_smem(
            refs["x"].at[pl.ds(0, problem.padded_rows), along_k(step, problem.block_k)],
            smem["x"].at[slot],
            ready,
            oob_mode=plgpu.OOBFillMode.ZEROS,
        )

    ahead = min(stages, steps)
    if problem.on_device:
        # In this order: what a dependent kernel fetches before its own wait was complete before this kernel ran.
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
    for step in range(ahead):
        fetch(step, step)
    if problem.has_residual:

        @pl.when(has_rows(problem, rank))
        def _():
            for unit in range(problem.units):
                plgpu.copy_gmem_to_smem(
                    refs["residual"].at[rank_rows(problem, rank), out_columns(problem, block * problem.units + unit)],
                    smem["out"].at[unit],
                    barriers["residual"].at[unit],
                    oob_mode=plgpu.OOBFillMode.ZEROS,
                )

    if problem.releases_late:
        for slot in range(stages - problem.turns, stages):  # what each turn gave up before its first step
            plgpu.barrier_wait(barriers["consumed"].at[slot])

    def refill(step, carry):
        slot = lax.rem(step, stages)
        plgpu.barrier_wait(barriers["consumed"].at[slot])
        fetch(step, slot)
        return carry

    lax.fori_loop(ahead, steps, refill, None)
    for slot in range(ahead):  # no barrier may be left with an arrival that nobody saw
        plgpu.barrier_wait(barriers["consumed"].at[slot])


def _role(problem: Problem, warpgroup) -> tuple[Any, Any, Any]:
    """The unit that a compute warpgroup is of, which of its helpers it is, and the turn that it takes of these."""
    helpers = problem.helpers
    unit, helper = (warpgroup, 0) if helpers == 1 else (lax.div(warpgroup, helpers), lax.rem(warpgroup, helpers))
    return unit, helper, 0 if problem.turns == 1 else lax.rem(helper, problem.turns)


def _own_tiles(problem: Problem, helper) -> list[Any]:
    """Of a unit's tiles, those that a helper multiplies."""
    return [helper // problem.turns] if problem.own_tiles < problem.tiles else list(range(problem.tiles))


def _outputs(problem: Problem, unit, tile) -> tuple[Any, Any]:
    """The part and the outputs of a unit's tile, counted from where the units are."""
    part, output = (tile, unit * TILE) if problem.is_swiglu else (0, (unit * problem.tiles + tile) * TILE)
    return part, pl.ds(pl.multiple_of(output, TILE), TILE)


def _narrow(problem: Problem, unit, tile, smem, slot) -> Any:
    """A weight tile [TILE, block_k]: in registers where it is to be widened there."""
    narrow = smem["w"].at[slot, *_outputs(problem, unit, tile)]
    if problem.form == "float8":
        return narrow
    layout = plgpu.Layout.WGMMA_UPCAST_4X if problem.form == "int4" else plgpu.Layout.WGMMA_UPCAST_2X
    return plgpu.load(narrow, layout=layout)  # pyright: ignore[reportCallIssue]


def _group_scales(problem: Problem, unit, tile, group: int, smem, slot) -> Array:
    """int4: the scales of a group's outputs, bfloat16 [TILE]."""
    part, outputs = _outputs(problem, unit, tile)
    return plgpu.load(  # pyright: ignore[reportCallIssue]
        smem["scales"].at[slot, group, part, outputs], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
    )


def _issue(
    problem: Problem, warpgroup, slot, smem, accumulators, before_is_done: Callable[[], None] | None = None
) -> None:
    """Starts a step's products, which go to `accumulators` [TILE, padded_rows], one for each tile.

    The tensor cores multiply one slab of weights while the next is widened. Where weights are widened, `before_is_done` is
    called as soon as all products from before this step are.
    """
    unit, helper, _ = _role(problem, warpgroup)
    tiles = _own_tiles(problem, helper)
    narrow = [_narrow(problem, unit, tile, smem, slot) for tile in tiles]
    if problem.form == "float8":
        for accumulator, left in zip(accumulators, narrow, strict=True):
            plgpu.wgmma(accumulator, left, smem["x"].at[slot].transpose((1, 0)))
        return
    slabs_per_group = problem.block_k // problem.groups_per_step // problem.slab
    for slab in range(problem.block_k // problem.slab):
        inputs = slice(slab * problem.slab, (slab + 1) * problem.slab)
        x = smem["x"].at[slot, :, pl.ds(slab * problem.slab, problem.slab)].transpose((1, 0))
        for tile, weights, accumulator in zip(tiles, narrow, accumulators, strict=True):
            left = weights[:, inputs]
            if problem.form == "int4":
                scales = _group_scales(problem, unit, tile, slab // slabs_per_group, smem, slot)
                left = widen_int4(left, scales, on_device=problem.on_device)
            elif problem.form == "int8":
                left = widen_int8(left, on_device=problem.on_device)
            else:
                left = plgpu.layout_cast(left, plgpu.Layout.WGMMA).astype(X_DTYPES[problem.form])
            if not problem.on_device:  # the interpreter multiplies references only
                smem["wide"].at[warpgroup][...] = left
                left = smem["wide"].at[warpgroup]
            plgpu.wgmma(accumulator, left, x)
            plgpu.wgmma_wait(1)  # for the one before this: its registers are free
            if before_is_done is not None:
                before_is_done()
                before_is_done = None


def _multiply(problem: Problem, warpgroup, smem, barriers) -> list[Array]:
    """A compute warpgroup's part of k: a [TILE, padded_rows] float32 result for each of its weight tiles."""
    turn = _role(problem, warpgroup)[2]
    accumulator = plgpu.ACC((TILE, problem.padded_rows), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    accumulators = [accumulator] * problem.own_tiles

    steps, stages, turns = problem.steps // problem.turns, problem.config.stages, problem.turns

    def slot_after(slot):
        return jnp.where(slot >= stages - turns, slot - (stages - turns), slot + turns)

    def slot_before(slot):
        return jnp.where(slot < turns, slot + (stages - turns), slot - turns)

    def release(slot) -> None:
        plgpu.barrier_arrive(barriers["consumed"].at[slot])

    def in_place(*accumulators):
        def step(_, slot):
            plgpu.barrier_wait(barriers["ready"].at[slot])
            if problem.releases_late:
                _issue(problem, warpgroup, slot, smem, accumulators, lambda: release(slot_before(slot)))
            else:
                _issue(problem, warpgroup, slot, smem, accumulators)
                plgpu.wgmma_wait(0)
                release(slot)
            return slot_after(slot)

        end = lax.fori_loop(0, steps, step, jnp.int32(turn))
        if problem.releases_late:
            plgpu.wgmma_wait(0)
            release(slot_before(end))
        return [accumulator[...] for accumulator in accumulators]

    if problem.form != "float8":
        return pl.run_scoped(in_place, *accumulators)

    def step(_, carry):
        slot, totals = carry
        plgpu.barrier_wait(barriers["ready"].at[slot])

        def products(*accumulators):
            _issue(problem, warpgroup, slot, smem, accumulators)
            return [accumulator[...] for accumulator in accumulators]

        new_totals = jax.tree.map(jnp.add, totals, tuple(pl.run_scoped(products, *accumulators)))
        release(slot)
        return slot_after(slot), new_totals

    zeros = plgpu.layout_cast(jnp.zeros((TILE, problem.padded_rows), jnp.float32), plgpu.Layout.WGMMA)
    return list(lax.fori_loop(0, steps, step, (jnp.int32(turn), (zeros,) * problem.own_tiles))[1])


def _leave(problem: Problem, unit, helper, results: list[Array], smem, barriers) -> None:
    """What all helpers but the first have, for that one."""
    for tile, result in enumerate(results):
        smem["left"].at[helper - 1, unit, tile][...] = result
    plgpu.barrier_arrive(barriers["left"].at[unit])


def _gather(problem: Problem, unit, results: list[Array], smem, barriers) -> list[Array]:
    """All of the unit's results, from the first helper's own and what the others have left."""
    if problem.helpers == 1:
        return results
    plgpu.barrier_wait(barriers["left"].at[unit])

    def left(helper: int, tile: int) -> Array:
        return plgpu.load(smem["left"].at[helper - 1, unit, tile], layout=plgpu.Layout.WGMMA, optimized=False)  # pyright: ignore[reportCallIssue]

    turns = range(1, problem.turns)
    gathered = [
        functools.reduce(jnp.add, (left(turn, tile) for turn in turns), result) for tile, result in enumerate(results)
    ]
    for first in range(problem.turns, problem.helpers, problem.turns):  # up
        gathered.append(functools.reduce(jnp.add, (left(first + turn, 0) for turn in range(problem.turns))))
    return gathered


def _scale(problem: Problem, unit, results: list[Array], refs) -> list[Array]:
    """Results times the scales of their outputs and the factors of their rows."""
    scaled = []
    for tile, result in enumerate(results):
        if problem.form == "int4":
            result = result * 2.0**INT4_EXPONENT
        else:
            scales = plgpu.load(  # pyright: ignore[reportCallIssue]
                refs["scales"].at[_outputs(problem, unit, tile)],
                layout=plgpu.Layout.WGMMA.reduce(1),
                optimized=False,
            )
            if problem.form == "int8":
                scales = scales * 2.0**INT8_EXPONENT
            result = result * lax.broadcast_in_dim(scales, result.shape, [0])
        if "factors" in refs:
            factors = plgpu.load(refs["factors"], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)  # pyright: ignore[reportCallIssue]
            result = result * lax.broadcast_in_dim(factors, result.shape, [1])
        scaled.append(result)
    return scaled


def _scratch(problem: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shared memory and barriers of a thread block."""
    stages, rows, units, helpers = problem.config.stages, problem.padded_rows, problem.units, problem.helpers
    x_dtype, w_dtype = X_DTYPES[problem.form], W_DTYPES[problem.form]
    x_transforms = (
        plgpu.TilingTransform((8, problem.slab)),
        plgpu.SwizzleTransform(problem.slab * jnp.dtype(x_dtype).itemsize),
    )
    w_transforms = (plgpu.TilingTransform((8, problem.block_k)), plgpu.SwizzleTransform(problem.config.row_bytes))
    smem: dict[str, Any] = {
        "out": plgpu.SMEM((units, problem.rows_at_once, problem.out_columns), problem.out_dtype),
        "w": plgpu.SMEM(
            (stages, problem.parts, problem.block_columns, problem.block_k), w_dtype, transforms=w_transforms
        ),
        "x": plgpu.SMEM((stages, rows, problem.block_k), x_dtype, transforms=x_transforms),
    }
    barriers: dict[str, Any] = {
        "ready": plgpu.Barrier(num_arrivals=problem.copies_per_step, num_barriers=stages),
        "consumed": plgpu.Barrier(num_arrivals=problem.warpgroups // problem.turns, num_barriers=stages),
    }
    if problem.form == "int4":
        smem["scales"] = plgpu.SMEM(
            (stages, problem.groups_per_step, problem.parts, problem.block_columns), jnp.bfloat16
        )
    if not problem.on_device:
        smem["wide"] = plgpu.SMEM((problem.warpgroups, TILE, problem.slab), x_dtype)
    if helpers > 1:
        smem["left"] = plgpu.SMEM((helpers - 1, units, problem.own_tiles, TILE, rows), jnp.float32)
        barriers["left"] = plgpu.Barrier(num_arrivals=helpers - 1, num_barriers=units)
    if problem.split > 1:
        barriers["exchanged"] = plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=units)
    if problem.has_residual:
        barriers["residual"] = plgpu.Barrier(num_barriers=units)
    return smem, barriers


def _kernel(problem: Problem, arrays: dict[str, Array]) -> Array:
    split, names = problem.split, tuple(arrays)

    def quantized_matmul(*all_refs, smem, barriers):
        refs = dict(zip(names, all_refs, strict=False))
        out_ref, parts_ref = all_refs[len(names) :]
        block = lax.axis_index("block")
        rank = lax.axis_index("rank") if split > 1 else jnp.int32(0)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < problem.warpgroups)
        def _compute():
            if problem.on_device:
                plgpu.griddepcontrol_wait()
            unit, helper, _ = _role(problem, warpgroup)
            results = _multiply(problem, warpgroup, smem, barriers)
            if problem.helpers > 1:
                pl.when(helper > 0)(lambda: _leave(problem, unit, helper, results, smem, barriers))

            @pl.when(helper == 0)
            def _finish():
                number = block * problem.units + unit
                sums = _scale(problem, number, _gather(problem, unit, results, smem, barriers), refs)
                own_smem = {"out": smem["out"].at[unit]}
                own_barriers = {name: barriers[name].at[unit] for name in ("exchanged", "residual") if name in barriers}
                join(problem, number, rank, sums, out_ref, parts_ref, own_smem, own_barriers)

        @pl.when(warpgroup == problem.warpgroups)
        def _memory():
            _fetch(problem, block, rank, refs, smem, barriers)

    smem, barriers = _scratch(problem)
    return launch(
        problem,
        quantized_matmul,
        smem,
        barriers,
        tuple(arrays.values()),
        units=problem.units,
        warpgroups=problem.warpgroups,
    )


def _rows_in_float16(x: Array) -> tuple[Array, Array]:
    """Rows divided by powers of two, and these: of bfloat16 nothing is lost but what is 2**26 times below the largest."""
    wide = x.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(wide), axis=1, keepdims=True), 2.0**-100)
    factors = jnp.exp2(jnp.ceil(jnp.log2(largest))) / _FLOAT16_TOP
    return (wide / factors).astype(jnp.float16), factors


# The inner jit lets all layers of a program share one lowered kernel; a call site costs nothing then.
@functools.partial(
    jax.jit,
    static_argnames=("quantize_activations", "power_of_two_factors", "is_swiglu", "out_dtype", "config", "interpret"),
)
def quantized_matmul_mosaic_gpu(
    x: Float[Array, "rows k"],
    values: Array,  # [parts, columns, k], int4: [parts, columns, k / 2]
    scales: Array,  # [parts, columns], int4: [groups, parts, columns]
    residual: Float[Array, "rows columns"] | None = None,
    input_scale: Float[Array, ""] | None = None,
    *,
    quantize_activations: bool,
    power_of_two_factors: bool = False,
    is_swiglu: bool,
    out_dtype: jnp.dtype,
    config: TuningConfig | None = None,
    interpret: Any = None,
) -> Float[Array, "rows columns"]:
    """Computes what `quantized_matmul` (one part) and `quantized_matmul_swiglu` (gate and up) document.

    `config=None` takes `choose_config`'s; `interpret` takes `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    rows, k = x.shape
    form, columns = form_of(values, quantize_activations), values.shape[1]
    group_length = k // scales.shape[0] if form == "int4" else k
    if config is None:
        config = choose_config(
            form,
            rows,
            k,
            columns,
            is_swiglu=is_swiglu,
            has_residual=residual is not None,
            group_length=group_length,
            out_dtype=out_dtype,
        )
    problem = Problem(
        form, rows, k, columns, group_length, is_swiglu, residual is not None, jnp.dtype(out_dtype), config, interpret
    )
    factors = None
    if form == "float8":
        x, factors = quantize_rows(x, input_scale, power_of_two_factors=power_of_two_factors)
    elif form == "float8-wide":
        x, factors = _rows_in_float16(x)
    # The copy engine fills up fewer rows than a tile has, but not the last of several tiles.
    padding = problem.padded_rows - rows
    if rows > ROW_ALIGNMENT and padding:
        x = jnp.pad(x, ((0, padding), (0, 0)))
    if form == "int4":
        values = lax.bitcast_convert_type(values, jnp.int4).reshape(*values.shape[:-1], k)
    arrays = {"x": x, "w": values, "scales": scales}
    if factors is not None:
        arrays["factors"] = jnp.pad(factors[:, 0], (0, padding))
    if residual is not None:
        arrays["residual"] = residual
    return _kernel(problem, arrays)
