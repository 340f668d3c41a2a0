"""A decode layer between attention and the next attention in plain XLA: the reference, the CPU path, the fall-back."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.kernels.decode_matmul_xla import decode_matmul_swiglu_xla, decode_matmul_xla


def rms_norm(x: Float[Array, "rows size"], weight: Float[Array, " size"], eps: float) -> Float[Array, "rows size"]:
    """Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467) in float32; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)[None]).astype(x.dtype)


def decode_layer_xla(
    attended: Float[Array, "rows attended"],
    residual: Float[Array, "rows hidden"],
    wo: Float[Array, "attended hidden"],
    mlp_norm: Float[Array, " hidden"],
    w_gate_up: Float[Array, "hidden 2 ffn"],
    w_down: Float[Array, "ffn hidden"],
    next_norm: Float[Array, " hidden"] | None,
    next_wqkv: Float[Array, "hidden qkv"] | None,
    *,
    eps: float,
) -> tuple[Float[Array, "rows hidden"], Float[Array, "rows qkv"] | None]:
    """Computes what `decode_layer` documents, from validated arguments."""
    x = decode_matmul_xla(attended, wo, residual, residual.dtype)
    activated = decode_matmul_swiglu_xla(rms_norm(x, mlp_norm, eps), w_gate_up)
    x = decode_matmul_xla(activated, w_down, x, x.dtype)
    if next_norm is None or next_wqkv is None:
        return x, None
    return x, decode_matmul_xla(rms_norm(x, next_norm, eps), next_wqkv, None, x.dtype)
