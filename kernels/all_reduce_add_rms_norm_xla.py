"""The sum over devices, the residual add and the norm after it in plain XLA: the reference, the CPU path, the fall-back."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.kernels.add_rms_norm_xla import add_rms_norm_xla


def all_reduce(x_dtype: jnp.dtype, update: Float[Array, "*parts rows size"], axis: str) -> Float[Array, "rows size"]:
    """The sum of the parts, rounded, and of that over the devices of a mesh axis, in the residual stream's dtype."""
    if update.ndim == 3:
        update = update.sum(axis=0).astype(x_dtype)
    return lax.psum(update, axis)


def all_reduce_add_rms_norm_xla(
    x: Float[Array, "rows size"],
    update: Float[Array, "*parts rows size"],
    weight: Float[Array, " size"],
    eps: float,
    axis: str,
) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"]]:
    """Computes what `all_reduce_add_rms_norm` documents, from validated arguments."""
    return add_rms_norm_xla(x, all_reduce(x.dtype, update, axis), weight, eps)
