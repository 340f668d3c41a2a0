"""The root-mean-square norm in plain XLA, for every op and layer that has one."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows size"], weight: Float[Array, " size"], eps: float) -> Float[Array, "*rows size"]:
    """Root-mean-square norm (https://arxiv.org/abs/1910.07467) in float32; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return (wide * scale * weight).astype(x.dtype)
