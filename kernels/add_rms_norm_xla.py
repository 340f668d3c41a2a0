"""The residual add and the norm after it in plain XLA: the reference, the CPU path and the fall-back."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels.rms_norm_xla import rms_norm


def add_rms_norm_xla(
    x: Float[Array, "rows size"], update: Float[Array, "*parts rows size"], weight: Float[Array, " size"], eps: float
) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"]]:
    """Computes what `add_rms_norm` documents, from validated arguments."""
    total = x + update if update.ndim == 2 else (x.astype(jnp.float32) + update.sum(axis=0)).astype(x.dtype)
    return total, rms_norm(total, weight, eps)
