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
* int4: the same; what a group of inputs gives is multiplied with the group's scales, and added up in float32.

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
    round_up,
)
from jaxserve.kernels.quantized_matmul_plan import (
    ROW_BYTES,
    W_DTYPES,
    X_DTYPES,
    Problem,
    TuningConfig,
    block_k,
    choose_config,
    form_of,
)
from jaxserve.kernels.quantized_matmul_xla import quantize_rows

_FLOAT16_TOP = 2.0**12  # what rows in float16 are scaled to: their sums, and numbers 2**26 times smaller, stay in range


def _fetch(problem: Problem, block, rank, refs, smem, barriers) -> None:
    """The memory warpgroup: tiles of the weights, of x, and of the groups' scales, and the residual."""
    stages, steps = problem.config.stages, problem.steps
    first_step = rank * steps

    def along_k(step, length):
        return pl.ds(pl.multiple_of((first_step + step) * length, length), length)

    def fetch(step, slot):
        ready = barriers["ready"].at[slot]
        for tile in range(problem.tiles):
            part, output = (tile, block * TILE) if problem.is_swiglu else (0, (block * problem.tiles + tile) * TILE)
            outputs = pl.ds(pl.multiple_of(output, TILE), TILE)
            plgpu.copy_gmem_to_smem(
                refs["w"].at[part, outputs, along_k(step, problem.block_k)], smem["w"].at[slot, tile], ready
            )
            if problem.form == "int4":
                groups = along_k(step, problem.groups_per_step)
                plgpu.copy_gmem_to_smem(refs["scales"].at[groups, part, outputs], smem["scales"].at[slot, tile], ready)
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
            plgpu.copy_gmem_to_smem(
                refs["residual"].at[rank_rows(problem, rank), out_columns(problem, block)],
                smem["out"],
                barriers["residual"],
                oob_mode=plgpu.OOBFillMode.ZEROS,
            )

    def refill(step, carry):
        slot = lax.rem(step, stages)
        plgpu.barrier_wait(barriers["consumed"].at[slot])
        fetch(step, slot)
        return carry

    lax.fori_loop(ahead, steps, refill, None)
    for slot in range(ahead):  # no barrier may be left with an arrival that nobody saw
        plgpu.barrier_wait(barriers["consumed"].at[slot])


def _left_side(problem: Problem, tile, smem, slot) -> Any:
    """A weight tile [TILE, block_k] as the tensor cores take it: a reference, or widened in registers."""
    narrow = smem["w"].at[slot, tile]
    if problem.form == "float8":
        return narrow
    dtype = X_DTYPES[problem.form]
    if problem.form == "int4":
        wide = plgpu.load(narrow, layout=plgpu.Layout.WGMMA_UPCAST_4X)  # pyright: ignore[reportCallIssue]
        wide = plgpu.layout_cast(wide, plgpu.Layout.WGMMA_UPCAST_2X).astype(dtype)
    else:
        wide = plgpu.load(narrow, layout=plgpu.Layout.WGMMA_UPCAST_2X).astype(dtype)  # pyright: ignore[reportCallIssue]
    return plgpu.layout_cast(wide, plgpu.Layout.WGMMA)


def _product(problem: Problem, left, x) -> Array:
    """[TILE, padded_rows], in float32."""

    def body(accumulator):
        plgpu.wgmma(accumulator, left, x)
        return accumulator[...]

    return pl.run_scoped(body, plgpu.ACC((TILE, problem.padded_rows), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def _multiply(problem: Problem, smem, barriers) -> list[Array]:
    """The compute warpgroup's part of k: one [TILE, padded_rows] float32 result for each weight tile."""
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    length = problem.block_k // problem.groups_per_step

    def step(i, sums):
        slot = lax.rem(i, problem.config.stages)
        plgpu.barrier_wait(barriers["ready"].at[slot])
        new_sums = []
        for tile, total in enumerate(sums):
            left = _left_side(problem, tile, smem, slot)
            if not problem.on_device and problem.form != "float8":  # the interpreter multiplies references only
                smem["wide"].at[tile][...] = left
                left = smem["wide"].at[tile]
            for group in range(problem.groups_per_step):
                inputs = slice(group * length, (group + 1) * length)
                x = smem["x"].at[slot, :, pl.ds(group * length, length)].transpose((1, 0))
                if problem.groups_per_step == 1:
                    part = left
                else:
                    part = left[:, inputs] if problem.on_device else left.at[:, pl.ds(group * length, length)]
                product = _product(problem, part, x)
                if problem.form == "int4":
                    scales = plgpu.load(smem["scales"].at[slot, tile, group], layout=row_layout, optimized=False)  # pyright: ignore[reportCallIssue]
                    product = product * lax.broadcast_in_dim(scales.astype(jnp.float32), product.shape, [0])
                total = total + product
            new_sums.append(total)
        plgpu.barrier_arrive(barriers["consumed"].at[slot])
        return tuple(new_sums)

    zeros = plgpu.layout_cast(jnp.zeros((TILE, problem.padded_rows), jnp.float32), plgpu.Layout.WGMMA)
    return list(lax.fori_loop(0, problem.steps, step, (zeros,) * problem.tiles))


def _scale(problem: Problem, block, results: list[Array], refs) -> list[Array]:
    """Results times the scales of their outputs and the factors of their rows."""
    scaled = []
    for tile, result in enumerate(results):
        if problem.form != "int4":
            part, output = (tile, block * TILE) if problem.is_swiglu else (0, (block * problem.tiles + tile) * TILE)
            outputs = pl.ds(pl.multiple_of(output, TILE), TILE)
            scales = plgpu.load(  # pyright: ignore[reportCallIssue]
                refs["scales"].at[part, outputs], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
            )
            result = result * lax.broadcast_in_dim(scales, result.shape, [0])
        if "factors" in refs:
            factors = plgpu.load(refs["factors"], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)  # pyright: ignore[reportCallIssue]
            result = result * lax.broadcast_in_dim(factors, result.shape, [1])
        scaled.append(result)
    return scaled


def _scratch(problem: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shared memory and barriers of a thread block."""
    stages, tiles, rows = problem.config.stages, problem.tiles, problem.padded_rows
    x_dtype, w_dtype = X_DTYPES[problem.form], W_DTYPES[problem.form]
    # A group's inputs must be whole tiles of x.
    x_bytes = min(ROW_BYTES, problem.block_k // problem.groups_per_step * jnp.dtype(x_dtype).itemsize)
    x_transforms = (
        plgpu.TilingTransform((8, x_bytes // jnp.dtype(x_dtype).itemsize)),
        plgpu.SwizzleTransform(x_bytes),
    )
    w_transforms = (plgpu.TilingTransform((8, problem.block_k)), plgpu.SwizzleTransform(ROW_BYTES))
    smem: dict[str, Any] = {
        "out": plgpu.SMEM((problem.rows_per_rank, problem.out_columns), problem.out_dtype),
        "w": plgpu.SMEM((stages, tiles, TILE, problem.block_k), w_dtype, transforms=w_transforms),
        "x": plgpu.SMEM((stages, rows, problem.block_k), x_dtype, transforms=x_transforms),
    }
    barriers: dict[str, Any] = {
        "ready": plgpu.Barrier(num_arrivals=problem.copies_per_step, num_barriers=stages),
        "consumed": plgpu.Barrier(num_barriers=stages),
    }
    if problem.form == "int4":
        smem["scales"] = plgpu.SMEM((stages, tiles, problem.groups_per_step, TILE), jnp.bfloat16)
    if not problem.on_device:
        smem["wide"] = plgpu.SMEM((tiles, TILE, problem.block_k), x_dtype)
    if problem.split > 1:
        barriers["exchanged"] = plgpu.ClusterBarrier(collective_axes=("rank",))
    if problem.has_residual:
        barriers["residual"] = plgpu.Barrier()
    return smem, barriers


def _kernel(problem: Problem, arrays: dict[str, Array]) -> Array:
    split, names = problem.split, tuple(arrays)

    def quantized_matmul(*all_refs, smem, barriers):
        refs = dict(zip(names, all_refs, strict=False))
        out_ref, parts_ref = all_refs[len(names) :]
        block = lax.axis_index("block")
        rank = lax.axis_index("rank") if split > 1 else jnp.int32(0)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _compute():
            if problem.on_device:
                plgpu.griddepcontrol_wait()
            results = _scale(problem, block, _multiply(problem, smem, barriers), refs)
            join(problem, block, rank, results, out_ref, parts_ref, smem, barriers)

        @pl.when(warpgroup == 1)
        def _memory():
            _fetch(problem, block, rank, refs, smem, barriers)

    smem, barriers = _scratch(problem)
    return launch(problem, quantized_matmul, smem, barriers, tuple(arrays.values()))


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
    config = choose_config(form, rows, k, columns, is_swiglu=is_swiglu) if config is None else config
    if k % (block_k(form) * config.split):
        raise ValueError(f"{k=} must be a multiple of {block_k(form)} times {config.split=}")
    factors = None
    if form == "float8":
        x, factors = quantize_rows(x, input_scale, power_of_two_factors=power_of_two_factors)
    elif form == "float8-wide":
        x, factors = _rows_in_float16(x)
    # The copy engine fills up fewer rows than a tile has, but not the last of several tiles.
    padding = round_up(rows, ROW_ALIGNMENT) - rows
    if rows > ROW_ALIGNMENT and padding:
        x = jnp.pad(x, ((0, padding), (0, 0)))
    group_length = k
    if form == "int4":
        group_length = k // scales.shape[0]
        values = lax.bitcast_convert_type(values, jnp.int4).reshape(*values.shape[:-1], k)
    problem = Problem(
        form, rows, k, columns, group_length, is_swiglu, residual is not None, jnp.dtype(out_dtype), config, interpret
    )
    arrays = {"x": x, "w": values, "scales": scales}
    if factors is not None:
        arrays["factors"] = jnp.pad(factors[:, 0], (0, padding))
    if residual is not None:
        arrays["residual"] = residual
    return _kernel(problem, arrays)
