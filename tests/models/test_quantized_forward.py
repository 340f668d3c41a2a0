"""The whole forward pass with quantized weights and a float8 cache, on one device and cut over several."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.models.params import QUANTIZABLE, LlamaParams, ParamSpec, param_specs
from jaxserve.models.quantization import dequantize
from jaxserve.models.quantize_params import quantize_params
from jaxserve.sharding.mesh import make_mesh
from jaxserve.sharding.placement import named_shardings
from tests.long_cases import few_of
from tests.models.paged_model import PagedModel

NAMES = ("fp8", "fp8-weight-only", "int8", "int4", "int4-32")
# Sizes that int4 groups of 128 can be cut into eight parts of.
CONFIG = ModelConfig(
    vocab_size=64, hidden_size=128, intermediate_size=1024, num_layers=2, num_heads=16, num_kv_heads=8, head_dim=16,
    max_position_embeddings=64,
)  # fmt: skip
PROMPT = [3, 9, 1, 60, 33, 12, 7]
STEPS = 10
_dequantize = jax.jit(dequantize)


@functools.cache
def dense_params() -> LlamaParams:
    """Drawn by numpy: jax would compile programs for it."""
    rng = np.random.default_rng(0)

    def draw(spec: ParamSpec) -> np.ndarray:
        if spec.standard_deviation is None:
            return np.ones(spec.shape, np.float32)
        return (rng.standard_normal(spec.shape) * spec.standard_deviation).astype(np.float32)

    return jax.tree.map(draw, param_specs(CONFIG))


@functools.cache
def quantized(name: str) -> tuple[ModelConfig, LlamaParams]:
    quantization = QuantizationConfig.named(name)
    config = dataclasses.replace(CONFIG, quantization=quantization)
    return config, quantize_params(dense_params(), CONFIG, quantization)


def dequantized(params: LlamaParams) -> LlamaParams:
    """The dense model that a quantized one stands for."""
    layers = [
        dataclasses.replace(layer, **{name: _dequantize(getattr(layer, name)) for name in QUANTIZABLE})
        for layer in params.layers
    ]
    return dataclasses.replace(params, layers=tuple(layers))


def run(config: ModelConfig, params: LlamaParams, **options: object) -> tuple[list[int], np.ndarray]:
    """Greedy tokens, and the logits of prompt and steps."""
    model = PagedModel(config, params, capacity=len(PROMPT) + STEPS, chunk=len(PROMPT), **options)  # pyright: ignore[reportArgumentType]
    prompt_logits = model.prefill(PROMPT)
    tokens, logits = model.greedy(int(prompt_logits[-1].argmax()), STEPS)
    return tokens, np.concatenate([prompt_logits, logits])


@functools.cache
def on_one_device(name: str) -> tuple[list[int], np.ndarray]:
    return run(*quantized(name))


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square, relative."""
    return float(np.sqrt(np.square(actual - expected).mean() / np.square(expected).mean()))


@pytest.mark.parametrize("name", NAMES)
def test_the_logits_are_those_of_the_weights_that_are_meant(name: str) -> None:
    _, params = quantized(name)
    _, expected = run(CONFIG, dequantized(params))
    _, actual = on_one_device(name)
    count = len(PROMPT)  # what is generated after it may differ where activations are rounded
    assert error(actual[:count], expected[:count]) < (0.08 if name == "fp8" else 1e-5)


@pytest.mark.parametrize(("name", "size"), few_of((("fp8", 8), ("int4-32", 8)), itertools.product(NAMES, (2, 4, 8))))
def test_more_devices_give_the_same_tokens(name: str, size: int) -> None:
    config, params = quantized(name)
    tokens, logits = run(config, params, tensor_parallel_size=size)
    assert tokens == on_one_device(name)[0]
    # Sums run in another order; where activations are rounded, that now and then turns one to its neighbour.
    assert error(logits, on_one_device(name)[1]) < (0.02 if name == "fp8" else 1e-5)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_each_device_holds_its_share(name: str, size: int) -> None:
    config, params = quantized(name)
    placed = jax.device_put(params, named_shardings(param_specs(config), make_mesh(jax.devices(), size)))
    for field in QUANTIZABLE:
        weight = getattr(placed.layers[0], field)
        for part in (weight.values, weight.scales):
            held = {shard.data.size for shard in part.addressable_shards}
            # Scales of outputs are copied where the inputs are what is cut.
            copied = part is weight.scales and field in ("wo", "w_down") and not name.startswith("int4")
            assert held == {part.size if copied else part.size // size}, field


def test_groups_that_cannot_be_cut_name_the_sizes_that_work() -> None:
    config = dataclasses.replace(CONFIG, intermediate_size=256, quantization=QuantizationConfig("int4"))
    with pytest.raises(ValueError, match=r"w_down.scales: ffn=2 does not divide over tensor_parallel_size=4.*\[1, 2\]"):
        named_shardings(param_specs(config), make_mesh(jax.devices(), 4))


def test_fixed_input_scales_are_used() -> None:
    """With the scale of the largest activation the result is near; with one a thousand times too small it is not."""
    config, params = quantized("fp8")
    config = dataclasses.replace(config, quantization=QuantizationConfig("fp8", has_input_scales=True))

    def with_input_scale(scale: float) -> np.ndarray:
        layers = [
            dataclasses.replace(
                layer,
                **{
                    name: dataclasses.replace(getattr(layer, name), input_scale=jnp.float32(scale))
                    for name in QUANTIZABLE
                },
            )
            for layer in params.layers
        ]
        params_with = dataclasses.replace(params, layers=tuple(layers))
        model = PagedModel(config, params_with, capacity=len(PROMPT) + STEPS, chunk=len(PROMPT))
        return model.prefill(PROMPT)

    expected = on_one_device("fp8")[1][: len(PROMPT)]
    assert error(with_input_scale(8 / 448), expected) < 0.1
    assert error(with_input_scale(8 / 448 / 1000), expected) > 0.3


def test_a_float8_cache_is_near_and_a_quarter_of_float32() -> None:
    wide = run(CONFIG, dense_params())[1]
    narrow = run(CONFIG, dense_params(), cache_dtype=jnp.float8_e4m3fn)[1]
    count = len(PROMPT)
    assert 1e-4 < error(narrow[:count], wide[:count]) < 0.06
    model = PagedModel(CONFIG, dense_params(), capacity=8, cache_dtype=jnp.float8_e4m3fn)
    assert model.cache.k_pages.nbytes * 4 == PagedModel(CONFIG, dense_params(), capacity=8).cache.k_pages.nbytes


def test_scales_keep_large_keys_and_values_in_a_float8_cache() -> None:
    """Values a thousand times larger leave float8's range, unless their scale is a thousand times larger too."""
    config = dataclasses.replace(CONFIG, kv_cache_scales=True)

    def logits(scale: float, **options: object) -> np.ndarray:
        layers = []
        for layer in dense_params().layers:
            wqkv, wo = np.array(layer.wqkv), np.array(layer.wo)
            wqkv[:, :, -1] *= 1024  # values; the output product takes it back
            layers.append(
                dataclasses.replace(layer, wqkv=wqkv, wo=wo / 1024, k_scale=np.float32(0.5), v_scale=np.float32(scale))
            )
        params = dataclasses.replace(dense_params(), layers=tuple(layers))
        return run(config, params, **options)[1][: len(PROMPT)]

    expected = run(CONFIG, dense_params())[1][: len(PROMPT)]
    assert error(logits(1024.0, cache_dtype=jnp.float8_e4m3fn), expected) < 0.06
    assert error(logits(1.0, cache_dtype=jnp.float8_e4m3fn), expected) > 0.1
    assert error(logits(1024.0), expected) < 1e-4  # other caches need no scales
