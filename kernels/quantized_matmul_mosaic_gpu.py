"""Products of a few rows with a large quantized weight matrix, for Hopper in Pallas Mosaic GPU.

As in `decode_matmul_mosaic_gpu.py`, such a product takes as long as its weights take to be read. A thread block owns 64
to 256 outputs. Its memory warpgroup fetches their next 128 bytes of inputs each, and the tile of x beside them, through a
ring in shared memory. The outputs are the rows of the tensor cores' result and x's rows, padded to 8, its columns. Up to
four warpgroups compute, so that some widen weights while others multiply: they own outputs (units), so that they share the
tiles of x, or take turns with the tiles along k (helpers), and then the first of them adds up what they have. Where the
outputs alone make too few thread blocks, several share k, as a cluster or not.

What a compute warpgroup does with a tile of 64 outputs depends on the weights:

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
from jaxserve.kernels.int4 import unpack_int4
from jaxserve.kernels.quantized_matmul_choice import choose_config
from jaxserve.kernels.quantized_matmul_multiply import multiply, role, tile_outputs
from jaxserve.kernels.quantized_matmul_plan import (
    MULTIPROCESSORS,
    W_DTYPES,
    X_DTYPES,
    Problem,
    TuningConfig,
    form_of,
)
from jaxserve.kernels.quantized_matmul_widen import INT4_EXPONENT, INT8_EXPONENT
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
                refs["scales"].at[tile_outputs(problem, unit, tile)],
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
    if problem.split > 1 and problem.clustered:
        barriers["exchanged"] = plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=units)
    if problem.has_residual:
        barriers["residual"] = plgpu.Barrier(num_barriers=units)
    return smem, barriers


def _kernel(problem: Problem, arrays: dict[str, Any]) -> Array:
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
            unit, helper, _ = role(problem, warpgroup)
            results = multiply(problem, warpgroup, smem, barriers)
            if problem.helpers > 1:
                pl.when(helper > 0)(lambda: _leave(problem, unit, helper, results, smem, barriers))

            @pl.when(helper == 0)
            def _finish():
                number = block * problem.units + unit
                sums = _scale(problem, number, _gather(problem, unit, results, smem, barriers), refs)
                own_smem = {"out": smem["out"].at[unit]}
                own_barriers = {name: barriers[name].at[unit] for name in ("exchanged", "residual") if name in barriers}
                counters = refs.get("counters")
                join(problem, number, rank, sums, out_ref, parts_ref, own_smem, own_barriers, counters)

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
        clustered=problem.clustered,
    )


def _multiprocessors() -> int:
    """Of this process's first GPU; an H100's where there is none, since then nothing runs."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else MULTIPROCESSORS


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
            multiprocessors=_multiprocessors(),
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
        if interpret is None:
            values = lax.bitcast_convert_type(values, jnp.int4).reshape(*values.shape[:-1], k)
        else:  # the interpreter's widening takes them in order
            values = unpack_int4(values, group_length).astype(jnp.int4)
    arrays: dict[str, Any] = {"x": x, "w": values, "scales": scales}
    if factors is not None:
        arrays["factors"] = jnp.pad(factors[:, 0], (0, padding))
    if residual is not None:
        arrays["residual"] = residual
    if not problem.clustered:
        # XLA zeroes those of all products at once.
        arrays["counters"] = jax.new_ref(jnp.zeros((columns // problem.out_columns,), jnp.int32))
    return _kernel(problem, arrays)
