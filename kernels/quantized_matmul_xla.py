"""Products with quantized weights in plain XLA: the reference, the CPU path and the fall-back.

Weights lie [outputs, inputs]: cuBLASLt's 8-bit products on Hopper want both operands with the inputs innermost, and XLA
would transpose, in every step, weights that lie the other way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.kernels.int4 import unpack_int4

FLOAT8 = jnp.float8_e4m3fn
FLOAT8_MAX = 448.0
SMALLEST_FACTOR = 2.0**-126  # that float32 has without losing digits, so that rows of zeros are divided by something
# cuBLASLt's 8-bit products take multiples of this many rows; and products of one row XLA treats as vectors, not with it.
ROW_MULTIPLE = 16


def quantized_matmul_xla(
    x: Float[Array, "rows k"],
    values: Array,  # [n, k], int4: [n, k / 2]
    scales: Array,  # [n], int4: [groups, n]
    *,
    quantize_activations: bool,
    power_of_two_factors: bool,
    input_scale: Float[Array, ""] | None,
    residual: Float[Array, "rows n"] | None,
    out_dtype: jnp.dtype,
) -> Float[Array, "rows n"]:
    """Computes what `quantized_matmul` documents, from validated arguments."""
    rows = quantize_rows(x, input_scale, power_of_two_factors=power_of_two_factors) if quantize_activations else None
    product = _product(x, rows, values, scales)
    if residual is not None:
        product = product + residual.astype(jnp.float32)
    return product.astype(out_dtype)


def quantized_matmul_swiglu_xla(
    x: Float[Array, "rows k"],
    values: Array,  # [2, ffn, k], int4: [2, ffn, k / 2]
    scales: Array,  # [2, ffn], int4: [groups, 2, ffn]
    *,
    quantize_activations: bool,
    input_scale: Float[Array, ""] | None,
) -> Float[Array, "rows ffn"]:
    """Computes what `quantized_matmul_swiglu` documents, from validated arguments."""
    _, ffn, stored = values.shape
    rows = quantize_rows(x, input_scale) if quantize_activations else None
    gate_up = _product(x, rows, values.reshape(2 * ffn, stored), scales.reshape(*scales.shape[:-2], 2 * ffn))
    return (jax.nn.silu(gate_up[:, :ffn]) * gate_up[:, ffn:]).astype(x.dtype)


def quantize_rows(
    x: Float[Array, "rows k"], input_scale: Float[Array, ""] | None, *, power_of_two_factors: bool = False
) -> tuple[Float[Array, "rows k"], Float[Array, "rows 1"]]:
    """Activations in float8 and the factors that bring them back.

    Without an `input_scale`, a row's factor makes its largest number float8's largest, which is then held exactly: rows
    may owe most of their size to one number.

    Args:
        power_of_two_factors: take the smallest power of two with which the row fits. Float8's steps are relative, so that
            a row's numbers are then the same however many devices it is cut over: each can take the factor of its own
            part, with nothing exchanged (only numbers 2**15 times smaller than the row's largest, which float8 holds
            with fewer digits, may differ).
    """
    wide = x.astype(jnp.float32)
    if input_scale is not None:
        factors = jnp.broadcast_to(input_scale, (x.shape[0], 1))
        return jnp.clip(wide / input_scale, -FLOAT8_MAX, FLOAT8_MAX).astype(FLOAT8), factors
    factors = jnp.maximum(jnp.max(jnp.abs(wide), axis=1, keepdims=True) * (1.0 / FLOAT8_MAX), SMALLEST_FACTOR)
    if power_of_two_factors:
        factors = power_of_two_above(factors)
    return jnp.clip(wide / factors, -FLOAT8_MAX, FLOAT8_MAX).astype(FLOAT8), factors


def power_of_two_above(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The smallest power of two not below x, which is at least 2**-126."""
    mantissa_bits = 23
    bits = lax.bitcast_convert_type(x, jnp.int32) + jnp.int32((1 << mantissa_bits) - 1)
    return lax.bitcast_convert_type((bits >> jnp.int32(mantissa_bits)) << jnp.int32(mantissa_bits), jnp.float32)


def _product(x: Array, rows: tuple[Array, Array] | None, values: Array, scales: Array) -> Float[Array, "rows n"]:
    """In float32, of x, or of what `quantize_rows` made of it."""
    if values.dtype == jnp.uint8:
        return _matmul(x, dequantize_int4(values, scales, x.dtype))
    if rows is not None:
        return float8_product(rows[0], values) * rows[1] * scales[None]
    return _matmul(x, values.astype(x.dtype)) * scales[None]


def dequantize_int4(values: Array, scales: Array, dtype: jnp.dtype) -> Float[Array, "n k"]:
    """The dense weights, rounded to `dtype`."""
    n, groups = values.shape[0], scales.shape[0]
    numbers = unpack_int4(values, 2 * values.shape[1] // groups).reshape(n, groups, -1).astype(jnp.float32)
    return (numbers * scales.T[:, :, None].astype(jnp.float32)).astype(dtype).reshape(n, -1)


def float8_product(x: Float[Array, "rows k"], w: Float[Array, "n k"]) -> Float[Array, "rows n"]:
    """x @ w.T of float8 numbers, in float32; where x lacks rows that `product_rows` tells of, they are added and cut off."""
    rows = x.shape[0]
    padding = product_rows(rows) - rows
    if jax.default_backend() != "gpu":  # the same numbers: products of two float8 are exact in float32
        return _matmul(x.astype(jnp.float32), w.astype(jnp.float32))
    return _matmul(jnp.pad(x, ((0, padding), (0, 0))), w)[:rows]


def product_rows(rows: int) -> int:
    """Rows that 8-bit products of so many rows take on this process's default device."""
    return padded_rows(rows) if jax.default_backend() == "gpu" else rows


def padded_rows(rows: int) -> int:
    """Rows that 8-bit products of so many rows take on a GPU."""
    return rows + -rows % ROW_MULTIPLE


def _matmul(x: Float[Array, "rows k"], w: Float[Array, "n k"]) -> Float[Array, "rows n"]:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
