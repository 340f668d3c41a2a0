"""Rows rounded to float8, each with a factor of its own, for Hopper in Pallas Mosaic GPU: one kernel where XLA makes more.

A thread block takes a row, which lies in the registers of one warpgroup from the first load to the last store, as in
`add_rms_norm_mosaic_gpu`. cuBLASLt's 8-bit products take multiples of 16 rows: the results have that many, and what lies in
those beyond the given rows is not defined, as each row of a product depends on the row of the same number alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.kernels.quantized_matmul_xla import FLOAT8, FLOAT8_MAX, SMALLEST_FACTOR, padded_rows, power_of_two_above
from jaxserve.kernels.register_layout import LANES, WARPS

_THREADS = WARPS * LANES
_MAX_ELEMENTS_PER_THREAD = 112  # of a row, in registers
_MAX_SWIGLU_ELEMENTS_PER_THREAD = 56  # of a result's row, for which a thread holds twice as many and their scales
_MAX_ROWS = 512  # beyond which the products' time is all that counts


def unsupported_reason(rows: int, size: int, dtype: Any, *, is_swiglu: bool = False) -> str | None:
    """Why the kernels can't make so many rows of so many elements, or None if they can.

    Args:
        dtype: of what is rounded.
        is_swiglu: whether the rows come of a gated product.
    """
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"{dtype} is neither bfloat16 nor float16"
    most = _THREADS * (_MAX_SWIGLU_ELEMENTS_PER_THREAD if is_swiglu else _MAX_ELEMENTS_PER_THREAD)
    if size % (4 * _THREADS) or size > most:
        return f"{size=} is not a multiple of {4 * _THREADS} up to {most}"
    if rows > _MAX_ROWS:
        return f"{rows=} are more than {_MAX_ROWS}"
    return None


def row_layout(size: int) -> Any:
    """How a row lies in a warpgroup's registers: a Pallas layout, whose type jax keeps private."""
    vector = next(vector for vector in (8, 4) if size % (vector * _THREADS) == 0)
    return plgpu.Layout.WG_STRIDED((size,), vec_size=vector)


def round_row(
    row: Float[Array, " size"], *, power_of_two_factors: bool
) -> tuple[Float[Array, " size"], Float[Array, ""]]:
    """In a kernel: a row of float32 in float8, and the factor that brings it back, as `quantize_rows` has them."""
    factor = jnp.maximum(jnp.max(jnp.abs(row)) * jnp.float32(1.0 / FLOAT8_MAX), jnp.float32(SMALLEST_FACTOR))
    if power_of_two_factors:
        factor = power_of_two_above(factor)
    return (row / factor).astype(FLOAT8), factor  # the conversion holds what is rounded past the largest number there


# The inner jit lets all layers of a program share one lowered kernel; a call site costs nothing then.
@functools.partial(jax.jit, static_argnames=("power_of_two_factors", "interpret"))
def quantize_rows_mosaic_gpu(
    x: Float[Array, "rows size"], *, power_of_two_factors: bool, interpret: Any = None
) -> tuple[Float[Array, "padded size"], Float[Array, " padded"]]:
    """Computes what `quantize_rows` documents, from validated arguments, with rows up to a multiple of 16.

    `interpret` takes `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    rows, size = x.shape
    layout = row_layout(size)

    def quantize_rows(x_ref: Any, values_ref: Any, factors_ref: Any) -> None:
        if interpret is None:
            # The next kernel may be launched while this one runs; it must itself wait for this one's end.
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        row = lax.axis_index("row")
        loaded = plgpu.load(x_ref.at[row], layout=layout, optimized=False)  # pyright: ignore[reportCallIssue] (jax 0.10)
        values, factor = round_row(loaded.astype(jnp.float32), power_of_two_factors=power_of_two_factors)
        values_ref[row] = values
        factors_ref[row] = factor

    padded = padded_rows(rows)
    return plgpu.kernel(
        quantize_rows,
        out_type=(jax.ShapeDtypeStruct((padded, size), FLOAT8), jax.ShapeDtypeStruct((padded,), jnp.float32)),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(x)


@functools.partial(jax.jit, static_argnames=("rows", "dtype", "power_of_two_factors", "interpret"))
def swiglu_quantize_rows_mosaic_gpu(
    product: Float[Array, "padded two_ffn"],
    factors: Float[Array, " padded"],
    scales: Float[Array, "2 ffn"],
    *,
    rows: int,
    dtype: Any,
    power_of_two_factors: bool,
    interpret: Any = None,
) -> tuple[Float[Array, "padded ffn"], Float[Array, " padded"]]:
    """silu(gate) * up of a float8 product, rounded to `dtype` and then to float8 by rows.

    Args:
        product: gate and up of every row, as the product of float8 numbers left them.
        factors: of the product's rows.
        scales: of its columns.
        rows: how many of the product's rows are wanted.
        dtype: what an unfused pass would have between this and the next product.
        interpret: as in `quantize_rows_mosaic_gpu`.
    """
    padded, ffn = product.shape[0], scales.shape[1]
    layout = row_layout(ffn)

    def swiglu_quantize_rows(
        product_ref: Any, factors_ref: Any, scales_ref: Any, values_ref: Any, out_ref: Any
    ) -> None:
        if interpret is None:
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        row = lax.axis_index("row")

        def load(ref: Any) -> Array:
            return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue] (jax 0.10)

        gate, up = (load(product_ref.at[row, part]) for part in range(2))
        gate_scale, up_scale = (load(scales_ref.at[part]) for part in range(2))
        factor = factors_ref[row]
        gate, up = gate * factor * gate_scale, up * factor * up_scale
        activated = (gate / (1.0 + jnp.exp(-gate)) * up).astype(dtype)
        values, out = round_row(activated.astype(jnp.float32), power_of_two_factors=power_of_two_factors)
        values_ref[row] = values
        out_ref[row] = out

    return plgpu.kernel(
        swiglu_quantize_rows,
        out_type=(jax.ShapeDtypeStruct((padded, ffn), FLOAT8), jax.ShapeDtypeStruct((padded,), jnp.float32)),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(product.reshape(padded, 2, ffn), factors, scales)
