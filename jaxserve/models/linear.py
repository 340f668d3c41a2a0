"""Every product with a weight matrix: each picks its implementation by the number of rows and the kind of weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels.decode_matmul import MAX_ROWS, decode_matmul, decode_matmul_swiglu
from jaxserve.sharding.collectives import Collectives


def column_parallel(
    x: Float[Array, "tokens k"], w: Float[Array, "k n"], bias: Float[Array, " n"] | None
) -> Float[Array, "tokens n"]:
    """x @ w + bias, for this device's columns of w: nothing is exchanged."""
    return add_bias(_product(x, w, None), bias)


def row_parallel(
    x: Float[Array, "tokens k"],
    w: Float[Array, "k n"],
    bias: Float[Array, " n"] | None,
    residual: Float[Array, "tokens n"],
    collectives: Collectives,
) -> Float[Array, "tokens n"]:
    """residual + x @ w + bias, where x and w are this device's part of k: the product is summed over devices."""
    if collectives.size == 1:
        return add_bias(_product(x, w, residual), bias)
    return residual + add_bias(collectives.all_reduce(_product(x, w, None)), bias)


def swiglu(
    x: Float[Array, "tokens k"], w_gate_up: Float[Array, "k 2 ffn"], bias: Float[Array, "2 ffn"] | None
) -> Float[Array, "tokens ffn"]:
    """silu(x @ gate) * (x @ up) (https://arxiv.org/abs/2002.05202), for this device's columns of both."""
    hidden, _, ffn = w_gate_up.shape
    if bias is None and x.shape[0] <= MAX_ROWS:
        return decode_matmul_swiglu(x, w_gate_up, prefetch_weights=True)
    gate_up = _product(x, w_gate_up.reshape(hidden, 2 * ffn), None).reshape(-1, 2, ffn)  # [tokens, 2, ffn]
    gate_up = add_bias(gate_up, bias)
    activated = jax.nn.silu(gate_up[:, 0].astype(jnp.float32)) * gate_up[:, 1].astype(jnp.float32)
    return activated.astype(x.dtype)


def head_scores(x: Float[Array, "rows k"], head: Float[Array, "k vocab"]) -> Float[Array, "rows vocab"]:
    """x @ head in float32."""
    if x.shape[0] <= MAX_ROWS:
        return decode_matmul(x, head, out_dtype=jnp.float32, prefetch_weights=True)
    return jnp.dot(x, head, preferred_element_type=jnp.float32)


def add_bias(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias[None].astype(x.dtype)


def _product(
    x: Float[Array, "tokens k"], w: Float[Array, "k n"], residual: Float[Array, "tokens n"] | None
) -> Float[Array, "tokens n"]:
    if x.shape[0] <= MAX_ROWS:
        # Weights are parameters of the program: nothing that runs before a product writes them.
        return decode_matmul(x, w, residual=residual, prefetch_weights=True)
    product = x @ w
    return product if residual is None else residual + product
