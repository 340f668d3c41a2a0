"""One model on one, two, four and eight devices gives the same tokens, whatever its heads and its vocabulary."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from typing import NamedTuple

import pytest

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.build import build_engine, make_engine_mesh
from jaxserve.engine.client import EngineClient, Replica
from jaxserve.engine.replicas import start_engine
from jaxserve.engine.request import TokenLogprobs
from jaxserve.progress import NoProgress
from jaxserve.sampling_params import SamplingParams
from tests.long_cases import few_of
from tests.tiny_engine import MODEL_CONFIG, ONE_SEQUENCE, Answer, ask, few_programs, random_params, tiny_engine

PROMPTS = [[2], [3, 4, 5, 6, 7], list(range(2, 32))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=18, ignore_eos=True)
VOCAB_SIZE = 61  # which does not divide over 2, 4 or 8
# Were there tokens beyond the vocabulary, these would be what is drawn.
NONE_IS_WANTED = SamplingParams(
    temperature=1.0,
    seed=3,
    max_tokens=4,
    ignore_eos=True,
    logit_bias=tuple((token, -100.0) for token in range(VOCAB_SIZE)),
)
WITH_LOGPROBS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=20)


def model(kv_heads: int) -> ModelConfig:
    return dataclasses.replace(
        MODEL_CONFIG,
        num_kv_heads=kv_heads,
        vocab_size=VOCAB_SIZE,
        intermediate_size=256,
        tie_word_embeddings=kv_heads != 4,
    )


class Said(NamedTuple):
    """What an engine gave."""

    answers: list[list[int]]  # to each prompt, greedy and drawn
    unwanted: list[int]
    logprobs: list[TokenLogprobs]


@cache
def said(kv_heads: int, quantization: str | None, size: int) -> Said:
    config = dataclasses.replace(ONE_SEQUENCE, tensor_parallel_size=size, quantization=quantization)
    model_config = model(kv_heads)
    with tiny_engine(config, model_config, random_params(model_config), mode="full") as engine:
        answers = [ask(engine, prompt, sampling) for prompt in PROMPTS for sampling in (GREEDY, SEEDED)]
        unwanted = ask(engine, [2, 3], NONE_IS_WANTED)
        answer = Answer(engine, [2, 3], WITH_LOGPROBS)
        logprobs: list[TokenLogprobs] = []
        while not answer.reasons[0]:
            logprobs += answer.next().logprobs or []
        return Said(answers, unwanted, logprobs)


@pytest.mark.parametrize(
    ("kv_heads", "quantization", "size"),
    few_of(
        ((4, None, 8), (1, "int4-32", 4)), itertools.product((8, 4, 1), (None, "int8", "int4-32", "fp8"), (2, 4, 8))
    ),
)
def test_more_devices_give_the_same_tokens(kv_heads: int, quantization: str | None, size: int) -> None:
    on_one_device = said(kv_heads, quantization, 1).answers
    assert len({tuple(tokens) for tokens in on_one_device}) == len(on_one_device)
    assert said(kv_heads, quantization, size).answers == on_one_device


@pytest.mark.parametrize("quantization", ["int4-32", pytest.param(None, marks=pytest.mark.long)])
def test_a_padded_vocabulary_has_no_more_tokens(quantization: str | None) -> None:
    one, several = said(1, quantization, 1), said(1, quantization, 4)
    assert several.unwanted == one.unwanted
    assert len(several.logprobs) == WITH_LOGPROBS.max_tokens
    for ours, theirs in zip(one.logprobs, several.logprobs, strict=True):
        assert theirs.token_id == ours.token_id
        assert theirs.logprob == pytest.approx(ours.logprob, abs=1e-4)
        assert [token for token, _ in theirs.top] == [token for token, _ in ours.top]


def test_a_size_that_does_not_divide_is_refused_before_anything_is_compiled() -> None:
    model_config = dataclasses.replace(MODEL_CONFIG, num_heads=6, num_kv_heads=3)
    with (
        pytest.raises(ValueError, match=r"kv_heads=3 .*sizes that work: \[1\]"),
        tiny_engine(dataclasses.replace(ONE_SEQUENCE, tensor_parallel_size=2), model_config),
    ):
        pass


def test_too_many_devices_are_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"tensor_parallel_size=16 .*8 cpu device"),
        tiny_engine(dataclasses.replace(ONE_SEQUENCE, tensor_parallel_size=16)),
    ):
        pass


def test_replicas_with_several_devices_each_give_the_same_tokens() -> None:
    """Side by side, over devices of their own."""
    config = dataclasses.replace(ONE_SEQUENCE, data_parallel_size=2, tensor_parallel_size=2)
    model_config = model(4)

    clients: list[EngineClient] = []

    def build(config: EngineConfig, replica: Replica) -> EngineClient:
        clients.append(build_engine(model_config, random_params(model_config), config, NoProgress(), replica))
        return clients[-1]

    with few_programs("full"):
        engine = start_engine(config, build)
    try:
        # Every replica, whoever the engine would have asked, and all at once.
        asked = [Answer(each, PROMPTS[1], GREEDY) for each in (*clients, engine, engine)]
        assert [answer.wait()[0] for answer in asked] == [said(4, None, 1).answers[2]] * 4
    finally:
        engine.shutdown()
    assert len(clients) == 2


def test_replicas_have_devices_of_their_own() -> None:
    config = EngineConfig(tensor_parallel_size=2, data_parallel_size=4)
    groups = [set(make_engine_mesh(config, replica).devices.flat) for replica in range(4)]
    assert len(set.union(*groups)) == 8
    with pytest.raises(ValueError, match=r"=2 times data_parallel_size=5 .*8 cpu device.*JAX_NUM_CPU_DEVICES"):
        make_engine_mesh(dataclasses.replace(config, data_parallel_size=5))
