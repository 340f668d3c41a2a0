"""Products of a few rows with a large weight matrix in plain XLA: the reference, the CPU path and the fall-back."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def decode_matmul_xla(
    x: Float[Array, "rows k"],
    w: Float[Array, "k n"],
    residual: Float[Array, "rows n"] | None,
    out_dtype: jnp.dtype,
) -> Float[Array, "rows n"]:
    """Computes what `decode_matmul` documents, from validated arguments."""
    product = jnp.dot(x, w, preferred_element_type=jnp.float32)
    if residual is not None:
        product = product + residual.astype(jnp.float32)
    return product.astype(out_dtype)


def decode_matmul_swiglu_xla(x: Float[Array, "rows k"], w_gate_up: Float[Array, "k 2 ffn"]) -> Float[Array, "rows ffn"]:
    """Computes what `decode_matmul_swiglu` documents, from validated arguments."""
    k, _, ffn = w_gate_up.shape
    # One product with a matrix: XLA has no fast kernel for three dimensions.
    gate_up = jnp.dot(x, w_gate_up.reshape(k, 2 * ffn), preferred_element_type=jnp.float32)
    return (jax.nn.silu(gate_up[:, :ffn]) * gate_up[:, ffn:]).astype(x.dtype)
