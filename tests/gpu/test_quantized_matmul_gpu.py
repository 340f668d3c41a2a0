"""quantized_matmul on a card, at the sizes of a large model."""

import dataclasses

import jax.numpy as jnp
import pytest

from tests.kernels.quantized_matmul_cases import CASES, Case, check

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
FORMATS = {
    "float8, both": {"values": "float8", "quantize_activations": True},
    "float8 weights": {"values": "float8"},
    "int8": {"values": "int8"},
    "int4, groups of 128": {"values": "int4", "groups": 128},
    "int4, groups of 32": {"values": "int4", "groups": 32},
}


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
    check(dataclasses.replace(SHAPES[shape], rows=rows, **options), TOLERANCE)
