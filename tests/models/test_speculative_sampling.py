"""Verified drafts: every token is distributed as the target alone would draw it, and seeded rows are its very tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.logit_processors import ProcessorArrays, process_logits
from jaxserve.models.sampling import log_probabilities, row_keys, sample
from jaxserve.models.speculative_sampling import Drafts, Verified, position_counters, verify
from tests.models.test_sampling import CHI_SQUARE_LIMIT, VOCAB, arrays, distribution
from tests.optimized_programs import OPTIMIZED

START = VOCAB  # what stands before the first position
NUM_DRAFTS = 2
ROWS = 20_000
DRAWS = 200_000
_rng = np.random.default_rng(0)
TARGET = _rng.normal(0, 1.5, (VOCAB + 1, VOCAB)).astype(np.float32)  # logits after each token
DRAFTER = (TARGET + _rng.normal(0, 1.0, TARGET.shape)).astype(np.float32)  # not far from it
OUTPUT_COUNTS = np.array([0, 2, 1, 0, 0, 0, 3, 0], np.int32)  # of the text before
NO_PENALTIES = (0.0, 0.0, 1.0)
PENALTIES = (0.7, 0.4, 1.3)  # presence, frequency, repetition
NO_BIAS = np.zeros(VOCAB, np.float32)
BIAS = np.array([0.0, 1.5, -2.0, 0.0, -100.0, 0.5, 0.0, 3.0], np.float32)


class Drawn(NamedTuple):
    drafts: np.ndarray  # [draws, NUM_DRAFTS]
    tokens: np.ndarray  # [draws, NUM_DRAFTS + 1]
    counts: np.ndarray  # [draws]


def processors(counts: jax.Array, penalties: jax.Array, bias: jax.Array) -> ProcessorArrays:
    rows = counts.shape[0]
    presence, frequency, repetition = (jnp.broadcast_to(penalty, (rows,)) for penalty in penalties)
    return ProcessorArrays(
        is_on=jnp.ones((rows,), jnp.bool_),
        output_counts=counts,
        in_prompt=jnp.zeros(counts.shape, jnp.bool_),
        bias=jnp.broadcast_to(bias, counts.shape),
        stop_ids=jnp.full((rows, 1), VOCAB, jnp.int32),
        min_tokens=jnp.zeros((rows,), jnp.int32),
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
    )


def _speculate(
    params: Any,
    penalties: jax.Array,
    bias: jax.Array,
    counters: jax.Array,
    num_drafts: jax.Array,
    rejects: jax.Array,
    *,
    has_probabilities: bool = True,
    synthetic: jax.Array | None = None,
) -> tuple[jax.Array, Verified]:
    """Drafts as a model would, and verifies."""
    rows = counters.shape[0]
    seeds = jnp.zeros((rows, 2), jnp.uint32)
    before = jnp.full((rows,), START, jnp.int32)
    counts = jnp.broadcast_to(jnp.asarray(OUTPUT_COUNTS), (rows, VOCAB))
    drafts, log_q, target = [], [], []
    for position in range(NUM_DRAFTS + 1):
        target.append(process_logits(jnp.take(TARGET, before, axis=0), processors(counts, penalties, bias), counters))
        if position == NUM_DRAFTS:
            break
        logits = process_logits(jnp.take(DRAFTER, before, axis=0), processors(counts, penalties, bias), counters)
        before = sample(logits, params, row_keys(seeds, counters + position), mode="full")
        drafts.append(before)
        log_q.append(log_probabilities(logits, params, mode="full"))
        counts = counts.at[jnp.arange(rows), before].add(1)
    made = Drafts(
        token_ids=jnp.stack(drafts, axis=1),
        counts=num_drafts,
        log_probabilities=jnp.stack(log_q, axis=1) if has_probabilities else None,
    )
    logits = jnp.stack(target, axis=1).reshape(-1, VOCAB)
    verified = verify(logits, made, params, seeds, counters, rejects, mode="full", synthetic_acceptance=synthetic)  # pyright: ignore[reportArgumentType]
    return made.token_ids, verified


_speculate_once = jax.jit(_speculate, static_argnames="has_probabilities")
_speculate_often = jax.jit(_speculate, static_argnames="has_probabilities", compiler_options=OPTIMIZED)


def speculate(
    *,
    rejects: bool,
    draws: int = DRAWS,
    penalties: tuple[float, float, float] = NO_PENALTIES,
    bias: np.ndarray = NO_BIAS,
    has_probabilities: bool = True,
    synthetic: float | None = None,
    **params: float,
) -> Drawn:
    run = _speculate_often if has_probabilities and synthetic is None else _speculate_once
    parts = []
    for first in range(0, draws, ROWS):
        # Every row's positions have counters of their own, so that all draws are independent.
        counters = (NUM_DRAFTS + 1) * np.arange(first, first + ROWS, dtype=np.int32)
        parts.append(
            run(
                arrays(ROWS, **params),  # pyright: ignore[reportArgumentType]
                np.array(penalties, np.float32),  # pyright: ignore[reportArgumentType]
                bias,  # pyright: ignore[reportArgumentType]
                counters,  # pyright: ignore[reportArgumentType]
                np.full(ROWS, NUM_DRAFTS, np.int32),  # pyright: ignore[reportArgumentType]
                np.full(ROWS, rejects),  # pyright: ignore[reportArgumentType]
                has_probabilities=has_probabilities,
                synthetic=None if synthetic is None else np.float32(synthetic),
            )
        )
    joined = [
        np.concatenate([np.asarray(get(part)) for part in parts])
        for get in (lambda p: p[0], lambda p: p[1].token_ids, lambda p: p[1].counts)
    ]
    return Drawn(*joined)


def exact(
    logits: np.ndarray,
    before: list[int],
    penalties: tuple[float, float, float],
    bias: np.ndarray = NO_BIAS,
    **params: float,
) -> np.ndarray:
    """What the target alone draws from after some tokens, by the definitions."""
    presence, frequency, repetition = penalties
    counts = OUTPUT_COUNTS + np.bincount(before, minlength=VOCAB)
    changed = logits[before[-1] if before else START].astype(np.float64) + bias
    changed = np.where(counts > 0, np.where(changed > 0, changed / repetition, changed * repetition), changed)
    changed = changed - frequency * counts - presence * (counts > 0)
    return distribution(logits=changed, **params)  # pyright: ignore[reportArgumentType]


def check(tokens: np.ndarray, wanted: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=VOCAB)
    possible = wanted > 0
    assert not counts[~possible].any()
    mean = wanted[possible] * len(tokens)
    if possible.sum() > 1:
        chi_square = float(((counts[possible] - mean) ** 2 / mean).sum())
        assert chi_square < CHI_SQUARE_LIMIT[int(possible.sum()) - 1]


CASES = [
    pytest.param({"temperature": 0.7}, NO_PENALTIES, marks=pytest.mark.long),
    ({"temperature": 1.3}, NO_PENALTIES),
    ({"temperature": 0.7, "top_p": 0.9}, PENALTIES),
    pytest.param({"temperature": 1.3, "top_p": 0.9}, PENALTIES, marks=pytest.mark.long),
    pytest.param({"temperature": 1.0, "top_k": 5, "min_p": 0.02}, PENALTIES, marks=pytest.mark.long),
]


@pytest.mark.parametrize("rejects", [True, False])
@pytest.mark.parametrize(("params", "penalties"), CASES)
def test_every_token_is_distributed_as_the_target_alone_draws_it(
    params: dict[str, Any], penalties: tuple[float, float, float], rejects: bool
) -> None:
    check_all(speculate(rejects=rejects, penalties=penalties, **params), partial(exact, penalties=penalties, **params))


@pytest.mark.long
@pytest.mark.parametrize("rejects", [True, False])
def test_biases_and_min_p_reach_every_place(rejects: bool) -> None:
    limits: dict[str, Any] = {"penalties": PENALTIES, "bias": BIAS, "temperature": 0.7, "min_p": 0.2}
    drawn = speculate(rejects=rejects, **limits)
    check_all(drawn, partial(exact, **limits))
    for place in range(NUM_DRAFTS + 1):
        assert (drawn.tokens[drawn.counts > place, place] != BIAS.argmin()).all()


def check_all(drawn: Drawn, exact: Callable[[np.ndarray, list[int]], np.ndarray]) -> None:
    """The first tokens, the second ones after each first, and the third ones after the commonest two."""
    check(drawn.tokens[:, 0], exact(TARGET, []))
    firsts, counts = np.unique(drawn.tokens[drawn.counts > 1, 0], return_counts=True)
    for first in firsts[counts > 5_000]:  # fewer tell nothing of the rare tokens that follow
        after = drawn.tokens[(drawn.counts > 1) & (drawn.tokens[:, 0] == first)]
        check(after[:, 1], exact(TARGET, [int(first)]))
    seconds, counts = np.unique(drawn.tokens[drawn.counts > 2, :2], axis=0, return_counts=True)
    pair = seconds[np.argmax(counts)]
    after = drawn.tokens[(drawn.counts > 2) & (drawn.tokens[:, :2] == pair).all(axis=1)]
    check(after[:, 2], exact(TARGET, pair.tolist()))


@pytest.mark.parametrize(("params", "penalties"), CASES[:3])
def test_rejection_keeps_as_many_drafts_as_can_be_kept(
    params: dict[str, Any], penalties: tuple[float, float, float]
) -> None:
    kept = np.mean(speculate(rejects=True, draws=2 * ROWS, penalties=penalties, **params).counts > 1)
    p, q = (exact(logits, [], penalties, **params) for logits in (TARGET, DRAFTER))
    assert kept == pytest.approx(np.minimum(p, q).sum(), abs=0.02)
    assert np.mean(speculate(rejects=False, draws=2 * ROWS, penalties=penalties, **params).counts > 1) < kept


def test_without_rejection_the_tokens_are_those_that_are_drawn_one_by_one() -> None:
    params: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95}
    for has_probabilities in (True, False):
        drawn = speculate(rejects=not has_probabilities, draws=ROWS, has_probabilities=has_probabilities, **params)
        before = np.full(ROWS, START)
        for position in range(NUM_DRAFTS + 1):
            counters = (NUM_DRAFTS + 1) * np.arange(ROWS, dtype=np.int32) + position
            keys = row_keys(jnp.zeros((ROWS, 2), jnp.uint32), jnp.asarray(counters))
            tokens = np.asarray(sample(jnp.asarray(TARGET[before]), arrays(ROWS, **params), keys, mode="full"))  # pyright: ignore
            reached = drawn.counts > position
            assert (drawn.tokens[reached, position] == tokens[reached]).all()
            before = np.where(reached, drawn.tokens[:, position], 0)
        # as far as the drafts are right, and one further
        right = np.cumprod(drawn.drafts == drawn.tokens[:, :-1], axis=1).sum(axis=1)
        assert (drawn.counts == right + 1).all()


def test_greedy_rows_are_never_drawn_for_whatever_their_neighbours_want() -> None:
    drawn = speculate(rejects=True, draws=ROWS, temperature=0.0)
    assert (drawn.tokens[:, 0] == TARGET[START].argmax()).all()
    second = drawn.counts > 1
    assert (drawn.tokens[second, 1] == TARGET[drawn.tokens[second, 0]].argmax(axis=1)).all()


def test_rows_keep_no_more_drafts_than_they_have() -> None:
    token_ids = np.full((3, NUM_DRAFTS), 5, np.int32)
    logits = np.full((3 * (NUM_DRAFTS + 1), VOCAB), -5, np.float32)
    logits[:, 5] = 5.0  # every draft is right
    verified = verify(
        jnp.asarray(logits),
        Drafts(token_ids=jnp.asarray(token_ids), counts=jnp.array([0, 1, 2], jnp.int32)),
        arrays(3, temperature=0.0),
        jnp.zeros((3, 2), jnp.uint32),
        jnp.zeros((3,), jnp.int32),
        mode="greedy",
    )
    assert np.asarray(verified.counts).tolist() == [1, 2, 3]
    assert (np.asarray(verified.token_ids)[:, 0] == 5).all()


@pytest.mark.parametrize("wanted", [0.0, 0.8, 1.0])
def test_synthetic_acceptance_keeps_each_draft_with_its_probability(wanted: float) -> None:
    drawn = speculate(rejects=True, draws=ROWS, synthetic=wanted, temperature=1.0)
    assert np.mean(drawn.counts > 1) == pytest.approx(wanted, abs=0.02)
    assert np.mean(drawn.counts[drawn.counts > 1] > 2) == pytest.approx(wanted, abs=0.02) if wanted else True
    kept = drawn.counts > 1
    assert (drawn.tokens[kept, 0] == drawn.drafts[kept, 0]).all()


def test_synthetic_acceptance_keeps_no_draft_that_is_impossible() -> None:
    logits = np.zeros((2 * (NUM_DRAFTS + 1), VOCAB), np.float32)
    logits[4, 5] = -np.inf  # of the second row, after its first draft
    verified = verify(
        jnp.asarray(logits),
        Drafts(token_ids=jnp.full((2, NUM_DRAFTS), 5, jnp.int32), counts=jnp.full((2,), NUM_DRAFTS, jnp.int32)),
        arrays(2, temperature=0.0),
        jnp.zeros((2, 2), jnp.uint32),
        jnp.zeros((2,), jnp.int32),
        mode="greedy",
        synthetic_acceptance=1.0,
    )
    assert np.asarray(verified.counts).tolist() == [3, 2]


def test_positions_of_a_row_draw_with_the_counters_of_their_tokens() -> None:
    counters = position_counters(jnp.array([4, 9], jnp.int32), 3)
    assert np.asarray(counters).tolist() == [4, 5, 6, 9, 10, 11]
