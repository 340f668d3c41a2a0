"""Masks on the device, in every kind of sampling, over a random two-layer model."""

from __future__ import annotations

import pytest

from jaxserve.engine.client import EngineClient
from jaxserve.sampling_params import SamplingParams
from tests.engine.test_constraints import WordRule
from tests.tiny_engine import EOS, Answer

PROMPT = (5, 6, 7, 8)
SETS = tuple((i, i + 1, 30 + i, 63) for i in range(2, 12))
RULE = WordRule(SETS, shortest=len(SETS))


@pytest.fixture
def engine(small_engine: EngineClient) -> EngineClient:
    return small_engine


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.5},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "frequency_penalty": 2.0, "logit_bias": ((3, 100.0), (33, -100.0))},
        {"temperature": 1.0, "logprobs": 3},
    ],
)
def test_only_tokens_of_the_mask_are_drawn(engine: EngineClient, options: dict) -> None:
    sampling = SamplingParams(max_tokens=30, seed=4, n=3, constraint=RULE, **options)
    answer = Answer(engine, PROMPT, sampling)
    answer.wait()
    assert answer.reasons == ["stop"] * 3
    for tokens in answer.choices:
        assert all(token in allowed for token, allowed in zip(tokens, SETS, strict=True))


def test_a_row_gives_the_same_beside_constrained_rows(engine: EngineClient) -> None:
    plain = SamplingParams(max_tokens=12, seed=9, temperature=1.0, ignore_eos=True)
    alone = Answer(engine, PROMPT, plain).wait()
    beside = Answer(engine, PROMPT, SamplingParams(max_tokens=30, seed=4, constraint=RULE))
    assert Answer(engine, PROMPT, plain).wait() == alone
    beside.wait()


def test_min_tokens_does_not_break_a_constraint_that_may_only_end(engine: EngineClient) -> None:
    rule = WordRule(((3,), (4,), (5,), ()), shortest=3)  # after three tokens an end alone may follow
    sampling = SamplingParams(max_tokens=30, min_tokens=20, constraint=rule)
    answer = Answer(engine, PROMPT, sampling)
    answer.wait()
    assert answer.choices == [[3, 4, 5, EOS]] and answer.reasons == ["stop"]
