"""Products of a few rows with large quantized weight matrices: validation and the choice of implementation."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels.hopper import check_implementation, takes_kernel
from jaxserve.kernels.quantized_matmul_mosaic_gpu import quantized_matmul_mosaic_gpu
from jaxserve.kernels.quantized_matmul_plan import MAX_ROWS, Form, form_of, unsupported_reason
from jaxserve.kernels.quantized_matmul_xla import quantized_matmul_swiglu_xla, quantized_matmul_xla

Implementation = Literal["mosaic_gpu", "xla"]

_DTYPES = ("float32", "bfloat16", "float16")
_SCALE_DTYPES = {"float8_e4m3fn": "float32", "int8": "float32", "uint8": "bfloat16"}

_WIDE = 4  # times as many outputs as inputs


def quantized_matmul(
    x: Float[Array, "rows k"],
    values: Array,
    scales: Array,
    *,
    quantize_activations: bool = False,
    power_of_two_factors: bool = False,
    input_scale: Float[Array, ""] | None = None,
    residual: Float[Array, "rows n"] | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "rows n"]:
    """Computes x @ w.T (+ residual), where w [n, k] is values * scales, summed in float32 and rounded once.

    Args:
        x: the rows: float32, bfloat16 or float16.
        values: float8_e4m3fn or int8 [n, k]; or uint8 [n, k / 2] with two 4-bit numbers in each byte, as
            `jaxserve.kernels.int4` packs them.
        scales: float32 [n]; of 4-bit numbers bfloat16 [groups, n], each for k / groups consecutive inputs.
        quantize_activations: round x to float8 too, each row with a factor of its own (float8 weights only).
        power_of_two_factors: with quantize_activations, round rows as they would be rounded if x were any part of longer
            rows, such as that of one device.
        input_scale: float32; with quantize_activations, this factor for every row.
        residual: added in float32 before the result is rounded; in out_dtype.
        out_dtype: dtype of the result; x's when not given.
        implementation: "xla" runs anywhere, "mosaic_gpu" is the Hopper kernel, for up to 64 rows of bfloat16. None takes
            the kernel on a Hopper GPU where it is the faster (see `kernel_is_faster`) and covers the case.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together.
        NotImplementedError: implementation="mosaic_gpu" for a case that the Hopper kernel does not cover.
    """
    if values.ndim != 2:
        raise ValueError(f"{values.shape=} must be [n, k] (4-bit numbers: [n, k / 2])")
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    _validate(x, values, scales, quantize_activations, input_scale, out_dtype, implementation)
    if residual is not None:
        expected = (x.shape[0], values.shape[0])
        if residual.shape != expected or residual.dtype != out_dtype:
            raise ValueError(f"residual is {residual.dtype}{residual.shape}, must be {out_dtype}{expected}")
    if _takes_kernel(x, values, scales, quantize_activations, out_dtype, implementation):
        return quantized_matmul_mosaic_gpu(
            x,
            values[None],
            scales[:, None] if values.dtype == jnp.uint8 else scales[None],
            residual,
            input_scale,
            quantize_activations=quantize_activations,
            power_of_two_factors=power_of_two_factors,
            is_swiglu=False,
            out_dtype=out_dtype,
        )
    return quantized_matmul_xla(
        x,
        values,
        scales,
        quantize_activations=quantize_activations,
        power_of_two_factors=power_of_two_factors,
        input_scale=input_scale,
        residual=residual,
        out_dtype=out_dtype,
    )


def quantized_matmul_swiglu(
    x: Float[Array, "rows k"],
    values: Array,
    scales: Array,
    *,
    quantize_activations: bool = False,
    input_scale: Float[Array, ""] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "rows ffn"]:
    """Computes silu(x @ gate.T) * (x @ up.T) (Shazeer, arXiv:2002.05202) in float32, rounded once to x's dtype.

    Args:
        x: the rows: float32, bfloat16 or float16.
        values: [2, ffn, k], gate and up; of the dtypes that `quantized_matmul` takes, 4-bit numbers [2, ffn, k / 2].
        scales: [2, ffn]; of 4-bit numbers [groups, 2, ffn].
        quantize_activations, input_scale, implementation: as in `quantized_matmul`.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together.
        NotImplementedError: implementation="mosaic_gpu" for a case that the Hopper kernel does not cover.
    """
    if values.ndim != 3 or values.shape[0] != 2:
        raise ValueError(f"{values.shape=} must be [2, ffn, k] (4-bit numbers: [2, ffn, k / 2])")
    _validate(x, values, scales, quantize_activations, input_scale, x.dtype, implementation)
    if _takes_kernel(x, values, scales, quantize_activations, x.dtype, implementation):
        return quantized_matmul_mosaic_gpu(
            x,
            values,
            scales,
            input_scale=input_scale,
            quantize_activations=quantize_activations,
            is_swiglu=True,
            out_dtype=x.dtype,
        )
    return quantized_matmul_swiglu_xla(
        x, values, scales, quantize_activations=quantize_activations, input_scale=input_scale
    )


def kernel_is_faster(form: Form, rows: int, k: int, outputs: int) -> bool:
    """Whether the Hopper kernel beats XLA, by what docs/performance.md has measured ("Products with quantized weights").

    4-bit weights XLA unpacks in a kernel of their own; 8-bit ones it widens in the product, which costs more the more rows
    meet them. Float8 on both sides is cuBLASLt's own trade.

    Args:
        outputs: gate's and up's together.
    """
    if rows > MAX_ROWS or form == "float8":
        return False
    if form == "float8-wide":
        return outputs >= _WIDE * k
    return True


def _takes_kernel(
    x: Array,
    values: Array,
    scales: Array,
    quantize_activations: bool,
    out_dtype: jnp.dtype,
    implementation: Implementation | None,
) -> bool:
    if implementation is None:
        rows, k = x.shape
        form, outputs = form_of(values, quantize_activations), math.prod(values.shape[:-1])
        implementation = None if kernel_is_faster(form, rows, k, outputs) else "xla"
    return takes_kernel(
        "quantized_matmul",
        implementation,
        lambda: unsupported_reason(x, values, scales, quantize_activations, out_dtype),
    )


def _validate(
    x: Array,
    values: Array,
    scales: Array,
    quantize_activations: bool,
    input_scale: Array | None,
    out_dtype: jnp.dtype,
    implementation: str | None,
) -> None:
    if x.ndim != 2 or x.dtype.name not in _DTYPES:
        raise ValueError(f"x is {x.dtype}{x.shape}, must be [rows, k], one of {_DTYPES}")
    if values.dtype.name not in _SCALE_DTYPES:
        raise ValueError(f"{values.dtype=} must be one of {tuple(_SCALE_DTYPES)}")
    if out_dtype.name not in _DTYPES:
        raise ValueError(f"{out_dtype=} must be one of {_DTYPES}")
    _validate_scales(x.shape[1], values, scales)
    if quantize_activations and values.dtype != jnp.float8_e4m3fn:
        raise ValueError(f"quantize_activations goes with float8_e4m3fn weights, not {values.dtype}")
    if input_scale is not None:
        if not quantize_activations:
            raise ValueError("input_scale goes with quantize_activations")
        if input_scale.shape != () or input_scale.dtype != jnp.float32:
            raise ValueError(f"input_scale is {input_scale.dtype}{input_scale.shape}, must be one float32")
    check_implementation(implementation)


def _validate_scales(k: int, values: Array, scales: Array) -> None:
    *outputs, stored = values.shape
    packed = values.dtype == jnp.uint8
    if stored * (2 if packed else 1) != k:
        raise ValueError(f"x has {k} columns, which {values.dtype}{values.shape} values do not fit")
    if scales.dtype.name != _SCALE_DTYPES[values.dtype.name]:
        raise ValueError(
            f"scales of {values.dtype} values must be {_SCALE_DTYPES[values.dtype.name]}, not {scales.dtype}"
        )
    if not packed and list(scales.shape) != outputs:
        raise ValueError(f"{scales.shape=} must be the outputs {tuple(outputs)} of {values.shape=}")
    if packed and (list(scales.shape[1:]) != outputs or scales.shape[0] < 1 or k % scales.shape[0]):
        raise ValueError(f"{scales.shape=} must be (groups, {', '.join(map(str, outputs))}), groups dividing {k=}")
