"""Which products with quantized weights take the Hopper kernel, as the model makes them."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.quantized_matmul import kernel_is_faster
from jaxserve.kernels.quantized_matmul_mosaic_gpu import quantized_matmul_mosaic_gpu
from jaxserve.models.linear import column_parallel, swiglu
from jaxserve.models.quantization import dequantize, quantize
from jaxserve.quantization_config import QuantizationConfig
from tests.kernels.quantized_matmul_cases import Case, check

needs_interpreter = pytest.mark.skipif(
    not (0, 11) <= jax.__version_info__ < (0, 12),
    reason=f"jax {jax.__version__} can't lower or interpret this kernel; 0.11 can",
)


@pytest.mark.parametrize(
    ("form", "rows", "k", "outputs", "faster"),
    [
        # As measured: qkv, gate and up, and down of a large model.
        ("int4", 1, 4096, 6144, True),
        ("int4", 64, 14336, 4096, True),
        ("int4", 65, 4096, 28672, False),
        ("int8", 64, 4096, 6144, True),
        ("int8", 64, 4096, 28672, True),
        ("int8", 1, 14336, 4096, True),
        ("int8", 64, 14336, 4096, True),
        ("int8", 512, 4096, 6144, False),
        ("float8-wide", 1, 4096, 28672, True),
        ("float8-wide", 64, 4096, 28672, True),
        ("float8-wide", 1, 4096, 6144, False),
        ("float8", 1, 4096, 28672, False),
    ],
)
def test_the_kernel_is_taken_where_it_was_measured_to_be_faster(
    form: Any, rows: int, k: int, outputs: int, faster: bool
) -> None:
    assert kernel_is_faster(form, rows, k, outputs) is faster


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Lets products take the kernel as on a Hopper GPU, interpreted; rows and whether it is gated of each that does."""
    calls: list[tuple[int, bool]] = []

    def run(x: jax.Array, *arrays: Any, **options: Any) -> jax.Array:
        calls.append((x.shape[0], options["is_swiglu"]))
        interpret = plgpu.InterpretGPUParams()  # pyright: ignore[reportAttributeAccessIssue] (jax 0.10)
        return quantized_matmul_mosaic_gpu(x, *arrays, **options, interpret=interpret)

    monkeypatch.setattr("jaxserve.kernels.hopper.missing_device", lambda: None)
    monkeypatch.setattr("jaxserve.kernels.quantized_matmul.quantized_matmul_mosaic_gpu", run)
    return calls


@needs_interpreter
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_a_hopper_gpu_takes_the_kernel_unless_xla_is_asked_for(
    kernel_calls: list[tuple[int, bool]], implementation: Any
) -> None:
    check(Case("int8", rows=3, k=256, columns=64, has_residual=True), implementation=implementation)
    assert kernel_calls == ([(3, False)] if implementation is None else [])


@needs_interpreter
@pytest.mark.parametrize(
    "case",
    [Case("int8", rows=65), Case(), Case("int8", dtype=jnp.float32), Case("int4", columns=96)],
    ids=["many rows", "float8 weights, fewer outputs", "float32", "part of a tile"],
)
def test_a_hopper_gpu_leaves_to_xla_what_is_slower_or_not_covered(
    kernel_calls: list[tuple[int, bool]], case: Case
) -> None:
    check(case)
    assert not kernel_calls


@needs_interpreter
@pytest.mark.parametrize("weight_format", [pytest.param("int8", marks=pytest.mark.long), "int4"])
def test_a_layer_of_quantized_weights_goes_through_the_kernel(
    kernel_calls: list[tuple[int, bool]], weight_format: Any
) -> None:
    """As the model makes its products, of weights that its own code quantized: one gated, one of heads' inputs."""
    config = QuantizationConfig(format=weight_format)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (3, 256), jnp.bfloat16)
    w_gate_up = quantize(jax.random.normal(keys[1], (256, 2, 64), jnp.bfloat16) / jnp.bfloat16(16), 1, config)
    wo = quantize(jax.random.normal(keys[2], (4, 64, 64), jnp.bfloat16) / jnp.bfloat16(16), 2, config)
    layer = jax.jit(lambda x, *weights: (swiglu(x, weights[0], None), column_parallel(x, weights[1], None)))
    gated, projected = layer(x, w_gate_up, wo)
    assert kernel_calls == [(3, True), (3, False)]

    rows = x.astype(jnp.float32)
    gate, up = (rows @ dequantize(w_gate_up)[:, part] for part in (0, 1))
    np.testing.assert_allclose(gated.astype(jnp.float32), jax.nn.silu(gate) * up, rtol=2**-6, atol=2**-6)
    expected = rows @ dequantize(wo).reshape(256, 64)
    np.testing.assert_allclose(projected.astype(jnp.float32), expected, rtol=2**-6, atol=2**-6)
