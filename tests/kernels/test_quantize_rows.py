"""Rows rounded to float8, and the products that take and give them, against their definitions."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.quantize_rows import (
    Float8Rows,
    float8_matmul,
    float8_matmul_swiglu,
    quantize_rows,
    swiglu_quantize_rows,
)
from jaxserve.kernels.quantize_rows_mosaic_gpu import (
    quantize_rows_mosaic_gpu,
    swiglu_quantize_rows_mosaic_gpu,
    unsupported_reason,
)
from jaxserve.kernels.quantized_matmul import quantized_matmul, quantized_matmul_swiglu

needs_mosaic = pytest.mark.skipif(
    not (0, 11) <= jax.__version_info__ < (0, 12),
    reason=f"jax {jax.__version__} can't lower or interpret this kernel; 0.11 can",
)


def make_rows(rows: int, size: int) -> jax.Array:
    """Rows of very different sizes, the second one of zeros."""
    sizes = np.array([1.0, 0.0, 300.0, 1e-6])[:rows, None]
    return jnp.asarray((np.random.default_rng(0).standard_normal((rows, size)) * sizes).astype(jnp.bfloat16))


def make_weight(*outputs: int, k: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((*outputs, k)).astype(jnp.float8_e4m3fn)
    return jnp.asarray(values), jnp.asarray(rng.uniform(0.01, 0.1, outputs).astype(np.float32))


@pytest.mark.parametrize("power_of_two_factors", [False, True])
def test_a_row_fills_float8(power_of_two_factors: bool) -> None:
    x = make_rows(4, 96)
    rounded = quantize_rows(x, power_of_two_factors=power_of_two_factors)
    largest = np.abs(np.asarray(rounded.values[:4], np.float32)).max(axis=1)
    if power_of_two_factors:
        assert ((largest == 0) | ((largest >= 224) & (largest <= 448))).all()
        assert (np.log2(rounded.factors[:4]) % 1 == 0).all()
    else:
        np.testing.assert_array_equal(largest, [448, 0, 448, 448])
    wide = np.asarray(rounded.values[:4], np.float32) * np.asarray(rounded.factors[:4])[:, None]
    smallest = 2.0**-10 * np.asarray(rounded.factors[:4])[:, None]
    assert (np.abs(wide - np.asarray(x, np.float32)) <= 2.0**-4 * np.abs(np.asarray(x, np.float32)) + smallest).all()


@needs_mosaic
@pytest.mark.parametrize("power_of_two_factors", [False, True])
@pytest.mark.parametrize("size", [512, 1024])
def test_hopper_kernel_rounds_as_plain_xla_does(size: int, power_of_two_factors: bool) -> None:
    x = make_rows(3, size)
    values, factors = quantize_rows_mosaic_gpu(
        x, power_of_two_factors=power_of_two_factors, interpret=plgpu.InterpretGPUParams()
    )
    expected = quantize_rows(x, power_of_two_factors=power_of_two_factors, implementation="xla")
    assert values.shape == (16, size) and factors.shape == (16,)
    np.testing.assert_array_equal(factors[:3], expected.factors[:3])
    np.testing.assert_array_equal(values[:3].astype(jnp.float32), expected.values[:3].astype(jnp.float32))


@needs_mosaic
@pytest.mark.parametrize("power_of_two_factors", [False, True])
def test_hopper_kernel_gates_and_rounds_as_plain_xla_does(power_of_two_factors: bool) -> None:
    ffn, dtype = 1024, jnp.dtype(jnp.bfloat16)
    product = jnp.asarray(np.random.default_rng(3).standard_normal((16, 2 * ffn)).astype(np.float32) * 50)
    x = Float8Rows(jnp.zeros((16, 8), jnp.float8_e4m3fn), jnp.arange(16, dtype=jnp.float32) / 64, 3, dtype)
    scales = make_weight(2, ffn, k=1)[1]
    values, factors = swiglu_quantize_rows_mosaic_gpu(
        product, x.factors, scales, rows=3, dtype=dtype, power_of_two_factors=power_of_two_factors,
        interpret=plgpu.InterpretGPUParams(),
    )  # fmt: skip
    expected = swiglu_quantize_rows(product, x, scales, power_of_two_factors=power_of_two_factors, implementation="xla")
    np.testing.assert_allclose(factors[:3], expected.factors[:3], rtol=2.0**-7)
    wide, wanted = (
        np.asarray(v[:3], np.float32) * np.asarray(f[:3])[:, None]
        for v, f in ((values, factors), (expected.values, expected.factors))
    )
    np.testing.assert_allclose(wide, wanted, rtol=2.0**-3, atol=2.0**-6 * float(expected.factors[:3].max()))


@pytest.mark.parametrize("power_of_two_factors", [False, True])
def test_products_are_those_of_rows_that_are_rounded_on_the_way(power_of_two_factors: bool) -> None:
    x, (values, scales) = make_rows(3, 64), make_weight(40, k=64)
    options = {"power_of_two_factors": power_of_two_factors}

    @jax.jit
    def before(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
        return float8_matmul(quantize_rows(x, **options), values, scales)

    @jax.jit
    def meanwhile(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
        return quantized_matmul(x, values, scales, quantize_activations=True, implementation="xla", **options)

    np.testing.assert_array_equal(before(x, values, scales), meanwhile(x, values, scales))


def test_gated_products_are_those_of_their_parts() -> None:
    x, (values, scales) = make_rows(3, 64), make_weight(2, 48, k=64)
    one = float8_matmul_swiglu(quantize_rows(x), values, scales, power_of_two_factors=True)
    gated = quantized_matmul_swiglu(x, values, scales, quantize_activations=True, implementation="xla")
    other = quantize_rows(gated, power_of_two_factors=True)
    assert one.rows == 3 and one.dtype == x.dtype
    np.testing.assert_array_equal(one.factors[:3], other.factors[:3])
    np.testing.assert_array_equal(one.values[:3].astype(jnp.float32), other.values[:3].astype(jnp.float32))


def test_says_what_does_not_fit() -> None:
    rows, (values, scales) = quantize_rows(make_rows(2, 64)), make_weight(40, k=64)
    with pytest.raises(ValueError, match=r"must be float8_e4m3fn\[n, 64\]"):
        float8_matmul(rows, values[:, :32], scales)
    with pytest.raises(ValueError, match=r"must be float8_e4m3fn\[n, 64\]"):
        float8_matmul(rows, values.astype(jnp.int8), scales)
    with pytest.raises(ValueError, match=r"must be float32\[40\]"):
        float8_matmul(rows, values, scales[:3])
    ask = functools.partial(unsupported_reason, dtype=jnp.dtype(jnp.bfloat16))
    assert ask(64, 8192) is None and ask(64, 7168, is_swiglu=True) is None
    assert "multiple of 512" in (ask(64, 100) or "")
    assert "up to 7168" in (ask(64, 14336, is_swiglu=True) or "")
    assert "more than" in (ask(4096, 8192) or "")
    assert "neither" in (unsupported_reason(1, 512, jnp.dtype(jnp.float32)) or "")
    with pytest.raises(NotImplementedError, match="can't run here"):
        quantize_rows(make_rows(1, 64), implementation="mosaic_gpu")
