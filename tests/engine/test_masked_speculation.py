"""Masks of drafted positions, from a grammar to the verification: what is drawn is what the masked model draws."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence as Tokens
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.constraint import ConstraintError, TokenConstraint
from jaxserve.engine.decode_state import empty_state
from jaxserve.engine.device_batch import Sizes
from jaxserve.engine.drafters import PromptLookup
from jaxserve.engine.processor_state import empty_processors
from jaxserve.engine.request import Request
from jaxserve.engine.schedule import DecodeRow, DraftedTokens, ScheduledBatch
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.speculative_programs import SpeculativePrograms
from jaxserve.engine.token_masks import MaskWriter, StepMasks
from jaxserve.models.speculative_sampling import Drafts
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import make_mesh
from jaxserve.structured.grammar import CompiledGrammar, Grammar, compile_grammar
from tests.models.test_sampling import VOCAB
from tests.models.test_speculative_sampling import (
    DRAFTER,
    NO_PENALTIES,
    NUM_DRAFTS,
    OUTPUT_COUNTS,
    PENALTIES,
    START,
    TARGET,
    check,
    exact,
)
from tests.optimized_programs import OPTIMIZED
from tests.structured.grammars import vocabulary_of

A, B, C, D, E, F, G, H = range(VOCAB)
ROWS, DRAWS = 20_000, 200_000
PAIRS = np.array(list(itertools.product(range(VOCAB), repeat=NUM_DRAFTS)), np.int32)
# "h" is not in it, but it ends an answer, and where two letters are one it may.
EXPRESSION = "(a[b-e]|[bc](d|[a-c]g)|[d-f][a-f])[a-e]*"


def may_follow(before: tuple[int, ...]) -> list[int]:
    """By the expression."""
    if not before:
        return [A, B, C, D, E, F]
    if len(before) == 1:
        return {A: [B, C, D, E], B: [A, B, C, D], C: [A, B, C, D]}.get(before[0], [A, B, C, D, E, F])
    return [G] if before[0] in (B, C) and before[1] != D else [A, B, C, D, E, H]


@cache
def letters() -> CompiledGrammar:
    return compile_grammar(Grammar("regex", EXPRESSION), vocabulary_of("abcdefgh"))


def masks_of(
    constraints: list[TokenConstraint | None], drafts: np.ndarray, counts: np.ndarray | None = None
) -> StepMasks:
    """Of a step with a row for each constraint."""
    sequences = [
        Sequence(Request(f"{row}", (1,), SamplingParams(), arrival_time=0.0), 0, 0, frozenset({H}), 9, constraint)
        for row, constraint in enumerate(constraints)
    ]
    rows = tuple(DecodeRow(sequence, row, -1, -1, drafts.shape[1]) for row, sequence in enumerate(sequences))
    counts = np.full(len(rows), drafts.shape[1], np.int32) if counts is None else counts
    writer = MaskWriter(VOCAB)
    try:
        return writer.write(
            ScheduledBatch(decode=rows, prefill=(), num_drafts=drafts.shape[1]), DraftedTokens(drafts, counts)
        )
    finally:
        writer.close()


def tokens_of(word: int) -> list[int]:
    return [token for token in range(VOCAB) if word >> token & 1]


def test_each_position_has_the_mask_of_what_is_drafted_before_it() -> None:
    constraints: list[TokenConstraint | None] = [letters().start() for _ in PAIRS]
    masks = masks_of(constraints, PAIRS)
    assert masks.words.shape == (len(PAIRS) * 3, 1) and not masks.failed
    for pair, words in zip(PAIRS.tolist(), masks.words.reshape(-1, 3).tolist(), strict=True):
        for place in range(3):
            before = tuple(pair[:place])
            if all(token in may_follow(before[:first]) for first, token in enumerate(before)):
                assert tokens_of(words[place]) == may_follow(before)
            else:
                assert words[place] == -1  # what is drawn there is thrown away
    again = masks_of(constraints, PAIRS[::-1])  # nothing was taken in
    assert (again.words.reshape(-1, 3)[::-1] == masks.words.reshape(-1, 3)).all()


def test_rows_without_a_constraint_and_places_without_a_draft_may_have_anything() -> None:
    drafts, counts = np.array([[B, A], [B, A], [B, A]], np.int32), np.array([2, 1, 0], np.int32)
    words = masks_of([None, letters().start(), letters().start()], drafts, counts).words.reshape(3, 3)
    assert (words[0] == -1).all()
    assert [tokens_of(word) for word in words[1, :2]] == [may_follow(()), may_follow((B,))] and words[1, 2] == -1
    assert tokens_of(words[2, 0]) == may_follow(()) and (words[2, 1:] == -1).all()


class Brittle:
    """May be anything, and becomes too complex after the first token, if that is looked at."""

    is_complete = is_final = False
    batch = None

    def accept(self, token_id: int) -> None: ...

    def write_mask(self, mask: np.ndarray) -> None:
        raise ConstraintError("too complex")

    def forced_run(self, most: int) -> tuple[int, ...]:
        return ()

    def look_ahead(self, drafts: Tokens[int], masks: np.ndarray) -> list[bool]:
        raise AssertionError("there is no next token")


def test_a_row_that_fails_has_no_masks_for_its_drafts() -> None:
    constraints: list[TokenConstraint | None] = [Brittle(), letters().start()]
    masks = masks_of(constraints, np.array([[A, B], [A, B]], np.int32))
    assert [(sequence.request.request_id, message) for sequence, message in masks.failed] == [("0", "too complex")]
    assert (masks.words[:3] == -1).all()
    assert [tokens_of(int(word)) for word in masks.words[3:, 0]] == [
        may_follow(before) for before in ((), (A,), (A, B))
    ]


class Drawn(NamedTuple):
    tokens: np.ndarray  # [draws, NUM_DRAFTS + 1]
    counts: np.ndarray  # [draws]


def draw(*, seeded: bool, penalties: tuple[float, float, float], temperature: float, top_p: float) -> Drawn:
    """Drafts that know of no grammar, verified under its masks."""
    rng = np.random.default_rng(3)
    log_q = DRAFTER - np.log(np.exp(DRAFTER).sum(axis=1, keepdims=True))
    masks = masks_of([letters().start() for _ in PAIRS], PAIRS).words.reshape(-1, 3)
    state = empty_state(Sizes(ROWS, 1, 1, 4), speculates=True)
    assert state.speculation is not None
    state = dataclasses.replace(
        state,
        temperature=jnp.full((ROWS,), temperature, jnp.float32),
        top_p=jnp.full((ROWS,), top_p, jnp.float32),
        processed=jnp.ones((ROWS,), jnp.bool_),
        speculation=dataclasses.replace(state.speculation, seeded=jnp.full((ROWS,), seeded)),
    )
    processors = dataclasses.replace(
        empty_processors(ROWS, VOCAB),
        output_counts=jnp.tile(jnp.asarray(OUTPUT_COUNTS), (ROWS, 1)),
        penalties=jnp.tile(jnp.asarray(penalties, jnp.float32), (ROWS, 1)),
    )
    mesh = make_mesh(jax.devices("cpu"), 1)
    programs = SpeculativePrograms(PromptLookup(1, 1), Sizes(ROWS, 1, 1, 4), mesh)
    verify = jax.jit(programs.verify_full(masked=True), compiler_options=OPTIMIZED)
    slots = jnp.arange(ROWS, dtype=jnp.int32)
    packed = []
    for first in range(0, DRAWS, ROWS):
        noise = rng.gumbel(size=(2, ROWS, VOCAB))
        one = (log_q[START] + noise[0]).argmax(axis=1)
        two = (log_q[one] + noise[1]).argmax(axis=1)
        drafts = Drafts(
            token_ids=jnp.asarray(np.stack([one, two], axis=1), jnp.int32),
            counts=jnp.full((ROWS,), NUM_DRAFTS, jnp.int32),
            log_probabilities=jnp.asarray(
                np.stack([np.tile(log_q[START], (ROWS, 1)), log_q[one]], axis=1), jnp.float32
            ),
        )
        logits = np.stack([np.tile(TARGET[START], (ROWS, 1)), TARGET[one], TARGET[two]], axis=1)
        counters = 3 * jnp.arange(first, first + ROWS, dtype=jnp.int32)  # no two draws with the same noise
        _, _, drawn, _ = verify(
            dataclasses.replace(state, output_counts=counters),
            processors,
            jnp.asarray(logits.reshape(-1, VOCAB)),
            slots,
            drafts,
            jnp.asarray(masks[one * VOCAB + two].reshape(-1, 1)),
        )
        packed.append(np.asarray(drawn))
    joined = np.concatenate(packed)
    return Drawn(joined[:, : NUM_DRAFTS + 1], joined[:, NUM_DRAFTS + 1])


@pytest.mark.parametrize(
    ("seeded", "penalties", "params"),
    [
        (False, PENALTIES, {"temperature": 1.3, "top_p": 0.9}),
        pytest.param(False, NO_PENALTIES, {"temperature": 0.7, "top_p": 1.0}, marks=pytest.mark.long),
        pytest.param(True, PENALTIES, {"temperature": 1.3, "top_p": 0.9}, marks=pytest.mark.long),
    ],
)
def test_tokens_under_a_grammar_are_distributed_as_the_masked_model_draws_them(
    seeded: bool, penalties: tuple[float, float, float], params: dict[str, Any]
) -> None:
    drawn = draw(seeded=seeded, penalties=penalties, **params)

    def wanted(before: tuple[int, ...]) -> np.ndarray:
        allowed = np.isin(np.arange(VOCAB), may_follow(before))
        return exact(np.where(allowed, TARGET, -np.inf), list(before), penalties, **params)

    check(drawn.tokens[:, 0], wanted(()))
    num_checked = 0
    for length in (1, 2):
        kept = drawn.tokens[drawn.counts > length]
        texts, counts = np.unique(kept[:, :length], axis=0, return_counts=True)
        for text in texts[counts > 2_000]:  # fewer tell nothing of the rare tokens that follow
            check(kept[(kept[:, :length] == text).all(axis=1), length], wanted(tuple(text.tolist())))
            num_checked += 1
    assert num_checked > 3
