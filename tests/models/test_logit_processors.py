"""Penalties, biases and log probabilities against their definitions, row by row in numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.logit_processors import Logprobs, ProcessorArrays, process_logits, token_logprobs

ROWS, VOCAB = 4, 12


def arrays(**changes: object) -> ProcessorArrays:
    """Processors that change nothing, but for what is given."""
    neutral = {
        "is_on": np.ones(ROWS, bool),
        "output_counts": np.zeros((ROWS, VOCAB), np.int32),
        "in_prompt": np.zeros((ROWS, VOCAB), bool),
        "bias": np.zeros((ROWS, VOCAB), np.float32),
        "stop_ids": np.full((ROWS, 3), VOCAB, np.int32),
        "min_tokens": np.zeros(ROWS, np.int32),
        "presence_penalty": np.zeros(ROWS, np.float32),
        "frequency_penalty": np.zeros(ROWS, np.float32),
        "repetition_penalty": np.ones(ROWS, np.float32),
    }
    return ProcessorArrays(**{name: jnp.asarray(value) for name, value in (neutral | changes).items()})


def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, VOCAB)).astype(np.float32) * 3


def process(processors: ProcessorArrays, num_output: int = 0) -> np.ndarray:
    return np.asarray(process_logits(jnp.asarray(logits()), processors, jnp.full((ROWS,), num_output, jnp.int32)))


def test_nothing_asked_for_changes_nothing() -> None:
    np.testing.assert_array_equal(process(arrays()), logits())


def test_presence_counts_once_and_frequency_every_time() -> None:
    counts = np.zeros((ROWS, VOCAB), np.int32)
    counts[1, 5], counts[1, 6] = 3, 1
    changed = process(
        arrays(
            output_counts=counts,
            presence_penalty=np.full(ROWS, 0.5, np.float32),
            frequency_penalty=np.full(ROWS, 0.25, np.float32),
        )
    )
    expected = logits()
    expected[1, 5] -= 0.5 + 3 * 0.25
    expected[1, 6] -= 0.5 + 0.25
    np.testing.assert_allclose(changed, expected, rtol=1e-6)


def test_presence_and_frequency_do_not_count_the_prompt() -> None:
    in_prompt = np.ones((ROWS, VOCAB), bool)
    penalties = np.full(ROWS, 2.0, np.float32)
    changed = process(arrays(in_prompt=in_prompt, presence_penalty=penalties, frequency_penalty=penalties))
    np.testing.assert_array_equal(changed, logits())


def test_repetition_counts_prompt_and_output_and_lowers_either_sign() -> None:
    in_prompt, counts = np.zeros((ROWS, VOCAB), bool), np.zeros((ROWS, VOCAB), np.int32)
    in_prompt[:, :4], counts[:, 6:8] = True, 2
    changed = process(
        arrays(in_prompt=in_prompt, output_counts=counts, repetition_penalty=np.full(ROWS, 1.5, np.float32))
    )
    held = in_prompt | (counts > 0)
    raw = logits()
    expected = np.where(held, np.where(raw > 0, raw / 1.5, raw * 1.5), raw)
    np.testing.assert_allclose(changed, expected, rtol=1e-6)
    assert (changed[held] < raw[held]).all()


def test_stop_tokens_cannot_be_drawn_before_min_tokens() -> None:
    stops = np.full((ROWS, 3), VOCAB, np.int32)
    stops[2] = [1, 7, VOCAB]
    processors = arrays(stop_ids=stops, min_tokens=np.full(ROWS, 2, np.int32))
    early, late = process(processors, num_output=1), process(processors, num_output=2)
    expected = logits()
    np.testing.assert_array_equal(late, expected)
    expected[2, [1, 7]] = -np.inf
    np.testing.assert_array_equal(early, expected)


def test_rows_that_are_off_keep_their_logits_whatever_their_slot_held() -> None:
    processors = arrays(
        is_on=np.array([True, False, True, False]),
        bias=np.full((ROWS, VOCAB), 5.0, np.float32),
        output_counts=np.full((ROWS, VOCAB), 9, np.int32),
        frequency_penalty=np.full(ROWS, np.nan, np.float32),
    )
    np.testing.assert_array_equal(process(processors)[[1, 3]], logits()[[1, 3]])


def test_logprobs_are_the_float64_log_softmax_and_descend() -> None:
    raw = logits().astype(np.float64)
    expected = raw - np.log(np.exp(raw).sum(-1, keepdims=True))
    tokens = np.array([0, 3, 11, 5], np.int32)
    result = token_logprobs(jnp.asarray(logits()), jnp.asarray(tokens))
    np.testing.assert_allclose(result.tokens, expected[np.arange(ROWS), tokens], atol=1e-5)
    assert result.top.shape == (ROWS, VOCAB)  # fewer than 20, for the vocabulary is smaller
    np.testing.assert_array_equal(result.top_ids, np.argsort(-expected, axis=-1))
    np.testing.assert_allclose(result.top, -np.sort(-expected, axis=-1), atol=1e-5)


@pytest.mark.parametrize("banned", [0, 11])
def test_a_token_of_no_probability_has_minus_infinity_and_harms_no_other(banned: int) -> None:
    raw = logits()
    raw[:, banned] = -np.inf
    result: Logprobs = token_logprobs(jnp.asarray(raw), jnp.full((ROWS,), banned, jnp.int32))
    assert np.isneginf(np.asarray(result.tokens)).all()
    np.testing.assert_allclose(np.exp(np.asarray(result.top)).sum(-1), 1.0, rtol=1e-5)
