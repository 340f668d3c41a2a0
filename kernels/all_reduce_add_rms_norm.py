"""The sum over devices, the residual add and the norm after it: validation and the choice of implementation."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels.add_rms_norm import add_rms_norm, check_arguments
from jaxserve.kernels.all_reduce_add_rms_norm_mosaic_gpu import (
    all_reduce_add_rms_norm_mosaic_gpu,
    unsupported_reason,
)
from jaxserve.kernels.all_reduce_add_rms_norm_xla import all_reduce, all_reduce_add_rms_norm_xla
from jaxserve.kernels.hopper import takes_kernel
from jaxserve.kernels.peer_memory import PeerMemory
from jaxserve.kernels.quantize_rows import Float8Product, Float8Rows, quantize_rows

Implementation = Literal["mosaic_gpu", "xla"]


def all_reduce_add_rms_norm(
    x: Float[Array, "rows size"],
    update: Float[Array, "*parts rows size"] | Float8Product,
    weight: Float[Array, " size"],
    eps: float,
    *,
    axis: str,
    peers: PeerMemory | None,
    rounds: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"] | Float8Rows]:
    """Computes t = x + the sum of update over devices, and t / sqrt(mean(t²) + eps) * weight (arXiv:1910.07467).

    Runs inside `jax.shard_map`, on every device of the axis alike. All devices get the same bits.

    Args:
        x: the residual stream, the same on all devices.
        update: this device's part of what is added to it, in x's dtype; or float32 [parts, rows, size], whose sum over
            the parts it is; or a product of float8 numbers that is still to be scaled.
        weight: the norm's factors, in any float dtype.
        axis: of the mesh, over which `update` is summed.
        peers: this device's part of `make_peer_memory`'s result, over the same axis, for the Hopper kernel.
        rounds: give the norm in float8, as `quantize_rows` does.
        implementation: None takes the Hopper kernel where `peers` is given and it can run, and else XLA's all-reduce and
            `add_rms_norm`. A name asks for that one; "xla" is plain XLA throughout.

    Returns:
        The sum t, which the kernel rounds once and XLA once more for each device, and its norm, both in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        NotImplementedError: implementation="mosaic_gpu" for a case that the kernel does not cover.
    """
    is_unscaled = isinstance(update, Float8Product)
    sent = x.dtype if is_unscaled else update.dtype
    if is_unscaled:
        _check_unscaled(x, update, weight)
    else:
        check_arguments(x, update, weight)

    def reason() -> str | None:
        return "peers=None" if peers is None else unsupported_reason(x, sent, peers.layout)

    # Without peers, or with more rows than they are for, XLA's all-reduce is what was chosen, not a fall-back.
    is_expected = peers is not None and x.shape[0] <= peers.layout.max_rows
    if takes_kernel("all_reduce_add_rms_norm", implementation, reason, is_expected=is_expected) and peers is not None:
        arrays = [array[None] for array in update] if is_unscaled else [update[None]]
        results = all_reduce_add_rms_norm_mosaic_gpu(
            x[None], arrays[0], weight, peers.table, *arrays[1:], eps=eps, layout=peers.layout, rounds=rounds
        )
        total, normed, *factors = [result[0] for result in results]
        return total, Float8Rows(normed, factors[0], x.shape[0], x.dtype) if rounds else normed
    if is_unscaled:
        update = update.scaled(x.shape[0], x.dtype)
    if implementation == "xla":
        total, normed = all_reduce_add_rms_norm_xla(x, update, weight, eps, axis)
    else:
        total, normed = add_rms_norm(x, all_reduce(x.dtype, update, axis), weight, eps)
    return total, quantize_rows(normed, implementation=implementation) if rounds else normed


def _check_unscaled(x: Array, update: Float8Product, weight: Array) -> None:
    rows, size = x.shape
    padded = update.numbers.shape[0]
    if update.numbers.shape[1:] != (size,) or padded < rows or update.numbers.dtype != jnp.float32:
        raise ValueError(f"update.numbers are {update.numbers.dtype}{update.numbers.shape}, x is {x.shape}")
    if update.factors.shape != (padded,) or update.scales.shape != (size,) or weight.shape != (size,):
        raise ValueError(
            f"{update.factors.shape=} must be ({padded},), {update.scales.shape=} and {weight.shape=} must be ({size},)"
        )
