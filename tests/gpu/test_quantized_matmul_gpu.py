"""quantized_matmul on a card, at the sizes of a large model."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.int4 import pack_int4
from jaxserve.kernels.quantized_matmul import quantized_matmul, quantized_matmul_swiglu
from jaxserve.kernels.quantized_matmul_mosaic_gpu import quantized_matmul_mosaic_gpu
from jaxserve.kernels.quantized_matmul_plan import SPLITS, TuningConfig
from tests.kernels.quantized_matmul_cases import (
    CASES,
    FORMATS,
    TUNED,
    Case,
    check,
    make_arguments,
    opcodes_that_read,
    tuned_case,
)

# Tensor cores sum float8 products with fewer bits, and float32 ones after rounding them to 19 bits.
TOLERANCE = 2.0**-6

SHAPES = {
    "qkv": Case(k=4096, columns=6144),
    "attention output, with residual": Case(k=4096, columns=4096, has_residual=True),
    "gate and up": Case(k=4096, columns=14336, is_swiglu=True),
    "down": Case(k=14336, columns=4096, has_residual=True),
    "down of four devices": Case(k=7168, columns=8192, out_dtype=jnp.float32),
    "small": Case(k=576, columns=960),
}


def xla_tolerance(case: Case) -> float:
    """Of XLA's products, which for float8 are cuBLASLt's with fast accumulation.

    These add 32 products at a time to a sum of 14 bits (DeepSeek-AI, arXiv:2412.19437, section 3.3.2, "Increasing
    Accumulation Precision"), and what is cut off, half of the last bit on average, always makes the sum smaller.
    """
    if not case.quantize_activations:
        return TOLERANCE
    return 2.0**-7 + case.k / 32 * 2.0**-14


@pytest.mark.parametrize("name", CASES)
def test_every_case(name: str) -> None:
    check(CASES[name], TOLERANCE)


@pytest.mark.parametrize("rows", [1, 8, 13, 64, 512])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_sizes_of_a_large_model(form: str, shape: str, rows: int) -> None:
    options = dict(FORMATS[form])
    if "groups" in options:
        size = options["groups"] if SHAPES[shape].k % options["groups"] == 0 else 96
        options["groups"] = SHAPES[shape].k // size
    case = dataclasses.replace(SHAPES[shape], rows=rows, **options)
    check(case, xla_tolerance(case))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", [1, 8, 13, 64])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "small"])
@pytest.mark.parametrize("form", FORMATS)
def test_hopper_kernel_at_sizes_of_a_large_model(form: str, shape: str, rows: int) -> None:
    options = dict(FORMATS[form])
    if "groups" in options:
        options["groups"] = SHAPES[shape].k // options["groups"]  # so many inputs each
    check(dataclasses.replace(SHAPES[shape], rows=rows, **options), TOLERANCE, implementation="mosaic_gpu")


def tuned(case: Case, config: TuningConfig) -> Callable[..., jax.Array]:
    """The kernel, with the arguments of the public function that the case is for."""

    def run(x: jax.Array, values: jax.Array, scales: jax.Array, **options: Any) -> jax.Array:
        if not case.is_swiglu:
            values, scales = values[None], scales[:, None] if case.values == "int4" else scales[None]
        return quantized_matmul_mosaic_gpu(
            x,
            values,
            scales,
            options.get("residual"),
            quantize_activations=case.quantize_activations,
            is_swiglu=case.is_swiglu,
            out_dtype=x.dtype,
            config=config,
        )

    return run


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("form", "config", "rows", "is_swiglu"),
    TUNED,
    ids=lambda value: "x".join(map(str, dataclasses.astuple(value))) if isinstance(value, TuningConfig) else None,
)
def test_hopper_kernel_under_every_tuning(form: str, config: TuningConfig, rows: int, is_swiglu: bool) -> None:
    case = tuned_case(form, rows, is_swiglu)
    first = check(case, TOLERANCE, function=tuned(case, config))
    np.testing.assert_array_equal(check(case, TOLERANCE, function=tuned(case, config)), first)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", [9, 64])
@pytest.mark.parametrize("split", [split for split in SPLITS if split & (split - 1)])
@pytest.mark.parametrize("form", FORMATS)
def test_hopper_kernel_cuts_k_into_any_number_of_parts(form: str, split: int, rows: int) -> None:
    options, k = dict(FORMATS[form]), 512 * split
    if "groups" in options:
        options["groups"] = k // options["groups"]
    case = Case(rows=rows, k=k, columns=512, has_residual=True, **options)
    check(case, TOLERANCE, function=tuned(case, TuningConfig(split, 2, units=4)))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", [3, 64])
@pytest.mark.parametrize("k", [1280, 640, 128])
@pytest.mark.parametrize("form", FORMATS)
def test_hopper_kernel_at_sizes_that_few_cuts_go_into(form: str, k: int, rows: int) -> None:
    """An odd number of tiles: then those of halves of the rows are left."""
    options = dict(FORMATS[form])
    if "groups" in options:
        k *= 2
        options["groups"] = k // options["groups"]
    for case in (
        Case(rows=rows, k=k, columns=320, **options),
        Case(rows=rows, k=k, columns=64, is_swiglu=True, **options),
    ):
        check(case, TOLERANCE, implementation="mosaic_gpu")


@pytest.mark.usefixtures("hopper")
def test_hopper_kernel_refuses_a_tuning_that_does_not_fit() -> None:
    case = Case("int8", rows=60, k=2048, columns=256)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        check(case, TOLERANCE, function=tuned(case, TuningConfig(1, 16)))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("config", [TuningConfig(2, 2, units=4), TuningConfig(2, 4, turns=4)])
def test_hopper_kernel_widens_every_integer(config: TuningConfig) -> None:
    """Exactly: each row of x takes one column of the weights, in which every integer stands."""
    k, columns, rows = 2048, 256, 64
    x = jax.nn.one_hot(jnp.arange(rows) * 33, k, dtype=jnp.bfloat16)
    numbers = jnp.bitwise_and(jnp.arange(columns)[:, None] + jnp.arange(k)[None], 255).astype(jnp.uint8).view(jnp.int8)
    for values, scales in (
        (numbers, jnp.full((1, columns), 0.5, jnp.float32)),
        (pack_int4(numbers >> 4, k // 64), jnp.full((64, 1, columns), 0.5, jnp.bfloat16)),
    ):
        out = quantized_matmul_mosaic_gpu(
            x,
            values[None],
            scales,
            quantize_activations=False,
            is_swiglu=False,
            out_dtype=jnp.dtype(jnp.float32),
            config=config,
        )
        wide = (numbers >> 4 if values.dtype == jnp.uint8 else numbers).astype(jnp.float32)
        np.testing.assert_array_equal(out, x.astype(jnp.float32) @ wide.T * 0.5)


@pytest.mark.usefixtures("hopper")
def test_int4_weights_go_to_the_hopper_kernel_as_they_lie() -> None:
    """XLA could unpack 4-bit numbers into bytes on the way, which would read and write more than the product reads."""
    for case in (Case("int4", k=1024, groups=8, columns=256), Case("int4", k=1024, groups=8, is_swiglu=True)):
        product = quantized_matmul_swiglu if case.is_swiglu else quantized_matmul
        function = jax.jit(functools.partial(product, implementation="mosaic_gpu"))
        text = function.lower(**make_arguments(case)).compile().as_text() or ""
        assert opcodes_that_read(text, "u8") == ["custom-call"]
