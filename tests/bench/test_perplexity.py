"""Perplexity of a text in an engine, against the model's own logits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from jaxserve.bench.perplexity import perplexity
from jaxserve.config import EngineConfig
from jaxserve.engine.client import EngineClient
from tests.models.paged_model import PagedModel
from tests.tiny_engine import MODEL_CONFIG, tiny_engine, tiny_params

CONFIG = EngineConfig(max_model_len=48, max_num_seqs=1, max_num_batched_tokens=8, page_size=4, num_pages=12)
TEXT = np.random.default_rng(0).integers(2, 64, 25).tolist()
WINDOW = 12


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    with tiny_engine(CONFIG, mode="greedy") as engine:
        yield engine


def negative_logprobs(tokens: list[int]) -> list[float]:
    """Of each token but the first."""
    logits = PagedModel(MODEL_CONFIG, tiny_params(), capacity=len(tokens)).prefill(tokens)[:-1].astype(np.float64)
    normalized = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return [-row[token] for row, token in zip(normalized, tokens[1:], strict=True)]


def test_windows_begin_anew_and_a_single_token_at_the_end_is_left(engine: EngineClient) -> None:
    result = perplexity(engine, TEXT, WINDOW)
    expected = negative_logprobs(TEXT[:12]) + negative_logprobs(TEXT[12:24])
    assert result.num_tokens == len(expected) == 22
    assert result.value == pytest.approx(np.exp(np.mean(expected)), rel=1e-4)


@pytest.mark.parametrize(("tokens", "window"), [(TEXT, 1), (TEXT[:1], 12), ([], 12)])
def test_too_little_to_foretell(engine: EngineClient, tokens: list[int], window: int) -> None:
    with pytest.raises(ValueError, match="must be at least 2"):
        perplexity(engine, tokens, window)
