"""One model on one, two, four and eight devices gives the same tokens, whatever its heads and its vocabulary."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import pytest

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.build import build_engine, make_engine_mesh
from jaxserve.engine.client import EngineClient, Replica
from jaxserve.engine.replicas import start_engine
from jaxserve.progress import NoProgress
from jaxserve.sampling_params import SamplingParams
from tests.long_cases import few_of
from tests.tiny_engine import MODEL_CONFIG, Answer, ask, random_params, tiny_engine

CONFIG = EngineConfig(max_model_len=48, max_num_seqs=1, max_num_batched_tokens=8, page_size=4, num_pages=12)
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


def model(kv_heads: int, *, tied: bool = True) -> ModelConfig:
    return dataclasses.replace(
        MODEL_CONFIG, num_kv_heads=kv_heads, vocab_size=VOCAB_SIZE, intermediate_size=256, tie_word_embeddings=tied
    )


@cache
def answers(kv_heads: int, quantization: str | None, size: int) -> list[list[int]]:
    config = dataclasses.replace(CONFIG, tensor_parallel_size=size, quantization=quantization)
    model_config = model(kv_heads, tied=kv_heads != 4)
    with tiny_engine(config, model_config, random_params(model_config)) as engine:
        return [ask(engine, prompt, sampling) for prompt in PROMPTS for sampling in (GREEDY, SEEDED)]


@pytest.mark.parametrize(
    ("kv_heads", "quantization", "size"),
    few_of(
        ((4, None, 8), (1, "int4-32", 4)), itertools.product((8, 4, 1), (None, "int8", "int4-32", "fp8"), (2, 4, 8))
    ),
)
def test_more_devices_give_the_same_tokens(kv_heads: int, quantization: str | None, size: int) -> None:
    on_one_device = answers(kv_heads, quantization, 1)
    assert len({tuple(tokens) for tokens in on_one_device}) == len(on_one_device)
    assert answers(kv_heads, quantization, size) == on_one_device


def test_a_padded_vocabulary_has_no_more_tokens() -> None:
    model_config = model(1)
    found = []
    for size in (1, 4):
        config = dataclasses.replace(CONFIG, tensor_parallel_size=size)
        with tiny_engine(config, model_config, random_params(model_config)) as engine:
            unwanted = ask(engine, [2, 3], NONE_IS_WANTED)
            answer = Answer(engine, [2, 3], WITH_LOGPROBS)
            steps = []
            while not answer.reasons[0]:
                steps += answer.next().logprobs or []
            found.append((unwanted, steps))
    (one, logprobs), (several, padded) = found
    assert several == one
    assert len(padded) == WITH_LOGPROBS.max_tokens
    for ours, theirs in zip(logprobs, padded, strict=True):
        assert theirs.token_id == ours.token_id
        assert theirs.logprob == pytest.approx(ours.logprob, abs=1e-4)
        assert [token for token, _ in theirs.top] == [token for token, _ in ours.top]


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


def test_replicas_with_several_devices_each_give_the_same_tokens() -> None:
    """Side by side, over devices of their own."""
    config = dataclasses.replace(CONFIG, data_parallel_size=2, tensor_parallel_size=2)
    model_config = model(8)

    clients: list[EngineClient] = []

    def build(config: EngineConfig, replica: Replica) -> EngineClient:
        clients.append(build_engine(model_config, random_params(model_config), config, NoProgress(), replica))
        return clients[-1]

    engine = start_engine(config, build)
    try:
        # Every replica, whoever the engine would have asked, and all at once.
        asked = [Answer(each, PROMPTS[1], GREEDY) for each in (*clients, engine, engine)]
        assert [answer.wait()[0] for answer in asked] == [answers(8, None, 1)[2]] * 4
    finally:
        engine.shutdown()
    assert len(clients) == 2


def test_replicas_have_devices_of_their_own() -> None:
    config = EngineConfig(tensor_parallel_size=2, data_parallel_size=4)
    groups = [set(make_engine_mesh(config, replica).devices.flat) for replica in range(4)]
    assert len(set.union(*groups)) == 8
    with pytest.raises(ValueError, match=r"=2 times data_parallel_size=5 .*8 cpu device.*JAX_NUM_CPU_DEVICES"):
        make_engine_mesh(dataclasses.replace(config, data_parallel_size=5))
