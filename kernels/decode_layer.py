"""Everything of a decode layer between attention and the next attention: validation, choice of implementation."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.kernels.decode_layer_mosaic_gpu import decode_layer_mosaic_gpu, unsupported_reason
from jaxserve.kernels.decode_layer_plan import MAX_ROWS
from jaxserve.kernels.decode_layer_xla import decode_layer_xla
from jaxserve.kernels.grid_barrier import COUNTERS
from jaxserve.kernels.hopper import takes_kernel

Implementation = Literal["mosaic_gpu", "xla"]

_DTYPES = ("float32", "bfloat16", "float16")


class DecodeLayerResult(NamedTuple):
    """What `decode_layer` gives: the residual stream, the next layer's queries, keys and values, the counters."""

    x: Float[Array, "rows hidden"]
    qkv: Float[Array, "rows qkv"] | None
    counters: Int32[Array, " counters"] | None


def decode_layer(
    attended: Float[Array, "rows attended"],
    residual: Float[Array, "rows hidden"],
    wo: Float[Array, "attended hidden"],
    mlp_norm: Float[Array, " hidden"],
    w_gate_up: Float[Array, "hidden 2 ffn"],
    w_down: Float[Array, "ffn hidden"],
    next_norm: Float[Array, " hidden"] | None = None,
    next_wqkv: Float[Array, "hidden qkv"] | None = None,
    *,
    eps: float,
    counters: Int32[Array, " counters"] | None = None,
    implementation: Implementation | None = None,
) -> DecodeLayerResult:
    """Computes, summed in float32 and rounded where each line ends:

        x = residual + attended @ wo
        activated = silu(norm(x) * mlp_norm @ gate) * (norm(x) * mlp_norm @ up)
        x = x + activated @ w_down
        qkv = norm(x) * next_norm @ next_wqkv

    with norm(x) = x / sqrt(mean(x**2) + eps) (Zhang and Sennrich, arXiv:1910.07467; Shazeer, arXiv:2002.05202).

    The Hopper kernel is for up to 64 rows, where reading the weights decides the time, and takes the whole device: one
    thread block a multiprocessor, which wait for each other. Its results are the same to the bit from run to run. The
    weights must be parameters of the program: it reads them while the kernel before it may still run.

    Args:
        attended: attention's result, in the dtype of the weights.
        residual: what this layer's attention got, before its norm.
        wo, mlp_norm, w_gate_up, w_down: this layer's weights, [in, out], row-major as stored.
        next_norm, next_wqkv: the next layer's; None after the last layer.
        counters: int32 zeros of `COUNTERS` elements, at first; then what the call before gave. They save the kernel a
            fill of its own each call. None has it make its own.
        implementation: "mosaic_gpu" is the Hopper kernel, "xla" runs anywhere; None takes the Hopper kernel where the
            device and the shapes allow it. A GPU that has to do without for up to 64 rows logs the reason once, at
            WARNING.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together.
        NotImplementedError: implementation="mosaic_gpu" for a case that the kernel does not cover.
    """
    arrays = attended, residual, wo, mlp_norm, w_gate_up, w_down, next_norm, next_wqkv
    _validate(*arrays)
    if counters is not None and (counters.shape != (COUNTERS,) or counters.dtype != jnp.int32):
        raise ValueError(f"counters are {counters.dtype}{counters.shape}, must be int32({COUNTERS},)")
    takes_hopper = takes_kernel(
        "decode_layer",
        implementation,
        lambda: unsupported_reason(attended, wo, w_gate_up, next_wqkv),
        is_expected=attended.shape[0] <= MAX_ROWS,
    )
    if takes_hopper:
        return DecodeLayerResult(*decode_layer_mosaic_gpu(*arrays, counters, eps=eps))
    return DecodeLayerResult(*decode_layer_xla(*arrays, eps=eps), counters)


def _validate(
    attended: Array,
    residual: Array,
    wo: Array,
    mlp_norm: Array,
    w_gate_up: Array,
    w_down: Array,
    next_norm: Array | None,
    next_wqkv: Array | None,
) -> None:
    if attended.ndim != 2 or residual.ndim != 2 or w_gate_up.ndim != 3:
        raise ValueError(
            f"{attended.shape=} must be [rows, attended], {residual.shape=} [rows, hidden], "
            f"{w_gate_up.shape=} [hidden, 2, ffn]"
        )
    if (next_norm is None) != (next_wqkv is None):
        raise ValueError("next_norm and next_wqkv must both be given, or neither")
    rows, hidden, ffn = attended.shape[0], residual.shape[1], w_gate_up.shape[2]
    expected: dict[str, tuple[Array | None, tuple[int, ...]]] = {
        "residual": (residual, (rows, hidden)),
        "wo": (wo, (attended.shape[1], hidden)),
        "mlp_norm": (mlp_norm, (hidden,)),
        "w_gate_up": (w_gate_up, (hidden, 2, ffn)),
        "w_down": (w_down, (ffn, hidden)),
        "next_norm": (next_norm, (hidden,)),
        "next_wqkv": (next_wqkv, (hidden, *(() if next_wqkv is None else next_wqkv.shape[-1:]))),
    }
    if attended.dtype.name not in _DTYPES:
        raise ValueError(f"{attended.dtype=} must be one of {_DTYPES}")
    for name, (array, shape) in expected.items():
        if array is not None and (array.shape != shape or (array.dtype != attended.dtype and array.ndim > 1)):
            raise ValueError(f"{name} is {array.dtype}{array.shape}, must be {attended.dtype}{shape}")
