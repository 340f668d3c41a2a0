"""The residual add and the root-mean-square norm after it: validation and the choice of implementation."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels.add_rms_norm_mosaic_gpu import add_rms_norm_mosaic_gpu, unsupported_reason
from jaxserve.kernels.add_rms_norm_xla import add_rms_norm_xla
from jaxserve.kernels.hopper import takes_kernel

Implementation = Literal["mosaic_gpu", "xla"]


def add_rms_norm(
    x: Float[Array, "rows size"],
    update: Float[Array, "*parts rows size"],
    weight: Float[Array, " size"],
    eps: float,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"]]:
    """Computes t = x + update, rounded to x's dtype, and t / sqrt(mean(t²) + eps) * weight (arXiv:1910.07467).

    Args:
        x: the residual stream.
        update: what is added to it, in x's dtype; or float32 [parts, rows, size], whose sum over the parts is added.
        weight: the norm's factors, in any float dtype. The norm is computed in float32 and rounded once, of the sum
            before or after its rounding.
        implementation: None takes the Hopper kernel where it can run and else the plain XLA program; on a GPU the
            latter is logged once as a warning. A name asks for that one.

    Returns:
        The sum and its norm, both in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        NotImplementedError: implementation="mosaic_gpu" for a case that the kernel does not cover.
    """
    check_arguments(x, update, weight)
    if takes_kernel("add_rms_norm", implementation, lambda: unsupported_reason(x)):
        return add_rms_norm_mosaic_gpu(x, update, weight, eps=eps)
    return add_rms_norm_xla(x, update, weight, eps)


def check_arguments(x: Array, update: Array, weight: Array) -> None:
    """Raises:
    ValueError: shapes or dtypes that `add_rms_norm` does not take together.
    """
    dtype = jnp.float32 if update.ndim == 3 else x.dtype
    if x.ndim != 2 or update.shape[-2:] != x.shape or update.ndim > 3 or update.dtype != dtype:
        raise ValueError(
            f"x {x.dtype}{x.shape} and update {update.dtype}{update.shape} must be alike, [rows, size], or update float32 "
            "[parts, rows, size]"
        )
    if weight.shape != x.shape[1:]:
        raise ValueError(f"{weight.shape=} must be [size={x.shape[1]}]")
