"""Masks of one step after another, which are written into the same memory."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from jaxserve.constraint import ConstraintError, TokenConstraint
from jaxserve.engine.request import Request
from jaxserve.engine.schedule import DecodeRow, ScheduledBatch
from jaxserve.engine.sequence import Sequence as EngineSequence
from jaxserve.engine.token_masks import MaskWriter
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.grammar import Grammar, compile_grammar
from tests.structured.grammars import vocabulary_of

LETTERS = string.ascii_letters  # more than one word
END = len(LETTERS) - 1


class Letter:
    """One token may follow, or what may is too much to find; written by itself."""

    is_complete = is_final = False
    batch = None

    def __init__(self, token_id: int | None) -> None:
        self._token_id = token_id

    def accept(self, token_id: int) -> None: ...

    def write_mask(self, mask: np.ndarray) -> None:
        if self._token_id is None:
            raise ConstraintError("too complex")
        mask[self._token_id // 32] |= 1 << self._token_id % 32

    def forced_run(self, most: int) -> tuple[int, ...]:
        return ()

    def look_ahead(self, drafts: Sequence[int], masks: np.ndarray) -> list[bool]:
        return []


def grammar_after(text: str) -> TokenConstraint:
    state = compile_grammar(Grammar("regex", "ab?cdef[gh]*"), vocabulary_of(LETTERS)).start()
    for letter in text:
        state.accept(LETTERS.index(letter))
    return state


def forced_after(text: str) -> TokenConstraint:
    """One that knows what follows before its mask is asked for."""
    state = grammar_after(text)
    assert len(state.forced_run(8)) > 1
    return state


def step_of(constraints: Sequence[TokenConstraint | None]) -> ScheduledBatch:
    rows = []
    for row, constraint in enumerate(constraints):
        request = Request(f"{row}", (1,), SamplingParams(), arrival_time=0.0)
        rows.append(DecodeRow(EngineSequence(request, 0, 0, frozenset({END}), 9, constraint), row, -1, -1))
    return ScheduledBatch(decode=tuple(rows), prefill=())


@pytest.fixture(params=[len(LETTERS), 200], ids=["the grammar's words", "more words"])
def writer(request: pytest.FixtureRequest) -> Iterator[MaskWriter]:
    writer = MaskWriter(request.param)
    yield writer
    writer.close()


def test_nothing_is_left_of_the_step_before(writer: MaskWriter) -> None:
    steps: list[tuple[list[TokenConstraint | None], list[list[int] | None]]] = [  # None: any token
        ([None, None, None], [None, None, None]),
        ([grammar_after("a"), Letter(40), grammar_after("abcdef")], [[1, 2], [40], [6, 7, END]]),
        ([Letter(3), forced_after("ab")], [[3], [2]]),
        ([grammar_after("abcdefg"), None, Letter(None)], [[6, 7, END], None, None]),
        ([forced_after("abc"), grammar_after("")], [[3], [0]]),
    ]
    for _ in range(2):
        for constraints, expected in steps:
            words = writer.write(step_of(constraints)).words
            for mask, tokens in zip(words, expected, strict=True):
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
                assert bits.all() if tokens is None else set(np.nonzero(bits)[0].tolist()) == set(tokens)
