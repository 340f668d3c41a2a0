"""Scalings of rotary embeddings that depend on the longest sequence take the engine's, not the model's."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from jaxserve.config import EngineConfig, RopeScaling
from jaxserve.sampling_params import SamplingParams
from tests.engine.greedy_tokens import greedy_tokens
from tests.models.paged_model import PagedModel
from tests.tiny_engine import MODEL_CONFIG, ask, tiny_engine, tiny_params

PROMPT = [5, 9, 2, 33, 17, 60, 8]
LONGROPE = RopeScaling(
    "longrope",
    original_max_position_embeddings=16,
    attention_factor=3.0,
    short_factors=(1.0, 1.0, 1.0, 1.0),
    long_factors=(40.0, 40.0, 40.0, 40.0),
)
MODEL = dataclasses.replace(MODEL_CONFIG, rope_scaling=LONGROPE)


@cache
def expected_tokens(length: int) -> list[int]:
    config = dataclasses.replace(MODEL, max_position_embeddings=length)
    model = PagedModel(config, tiny_params(), capacity=16, by_layer=True)
    return greedy_tokens(model, PROMPT, 8)


def test_the_two_kinds_of_factors_differ() -> None:
    assert expected_tokens(16) == expected_tokens(8)
    assert expected_tokens(17) == expected_tokens(128)
    assert expected_tokens(16) != expected_tokens(17)


@pytest.mark.parametrize("max_model_len", [16, 17])
def test_longrope_goes_by_the_longest_sequence_that_is_allowed(max_model_len: int) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    config = EngineConfig(max_model_len=max_model_len, max_num_seqs=1, max_num_batched_tokens=16)
    with tiny_engine(config, MODEL, mode="greedy") as engine:
        assert ask(engine, PROMPT, sampling) == expected_tokens(max_model_len)
