"""bfloat16: edge values of sampling, and that company may turn near ties alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.client import EngineClient
from jaxserve.sampling_params import SamplingParams
from tests.engine.test_logprobs import Scored, greedy
from tests.tiny_engine import TIMEOUT, VOCAB_SIZE, Answer, ask, tiny_engine

NEAR = 0.02  # nats: docs/architecture.md tells of it
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(2, VOCAB_SIZE, length).tolist() for length in (1, 5, 12, 23, 30)]
SAMPLING = greedy(max_tokens=24, logprobs=20)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    config = EngineConfig(
        max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, page_size=4, num_pages=64, dtype="bfloat16"
    )
    with tiny_engine(config, mode="full") as engine:
        yield engine


def test_edge_values_are_kept(engine: EngineClient) -> None:
    assert engine.config.dtype == "bfloat16"
    common: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    likeliest = ask(engine, [5, 6], SamplingParams(temperature=0.0, **common))
    assert len(set(likeliest)) > 1
    for params in ({"temperature": 1e-9}, {"top_p": 0.0}, {"top_k": 1}):
        assert ask(engine, [5, 6], SamplingParams(seed=5, **params, **common)) == likeliest
    assert len({tuple(ask(engine, [5, 6], SamplingParams(seed=seed, **common))) for seed in range(5)}) == 5


def alone(engine: EngineClient) -> list[Scored]:
    """Every prompt's answer, when nothing else runs and nothing is kept of prompts before."""
    answers = []
    for prompt in PROMPTS:
        engine.flush_prefix_cache().result(TIMEOUT)
        answers.append(Scored(engine, prompt, SAMPLING).finish())
    return answers


def assert_near(other: Scored, expected: Scored) -> None:
    """Log probabilities are near, and so are those of the two tokens where the answers part."""
    for theirs, ours in zip(other.logprobs, expected.logprobs, strict=True):
        known = dict(ours.top)
        assert all(abs(value - known[token]) < NEAR for token, value in theirs.top[:5])
        if theirs.token_id != ours.token_id:
            assert ours.logprob - known[theirs.token_id] < NEAR
            return


def test_alone_an_answer_is_always_the_same(engine: EngineClient) -> None:
    first = alone(engine)
    for _ in range(4):
        assert [answer.logprobs for answer in alone(engine)] == [answer.logprobs for answer in first]


@pytest.mark.parametrize("num_mates", [0, 45])
def test_company_and_kept_prompts_change_near_ties_alone(engine: EngineClient, num_mates: int) -> None:
    """Beside others a prompt is cut into other chunks too."""
    expected = alone(engine)
    mates = [Answer(engine, PROMPTS[n % 5][:n], greedy(max_tokens=5 + n % 13)) for n in range(1, num_mates + 1)]
    answers = [Scored(engine, prompt, SAMPLING) for prompt in PROMPTS]
    for answer, of_it_alone in zip(answers, expected, strict=True):
        assert_near(answer.finish(), of_it_alone)
    for mate in mates:
        mate.wait()
