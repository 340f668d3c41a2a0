"""Which kind of sampling serves what is asked for."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from jaxserve.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("mode", "asked"),
    [
        ("random", {}),
        ("random", {"top_k": -1, "seed": 3}),
        ("greedy", {"temperature": 0.0}),
        ("greedy", {"temperature": 0.0, "top_k": 5}),
        ("filtered", {"top_k": 5}),
        ("filtered", {"top_p": 0.9}),
        ("filtered", {"min_p": 0.1}),
        ("full", {"temperature": 0.0, "logprobs": 0}),
        ("full", {"presence_penalty": 0.5}),
        ("full", {"frequency_penalty": -0.5}),
        ("full", {"repetition_penalty": 1.5}),
        ("full", {"logit_bias": ((3, 1.0),)}),
        ("full", {"min_tokens": 2}),
    ],
)
def test_the_cheapest_kind_that_does_all_that_is_asked(mode: str, asked: dict[str, Any]) -> None:
    assert SamplingParams(**asked).mode == mode


def test_a_changed_copy_has_a_kind_of_its_own() -> None:
    sampling = SamplingParams(top_k=5)
    assert sampling.mode == "filtered"
    assert dataclasses.replace(sampling, logprobs=1).mode == "full"
    assert pickle.loads(pickle.dumps(sampling)) == sampling == SamplingParams(top_k=5)
