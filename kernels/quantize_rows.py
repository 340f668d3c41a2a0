"""Rows rounded to float8 for a product with float8 weights: validation and the choice of implementation."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels.hopper import takes_kernel
from jaxserve.kernels.quantize_rows_mosaic_gpu import (
    quantize_rows_mosaic_gpu,
    swiglu_quantize_rows_mosaic_gpu,
    unsupported_reason,
)
from jaxserve.kernels.quantized_matmul_xla import FLOAT8, float8_product, product_rows
from jaxserve.kernels.quantized_matmul_xla import quantize_rows as quantize_rows_xla

Implementation = Literal["mosaic_gpu", "xla"]


class Float8Rows(NamedTuple):
    """Rows in float8, each with the factor that brings it back.

    Attributes:
        values: float8_e4m3fn [padded, k], as many as `product_rows` tells of; those beyond the first `rows` are not defined.
        factors: float32 [padded].
        rows: how many there are.
        dtype: what they were rounded from, and what their products are given in.
    """

    values: Array
    factors: Array
    rows: int
    dtype: jnp.dtype


class Float8Product(NamedTuple):
    """What rows of float8 made with a weight of float8, before it is scaled: numbers * factors * scales is the product.

    Attributes:
        numbers: float32 [padded, n]; those of rows beyond the ones that there are are not defined.
        factors: float32 [padded], of the rows.
        scales: float32 [n], of the columns.
    """

    numbers: Array
    factors: Array
    scales: Array

    def scaled(self, rows: int, dtype: jnp.dtype) -> Float[Array, "rows n"]:
        """The product itself, of its first rows."""
        return (self.numbers[:rows] * self.factors[:rows, None] * self.scales[None]).astype(dtype)


def quantize_rows(
    x: Float[Array, "rows k"], *, power_of_two_factors: bool = False, implementation: Implementation | None = None
) -> Float8Rows:
    """Rounds each row to float8 with a factor that makes its largest number float8's largest.

    Args:
        x: float32, bfloat16 or float16.
        power_of_two_factors: as in `quantized_matmul`.
        implementation: None takes the Hopper kernel where it can run, and else plain XLA, which "xla" asks for.

    Raises:
        NotImplementedError: implementation="mosaic_gpu" for a case that the kernel does not cover.
    """
    rows, size = x.shape
    # Many rows are XLA's by choice: the products' time is all that counts there.
    if takes_kernel(
        "quantize_rows", implementation, lambda: unsupported_reason(rows, size, x.dtype), is_expected=False
    ):
        values, factors = quantize_rows_mosaic_gpu(x, power_of_two_factors=power_of_two_factors)
    else:
        values, factors = quantize_rows_xla(x, None, power_of_two_factors=power_of_two_factors)
        padding = product_rows(rows) - rows
        values, factors = jnp.pad(values, ((0, padding), (0, 0))), jnp.pad(factors[:, 0], (0, padding))
    return Float8Rows(values, factors, rows, x.dtype)


def swiglu_quantize_rows(
    product: Float[Array, "padded two_ffn"],
    x: Float8Rows,
    scales: Float[Array, "2 ffn"],
    *,
    power_of_two_factors: bool = False,
    implementation: Implementation | None = None,
) -> Float8Rows:
    """silu(gate) * up (Shazeer, arXiv:2002.05202) of what `x` made with float8 weights, its rows rounded again.

    Args:
        product: float32, gate and up side by side, of the float8 numbers alone.
        x: the rows that it was made of.
        scales: of the product's columns.
        power_of_two_factors, implementation: of the rounding, as in `quantize_rows`.

    Raises:
        NotImplementedError: implementation="mosaic_gpu" for a case that the kernel does not cover.
    """
    ffn = scales.shape[1]
    if takes_kernel(
        "swiglu_quantize_rows",
        implementation,
        lambda: unsupported_reason(x.rows, ffn, x.dtype, is_swiglu=True),
        is_expected=False,
    ):
        values, factors = swiglu_quantize_rows_mosaic_gpu(
            product, x.factors, scales, rows=x.rows, dtype=x.dtype, power_of_two_factors=power_of_two_factors
        )
        return Float8Rows(values, factors, x.rows, x.dtype)
    gate_up = Float8Product(product, x.factors, scales.reshape(-1)).scaled(x.rows, jnp.dtype(jnp.float32))
    activated = (jax.nn.silu(gate_up[:, :ffn]) * gate_up[:, ffn:]).astype(x.dtype)
    return quantize_rows(activated, power_of_two_factors=power_of_two_factors, implementation=implementation)


def float8_matmul(x: Float8Rows, values: Float[Array, "n k"], scales: Float[Array, " n"]) -> Float[Array, "rows n"]:
    """x @ (values * scales).T in x's dtype, of the float8 numbers themselves, summed in float32.

    Args:
        values: float8_e4m3fn.
        scales: float32.

    Raises:
        ValueError: dtypes or sizes that do not fit together.
    """
    return float8_product_unscaled(x, values, scales).scaled(x.rows, x.dtype)


def float8_product_unscaled(x: Float8Rows, values: Float[Array, "n k"], scales: Float[Array, " n"]) -> Float8Product:
    """As `float8_matmul`, for who scales the numbers on the way."""
    return Float8Product(_product(x, values, scales), x.factors, scales)


def float8_matmul_swiglu(
    x: Float8Rows,
    values: Float[Array, "2 ffn k"],
    scales: Float[Array, "2 ffn"],
    *,
    power_of_two_factors: bool = False,
    implementation: Implementation | None = None,
) -> Float8Rows:
    """silu(x @ gate.T) * (x @ up.T), rounded for another product with float8 weights.

    Args:
        values: float8_e4m3fn, gate and up.
        scales: float32.
        power_of_two_factors, implementation: of the result's rounding, as in `quantize_rows`.

    Raises:
        ValueError: dtypes or sizes that do not fit together.
    """
    flat = values.reshape(-1, values.shape[-1])
    product = _product(x, flat, scales.reshape(-1))
    return swiglu_quantize_rows(
        product, x, scales, power_of_two_factors=power_of_two_factors, implementation=implementation
    )


def _product(x: Float8Rows, values: Array, scales: Array) -> Float[Array, "padded n"]:
    """Of the float8 numbers alone; its rows beyond x's are not defined."""
    if values.dtype != FLOAT8 or values.ndim != 2 or values.shape[1] != x.values.shape[1]:
        raise ValueError(f"values are {values.dtype}{values.shape}, must be {FLOAT8.__name__}[n, {x.values.shape[1]}]")
    if scales.shape != values.shape[:1] or scales.dtype != jnp.float32:
        raise ValueError(f"scales are {scales.dtype}{scales.shape}, must be float32[{values.shape[0]}]")
    return float8_product(x.values, values)
