"""Every product with a weight matrix: each picks its implementation by the kind of weight."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels.hopper import missing_device
from jaxserve.kernels.quantize_rows import (
    Float8Product,
    Float8Rows,
    float8_matmul,
    float8_matmul_swiglu,
    float8_product_unscaled,
    quantize_rows,
)
from jaxserve.kernels.quantized_matmul import quantized_matmul, quantized_matmul_swiglu
from jaxserve.models.quantization import QuantizedWeight, split_axes
from jaxserve.sharding.collectives import Collectives

# A product of so few tokens has too few columns to draw an H100's whole bandwidth: its inputs are cut into parts.
_FEW_TOKENS = 32
_PARTS = 4


def column_parallel(
    x: Float[Array, "tokens k"] | Float8Rows,
    w: Float[Array, "k ..."] | QuantizedWeight,
    bias: Float[Array, " n"] | None,
) -> Float[Array, "tokens n"]:
    """x @ w + bias, for this device's columns of w: nothing is exchanged. w's output axes are taken as one."""
    return add_bias(_product(x, w), bias)


def row_parallel(
    x: Float[Array, "tokens k"] | Float8Rows,
    w: Float[Array, "... n"] | QuantizedWeight,
    bias: Float[Array, " n"] | None,
    collectives: Collectives,
) -> Float[Array, "*parts tokens n"]:
    """x @ w + bias, where x and w are this device's part of k: the product is summed over devices.

    w's input axes are taken as one. The result may be float32 parts that are still to be added up: `add_rms_norm` does
    that on the way, which saves a kernel.
    """
    parts = num_parts(num_tokens(x), w, bias, collectives)
    if parts == 1 or isinstance(x, Float8Rows):
        return add_bias(collectives.all_reduce(row_parallel_part(x, w)), bias)
    w = w.reshape(parts, x.shape[1] // parts, -1)  # pyright: ignore[reportAttributeAccessIssue] - not quantized
    return jnp.einsum("tpk,pkn->ptn", x.reshape(-1, parts, w.shape[1]), w, preferred_element_type=jnp.float32)


def row_parallel_part(
    x: Float[Array, "tokens k"] | Float8Rows, w: Float[Array, "... n"] | QuantizedWeight
) -> Float[Array, "tokens n"]:
    """This device's part of what `row_parallel` sums over devices."""
    # Activations are rounded the same on one device as on several, which each have a part of them.
    return _product(x, w, power_of_two_factors=True)


def row_parallel_unscaled(
    x: Float[Array, "tokens k"] | Float8Rows, w: Float[Array, "... n"] | QuantizedWeight
) -> Float[Array, "tokens n"] | Float8Product:
    """As `row_parallel_part`; of float8 numbers unscaled, where whoever sums them over devices scales them too."""
    if not rounds_rows(w):
        return row_parallel_part(x, w)
    return float8_product_unscaled(_float8_rows(x, power_of_two_factors=True), *_flat(w))


def num_tokens(x: Float[Array, "tokens k"] | Float8Rows) -> int:
    return x.rows if isinstance(x, Float8Rows) else x.shape[0]


def num_parts(
    tokens: int, w: Float[Array, "... n"] | QuantizedWeight, bias: Float[Array, " n"] | None, collectives: Collectives
) -> int:
    """How many parts `row_parallel` leaves for so many tokens; 1: the result itself."""
    if isinstance(w, QuantizedWeight) or bias is not None or collectives.size > 1 or missing_device() is not None:
        return 1
    # XLA turns parts of a single token into sums over converted and transposed weights.
    return (
        _PARTS if 1 < tokens <= _FEW_TOKENS and w.dtype == jnp.bfloat16 and math.prod(w.shape[:-1]) % _PARTS == 0 else 1
    )


def swiglu(
    x: Float[Array, "tokens k"] | Float8Rows,
    w_gate_up: Float[Array, "k 2 ffn"] | QuantizedWeight,
    bias: Float[Array, "2 ffn"] | None,
    w_next: Any = None,
) -> Float[Array, "tokens ffn"] | Float8Rows:
    """silu(x @ gate) * (x @ up) (https://arxiv.org/abs/2002.05202), for this device's columns of both.

    Args:
        w_next: the weight whose `row_parallel` product is made of the result; where that rounds what it gets to float8, the
            result is rounded so already. None: it is not.

    Raises:
        ValueError: rows that are rounded already where the result would not be.
    """
    if bias is None and rounds_rows(w_gate_up) and rounds_rows(w_next):
        rows = _float8_rows(x)
        return float8_matmul_swiglu(rows, w_gate_up.values, w_gate_up.scales, power_of_two_factors=True)
    if isinstance(x, Float8Rows):
        raise ValueError("rows of float8 go with a gated product only where what takes its result rounds that too")
    if bias is None and isinstance(w_gate_up, QuantizedWeight):
        return quantized_matmul_swiglu(x, w_gate_up.values, w_gate_up.scales, **_activations(w_gate_up))
    gate_up = _product(x, w_gate_up).reshape(-1, *w_gate_up.shape[1:])  # [tokens, 2, ffn]
    gate_up = add_bias(gate_up, bias)
    activated = jax.nn.silu(gate_up[:, 0].astype(jnp.float32)) * gate_up[:, 1].astype(jnp.float32)
    return activated.astype(x.dtype)


def head_scores(x: Float[Array, "rows k"], head: Float[Array, "k vocab"]) -> Float[Array, "rows vocab"]:
    """x @ head in float32."""
    return jnp.dot(x, head, preferred_element_type=jnp.float32)


def add_bias(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias[None].astype(x.dtype)


def rounds_rows(w: Any) -> TypeGuard[QuantizedWeight]:
    """Whether a product with this weight rounds each of its rows to float8 with a factor of the row's own."""
    return isinstance(w, QuantizedWeight) and w.format == "fp8" and w.input_scale is None


def _product(
    x: Float[Array, "tokens k"] | Float8Rows, w: Array | QuantizedWeight, *, power_of_two_factors: bool = False
) -> Float[Array, "tokens n"]:
    """x @ w, with w's axes taken as two: as many inputs as x has columns, and the outputs.

    Raises:
        ValueError: rows that are rounded already and a weight whose product rounds none.
    """
    if not isinstance(w, QuantizedWeight):
        if isinstance(x, Float8Rows):
            raise ValueError(f"rows of float8 do not go with weights of {w.dtype}")
        return x @ w.reshape(x.shape[1], -1)
    values, scales = _flat(w)
    if isinstance(x, Float8Rows) or rounds_rows(w):
        return float8_matmul(_float8_rows(x, power_of_two_factors=power_of_two_factors), values, scales)
    return quantized_matmul(x, values, scales, power_of_two_factors=power_of_two_factors, **_activations(w))


def _float8_rows(x: Float[Array, "tokens k"] | Float8Rows, *, power_of_two_factors: bool = False) -> Float8Rows:
    return x if isinstance(x, Float8Rows) else quantize_rows(x, power_of_two_factors=power_of_two_factors)


def _flat(w: QuantizedWeight) -> tuple[Array, Array]:
    """Its values as [outputs, inputs], and their scales."""
    outputs, _ = split_axes(w.values.shape, w.num_input_axes)
    size = math.prod(outputs)
    scales = w.scales.reshape(-1, size) if w.format == "int4" else w.scales.reshape(size)
    return w.values.reshape(size, -1), scales


def _activations(w: QuantizedWeight) -> dict[str, Any]:
    """What is done to the activations that meet a quantized weight."""
    return {"quantize_activations": w.format == "fp8", "input_scale": w.input_scale}
