"""Engines that quantize what they load, and engines with a float8 cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import EngineConfig, QuantizationConfig
from jaxserve.engine import build, capacity
from jaxserve.engine.build import build_dummy_engine, build_engine, make_engine_mesh
from jaxserve.engine.capacity import plan_limits
from jaxserve.models.quantize_params import quantize_params
from jaxserve.progress import NoProgress
from jaxserve.sampling_params import SamplingParams
from tests.engine.greedy_tokens import greedy_tokens
from tests.models.paged_model import PagedModel
from tests.tiny_engine import MODEL_CONFIG, ONE_SEQUENCE, ask, few_programs, tiny_engine, tiny_params

CONFIG = dataclasses.replace(ONE_SEQUENCE, seed=0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
PROMPT = [3, 4, 5, 6, 7, 9, 11, 13, 15, 17, 19]


def expected_tokens(name: str, cache_dtype: Any) -> list[int]:
    quantization = QuantizationConfig.named(name)
    params = quantize_params(tiny_params(), MODEL_CONFIG, quantization)
    config = dataclasses.replace(MODEL_CONFIG, quantization=quantization)
    model = PagedModel(config, params, capacity=48, page_size=4, cache_dtype=cache_dtype, by_layer=True)
    return greedy_tokens(model, PROMPT, GREEDY.max_tokens)


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("fp8", "fp8"),
        pytest.param("fp8", "auto", marks=pytest.mark.long),
        pytest.param("fp8-weight-only", "auto", marks=pytest.mark.long),
        pytest.param("int8", "fp8_e4m3", marks=pytest.mark.long),
        pytest.param("int4", "auto", marks=pytest.mark.long),
        ("int4-32", "auto"),
    ],
)
def test_the_tokens_are_those_of_the_quantized_model(name: Any, cache: Any) -> None:
    config = dataclasses.replace(CONFIG, quantization=name, kv_cache_dtype=cache)
    with tiny_engine(config, mode="greedy") as engine:
        assert engine.model_config.quantization == QuantizationConfig.named(name)
        tokens = ask(engine, PROMPT, GREEDY)
    assert tokens == expected_tokens(name, jnp.float32 if cache == "auto" else jnp.float8_e4m3fn)


def test_random_weights_are_made_quantized() -> None:
    config = dataclasses.replace(CONFIG, quantization="int8", load_format="dummy", tensor_parallel_size=2)
    with few_programs("greedy"):
        engine = build_dummy_engine(MODEL_CONFIG, config, NoProgress())
    try:
        assert engine.model_config.quantization == QuantizationConfig("int8")
        assert len(ask(engine, PROMPT, GREEDY)) == GREEDY.max_tokens
    finally:
        engine.shutdown()


@pytest.mark.parametrize("asked", ["fp8", "int4-32"])
def test_a_checkpoint_that_is_quantized_in_another_way_is_refused(asked: Any) -> None:
    model_config = dataclasses.replace(MODEL_CONFIG, quantization=QuantizationConfig("int4"))
    with pytest.raises(
        ValueError, match=f"quantization='{asked}' was asked for, but the checkpoint is quantized as 'int4'"
    ):
        build_engine(model_config, tiny_params(), dataclasses.replace(CONFIG, quantization=asked), NoProgress())


def test_a_checkpoint_that_is_quantized_as_asked_is_taken_as_it_is() -> None:
    quantization = QuantizationConfig("fp8", has_input_scales=True)
    model_config = dataclasses.replace(MODEL_CONFIG, quantization=quantization)
    assert build.wanted_quantization(model_config, dataclasses.replace(CONFIG, quantization="fp8")) is None
    assert build.wanted_quantization(model_config, CONFIG) is None
    assert build.wanted_quantization(MODEL_CONFIG, CONFIG) is None


def test_a_float8_cache_has_room_for_more_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "free_cache_bytes", lambda *_: 1 << 16)
    config = EngineConfig(max_num_seqs=8)
    mesh = make_engine_mesh(config)
    wide = plan_limits(MODEL_CONFIG, config, mesh, jnp.dtype(jnp.bfloat16)).num_pages
    narrow = plan_limits(MODEL_CONFIG, config, mesh, jnp.dtype(jnp.float8_e4m3fn)).num_pages
    assert narrow == 2 * wide > 0


def test_dense_weights_on_the_device_are_given_up() -> None:
    params = jax.device_put(tiny_params())
    config = dataclasses.replace(CONFIG, quantization="int8")
    mesh = make_engine_mesh(config)
    model_config, placed = build.place_params(MODEL_CONFIG, params, config, mesh, NoProgress())
    assert model_config.quantization == QuantizationConfig("int8")
    assert all(getattr(layer, name).is_deleted() for layer in params.layers for name in ("wqkv", "wo", "w_down"))
    assert placed.layers[0].w_down.values.dtype == jnp.int8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "awq"}, "quantization='awq' must be one of fp8"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' must be one of auto, fp8, fp8_e4m3"),
    ],
)
def test_unknown_names_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**changes)
