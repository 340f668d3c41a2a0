"""An engine whose layers do not all hold the same kinds of weights: on a CPU each kind has a program of its own."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxserve.config import EngineConfig, QuantizationConfig
from jaxserve.models.quantize_params import quantize_params
from jaxserve.sampling_params import SamplingParams
from tests.engine.greedy_tokens import greedy_tokens
from tests.models.paged_model import PagedModel
from tests.tiny_engine import MODEL_CONFIG, ask, random_params, tiny_engine

PROMPT = [5, 9, 2, 33, 17, 60, 8]


def test_layers_of_two_kinds_answer_as_the_whole_pass_does() -> None:
    dense = dataclasses.replace(MODEL_CONFIG, num_layers=3)
    quantization = QuantizationConfig("fp8", dense_layers=(1,), dense_weights=("w_down",))
    config = dataclasses.replace(dense, quantization=quantization)
    params = quantize_params(random_params(dense), dense, quantization)
    model = PagedModel(config, params, capacity=16)
    expected = greedy_tokens(model, PROMPT, 8)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine_config = EngineConfig(max_model_len=16, max_num_seqs=1, max_num_batched_tokens=16)
    with tiny_engine(engine_config, config, params, mode="greedy") as engine:
        assert ask(engine, PROMPT, sampling) == expected
        assert params.layers[1].wqkv.dtype == jnp.float32
