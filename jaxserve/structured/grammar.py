"""A grammar as a constraint over a model's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import cast

import llguidance
import numpy as np

from jaxserve.constraint import ConstraintError, TokenConstraint
from jaxserve.structured.grammar_source import Grammar
from jaxserve.structured.library_grammar import first_line, library_grammar, make_matcher
from jaxserve.structured.vocabulary import Vocabulary


@dataclass(frozen=True)
class GrammarMasks:
    """Implements `jaxserve.constraint.MaskBatch`: the library's own threads write the masks, which share nothing with
    Python's. Equal for all grammars over one vocabulary.
    """

    vocabulary: Vocabulary

    def write(self, states: Sequence[TokenConstraint], masks: np.ndarray, rows: Sequence[int]) -> dict[int, str]:
        own = cast("Sequence[GrammarState]", states)
        width = self.vocabulary.num_words
        if masks.shape[1] == width and masks.flags.c_contiguous:
            self._write(own, masks, rows)
        else:
            written = np.empty((len(own), width), np.int32)
            self._write(own, written, range(len(own)))
            shared = min(masks.shape[1], width)
            masks[rows, :shared] = written[:, :shared]
            masks[rows, shared:] = 0
        return {place: state._error() for place, state in enumerate(own) if state._matcher.is_error()}

    def _write(self, states: Sequence[GrammarState], masks: np.ndarray, rows: Sequence[int]) -> None:
        """Into masks that are as long as the vocabulary's."""
        asked: list[tuple[llguidance.LLMatcher, int]] = []
        for row, state in zip(rows, states, strict=True):
            if state._run:
                masks[row] = 0
                masks[row, state._run[0] // 32] = _bit_of(state._run[0])
            else:
                asked.append((state._matcher, row))
        if asked:
            self.vocabulary.executor.unsafe_compute_mask_ptr(asked, masks.ctypes.data, 4 * masks.shape[1], len(masks))
        masks[rows, self.vocabulary.end_id // 32] &= ~_bit_of(self.vocabulary.end_id)


class CompiledGrammar:
    """A grammar over one vocabulary; implements `jaxserve.constraint.Constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._masks = GrammarMasks(vocabulary)

    def start(self) -> TokenConstraint:
        return GrammarState(self._matcher.deep_copy(), self._masks)


class GrammarState:
    """How far one output is in its grammar; implements `jaxserve.constraint.TokenConstraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, masks: GrammarMasks) -> None:
        self._matcher = matcher
        self._vocabulary = masks.vocabulary
        self._masks = masks
        self._run: tuple[int, ...] = ()  # the next tokens that are known to be forced

    @property
    def batch(self) -> GrammarMasks:
        return self._masks

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def is_final(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token_id: int) -> None:
        run, self._run = self._run, ()
        if not self._matcher.consume_token(token_id):
            raise ConstraintError(self._error())
        if run[:1] == (token_id,):
            self._run = run[1:]

    def write_mask(self, mask: np.ndarray) -> None:
        words = np.zeros(self._vocabulary.num_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise ConstraintError(self._error())
        words[self._vocabulary.end_id // 32] &= ~_bit_of(self._vocabulary.end_id)
        shared = min(len(mask), len(words))
        mask[:shared] |= words[:shared]

    def forced_run(self, most: int) -> tuple[int, ...]:
        if self._run:
            return self._run[:most]
        if self._matcher.is_accepting():
            return ()
        expected = self._matcher.compute_ff_tokens()[:most]  # quick; what counts is what the masks say one by one
        if len(expected) < 2:
            return tuple(expected)
        words = np.zeros(self._vocabulary.num_words, np.int32)
        run: list[int] = []
        with self._trying(run) as matcher:
            for token in expected:
                matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
                is_only = np.count_nonzero(words) == 1 and words[token // 32] == _bit_of(token)
                if matcher.is_accepting() or not is_only or not matcher.consume_token(token):
                    break
                run.append(token)
        self._run = tuple(run)
        return self._run

    def look_ahead(self, drafts: Sequence[int], masks: np.ndarray) -> list[bool]:
        tokens = list(takewhile(lambda token: 0 <= token < self._vocabulary.end_id, drafts))  # others are none
        tokens = tokens[: self._matcher.validate_tokens(tokens)] if tokens else []
        can_end: list[bool] = []
        taken: list[int] = []
        with self._trying(taken) as matcher:
            for token, mask in zip(tokens, masks, strict=False):
                if not matcher.consume_token(token):
                    break
                taken.append(token)
                if matcher.is_stopped():
                    break
                try:
                    self.write_mask(mask)
                except ConstraintError:
                    break  # it is told when the output comes to that place, if it does
                can_end.append(matcher.is_accepting())
        return can_end

    def _error(self) -> str:
        return f"the output's grammar cannot go on: {first_line(self._matcher.get_error())}"

    @contextmanager
    def _trying(self, taken: list[int]) -> Iterator[llguidance.LLMatcher]:
        """The matcher, to take in tokens that it gives back again: those that `taken` holds at the end.

        It learns from them what a copy would forget. A copy serves where it fails on the way, which is for good.
        """
        before = self._matcher.deep_copy()
        try:
            yield self._matcher
        finally:
            if self._matcher.is_error() or not self._matcher.rollback(len(taken)):
                self._matcher = before


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar:
    """For grammars of one's own: what others wrote may end the process, or take for ever (`GrammarTrials`).

    Raises:
        GrammarError: the grammar is wrong, too large, or asks for what cannot be enforced.
    """
    return compile_source(library_grammar(grammar), vocabulary)


def compile_source(source: str, vocabulary: Vocabulary) -> CompiledGrammar:
    """As `compile_grammar`, from what `library_grammar` has made."""
    return CompiledGrammar(make_matcher(source, vocabulary.tokenizer), vocabulary)


def _bit_of(token_id: int) -> np.int32:
    """In its word of a mask; a Python number would not fit there if it is the last bit."""
    return np.uint32(1 << token_id % 32).view(np.int32)
