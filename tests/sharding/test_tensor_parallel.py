"""One model on one, two and four devices gives the same tokens."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SamplingParams
from tests.tiny_engine import MODEL_CONFIG, ask, tiny_engine

CONFIG = EngineConfig(max_model_len=48, max_num_seqs=1, max_num_batched_tokens=8, page_size=4, num_pages=12)
PROMPTS = [[2], [3, 4, 5, 6, 7], list(range(2, 32))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=18, ignore_eos=True)


def answers(tensor_parallel_size: int) -> list[list[int]]:
    with tiny_engine(dataclasses.replace(CONFIG, tensor_parallel_size=tensor_parallel_size)) as engine:
        return [ask(engine, prompt, sampling) for prompt in PROMPTS for sampling in (GREEDY, SEEDED)]


@pytest.fixture(scope="module")
def on_one_device() -> list[list[int]]:
    return answers(1)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 4])
def test_more_devices_give_the_same_tokens(size: int, on_one_device: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in on_one_device}) == len(on_one_device)
    assert answers(size) == on_one_device


def test_a_size_that_does_not_divide_is_refused_before_anything_is_compiled() -> None:
    model_config = dataclasses.replace(MODEL_CONFIG, num_heads=6, num_kv_heads=3)
    with (
        pytest.raises(ValueError, match=r"kv_heads=3 .*sizes that work: \[1\]"),
        tiny_engine(dataclasses.replace(CONFIG, tensor_parallel_size=2), model_config),
    ):
        pass


def test_too_many_devices_are_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"tensor_parallel_size=16 .*8 cpu device"),
        tiny_engine(dataclasses.replace(CONFIG, tensor_parallel_size=16)),
    ):
        pass
