"""Products of a decode step's few rows with large weight matrices: validation and the choice of implementation."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels.decode_matmul_mosaic_gpu import MAX_ROWS, decode_matmul_mosaic_gpu, unsupported_reason
from jaxserve.kernels.decode_matmul_xla import decode_matmul_swiglu_xla, decode_matmul_xla
from jaxserve.kernels.hopper import takes_kernel

Implementation = Literal["mosaic_gpu", "xla"]

_DTYPES = ("float32", "bfloat16", "float16")


def decode_matmul(
    x: Float[Array, "rows k"],
    w: Float[Array, "k n"],
    *,
    residual: Float[Array, "rows n"] | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    prefetch_weights: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "rows n"]:
    """Computes x @ w (+ residual), summed in float32 and rounded once.

    The Hopper kernel is for up to 128 rows, where reading w decides the time; more rows are XLA's. Up to 8 rows, and
    multiples of 8, cost no padding. Its results are the same to the bit from run to run.

    Args:
        x: the rows, in w's dtype.
        w: the weights, [in, out], row-major as stored.
        residual: added in float32 before the result is rounded; in out_dtype.
        out_dtype: dtype of the result; x's when not given. The Hopper kernel knows bfloat16 and float32.
        prefetch_weights: promises that w is a parameter of the program, complete before the kernel that runs before this
            one began. The Hopper kernel then reads the first of it while that one still runs. A broken promise gives
            wrong results now and then.
        implementation: "mosaic_gpu" is the Hopper kernel, "xla" runs anywhere; None takes the Hopper kernel where the
            device and the shapes allow it. A GPU that has to do without for up to 128 rows logs the reason once, at
            WARNING.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together.
        NotImplementedError: implementation="mosaic_gpu" for a case that the kernel does not cover.
    """
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if w.ndim != 2:
        raise ValueError(f"{w.shape=} must be [k, n]")
    _validate(x, w, out_dtype)
    if residual is not None:
        expected = (x.shape[0], w.shape[1])
        if residual.shape != expected or residual.dtype != out_dtype:
            raise ValueError(f"residual is {residual.dtype}{residual.shape}, must be {out_dtype}{expected}")
    parts = w[:, None, :]
    if _takes_kernel(x, parts, out_dtype, implementation):
        return decode_matmul_mosaic_gpu(
            x, parts, residual, is_swiglu=False, out_dtype=out_dtype, prefetch_weights=prefetch_weights
        )
    return decode_matmul_xla(x, w, residual, out_dtype)


def decode_matmul_swiglu(
    x: Float[Array, "rows k"],
    w_gate_up: Float[Array, "k 2 ffn"],
    *,
    prefetch_weights: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "rows ffn"]:
    """Computes silu(x @ gate) * (x @ up) (Shazeer, arXiv:2002.05202) in float32, rounded once to x's dtype.

    Args:
        x: the rows, in w_gate_up's dtype.
        w_gate_up: the weights, [in, gate and up, out], row-major as stored.
        prefetch_weights, implementation: as in `decode_matmul`.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together.
        NotImplementedError: implementation="mosaic_gpu" for a case that the kernel does not cover.
    """
    if w_gate_up.ndim != 3 or w_gate_up.shape[1] != 2:
        raise ValueError(f"{w_gate_up.shape=} must be [k, 2, ffn]")
    _validate(x, w_gate_up, x.dtype)
    if _takes_kernel(x, w_gate_up, x.dtype, implementation):
        return decode_matmul_mosaic_gpu(
            x, w_gate_up, is_swiglu=True, out_dtype=x.dtype, prefetch_weights=prefetch_weights
        )
    return decode_matmul_swiglu_xla(x, w_gate_up)


def _takes_kernel(x: Array, w: Array, out_dtype: jnp.dtype, implementation: Implementation | None) -> bool:
    return takes_kernel(
        "decode_matmul",
        implementation,
        lambda: unsupported_reason(x, w, out_dtype),
        is_expected=x.shape[0] <= MAX_ROWS,
    )


def _validate(x: Array, w: Array, out_dtype: jnp.dtype) -> None:
    if x.ndim != 2:
        raise ValueError(f"{x.shape=} must be [rows, k]")
    if x.shape[1] != w.shape[0]:
        raise ValueError(f"{x.shape=} and {w.shape=} must agree in k")
    if x.dtype != w.dtype or x.dtype.name not in _DTYPES:
        raise ValueError(f"{x.dtype=} and {w.dtype=} must be the same, one of {_DTYPES}")
    if out_dtype.name not in _DTYPES:
        raise ValueError(f"{out_dtype=} must be one of {_DTYPES}")
