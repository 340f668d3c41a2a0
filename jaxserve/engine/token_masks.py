"""Masks of the tokens that may come next, for the rows of a step that have a constraint.

A step's forward pass does not depend on the tokens that may follow, and so it is launched first. While the device runs it,
the host takes in the tokens of the step before and writes the masks; then sampling is launched with them, and only then
the host looks for runs of forced tokens. Batches without a constraint never take that way.

A row with drafts has a mask for each of its positions: after its last token, and after each draft as if that and those
before it were kept. A draft that its mask does not hold has no probability, so that it is refused, and what comes after it
does not matter.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxserve.constraint import ConstraintError, MaskBatch, TokenConstraint
from jaxserve.engine.forced_tokens import forced_tokens
from jaxserve.engine.schedule import DraftedTokens, ScheduledBatch
from jaxserve.engine.sequence import Sequence, SequenceStatus

MASK_BITS = 32  # tokens in one word of a mask
_MAX_THREADS = 16
_MASKS_PER_THREAD = 4  # fewer are not worth waking a thread for
_FIRST_WORDS = 256


class _Row(NamedTuple):  # quicker to make than a dataclass: there are some in every step
    """A constrained row: its drafts, and where its masks begin among those of the step."""

    sequence: Sequence
    constraint: TokenConstraint
    drafts: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class StepMasks:
    """The masks of one step, and who could not get any.

    Attributes:
        words: [rows of the batch, words] int32: decode rows, then prefill chunks; in a step with drafts
            [decode rows * (num_drafts + 1), words]: those of one row after the other's. Bit b of word w stands for token
            32 w + b; rows without a constraint have every bit set. Whoever wrote them does so again for the next step.
        failed: sequences whose constraint failed, with what to tell the client.
        single: rows that a single token may follow, and no end.
    """

    words: np.ndarray
    failed: tuple[tuple[Sequence, str], ...] = ()
    single: tuple[_Row, ...] = ()


def is_constrained(batch: ScheduledBatch) -> bool:
    """Whether sampling must wait for masks."""
    return any(row.sequence.constraint is not None for row in batch.decode) or any(
        chunk.samples and chunk.sequence.constraint is not None for chunk in batch.prefill
    )


def num_words(vocab_size: int) -> int:
    """Words of one row's mask. There is a bit more than tokens: for the end of text, if a library wants one."""
    return vocab_size // MASK_BITS + 1


class MaskWriter:
    """Writes the masks of a step, in threads where there are many of them."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = num_words(vocab_size)
        self._num_threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) - 1))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="jaxserve-masks")
        self._buffer = np.empty((0, self._num_words), np.int32)  # new pages for it would cost as much as writing them

    def write(self, batch: ScheduledBatch, drafted: DraftedTokens | None = None) -> StepMasks:
        """The masks of a step, when the tokens of the step before it are known.

        Args:
            drafted: what the step brings to be verified; None: it has no drafts.
        """
        sequences = [row.sequence for row in batch.decode] + [chunk.sequence for chunk in batch.prefill]
        positions = batch.num_drafts + 1
        words = self._room(len(sequences) * positions)
        samples = [True] * len(batch.decode) + [chunk.samples for chunk in batch.prefill]
        rows = [
            _Row(
                sequence,
                sequence.constraint,
                () if drafted is None else drafted.of_row(row),
                row * positions,
            )
            for row, sequence in enumerate(sequences)
            if sequence.constraint is not None
            and samples[row]
            and sequence.status is not SequenceStatus.FINISHED  # what was launched past its end is thrown away
        ]
        if len(rows) < len(words):
            words.fill(-1)
        for row in rows:
            row.sequence.forced_tokens = ()
        failed, single = self._write_next(rows, words)
        if positions > 1:
            ahead = [row for row in rows if row.drafts and row.first not in failed]
            self._in_threads(lambda row: _write_ahead(row, words), ahead, positions - 1)
        return StepMasks(
            words, tuple((row.sequence, failed[row.first]) for row in rows if row.first in failed), tuple(single)
        )

    def _room(self, num_rows: int) -> np.ndarray:
        """So many rows of the buffer, in which anything may stand."""
        if num_rows > len(self._buffer):
            self._buffer = np.empty((num_rows, self._num_words), np.int32)
        return self._buffer[:num_rows]

    def find_forced(self, masks: StepMasks) -> None:
        """Finds out which runs of tokens are forced from here on: `Sequence.forced_tokens`. Before the next step."""
        self._in_threads(_find_forced, masks.single, 1)

    def _write_next(self, rows: list[_Row], words: np.ndarray) -> tuple[dict[int, str], list[_Row]]:
        """The masks of all rows' next tokens.

        Returns:
            By where its masks lie, why a row can't get any; and the rows that a single token may follow, and no end.
        """
        batches: dict[MaskBatch, list[_Row]] = defaultdict(list)
        alone: list[_Row] = []
        for row in rows:
            batch = row.constraint.batch
            (alone if batch is None else batches[batch]).append(row)
        failed: dict[int, str] = {}
        for batch, together in batches.items():
            errors = batch.write([row.constraint for row in together], words, [row.first for row in together])
            failed |= {together[place].first: error for place, error in errors.items()}
        self._in_threads(lambda row: _write_alone(row, words[row.first], failed), alone, 1)
        single: list[_Row] = []
        # Most rows may be followed by many tokens, and the first words tell.
        filled = np.count_nonzero(words[[row.first for row in rows], :_FIRST_WORDS], axis=1).tolist()
        for row, num_filled in zip(rows, filled, strict=True):
            if row.first in failed:
                continue
            if row.constraint.is_complete:
                allow(words[row.first], row.sequence.stop_token_ids)
            elif num_filled <= 1:
                mask = words[row.first]
                num_filled = np.count_nonzero(mask)
                if not num_filled:
                    failed[row.first] = "no token may follow, and the output is not complete"
                elif num_filled == 1 and _has_one_bit(int(mask.view(np.uint32).max())):
                    single.append(row)
        for first in failed:
            words[first] = -1  # what is drawn is thrown away
        return failed, single

    def _in_threads(self, function: Callable[[_Row], None], rows: SequenceOf[_Row], num_masks: int) -> None:
        """Calls it for each row, with so many masks to be written for one, in threads where that is worth it."""
        num_parts = min(self._num_threads, -(-len(rows) * num_masks // _MASKS_PER_THREAD), len(rows)) or 1
        others = [self._threads.submit(_call, function, rows[first::num_parts]) for first in range(1, num_parts)]
        _call(function, rows[::num_parts])
        for other in others:
            other.result()

    def close(self) -> None:
        self._threads.shutdown(wait=False)


def _call(function: Callable[[_Row], None], rows: SequenceOf[_Row]) -> None:
    for row in rows:
        function(row)


def _write_alone(row: _Row, mask: np.ndarray, failed: dict[int, str]) -> None:
    mask[:] = 0
    try:
        row.constraint.write_mask(mask)
    except ConstraintError as raised:
        failed[row.first] = str(raised)


def _has_one_bit(word: int) -> bool:
    return word & (word - 1) == 0


def _find_forced(row: _Row) -> None:
    row.sequence.forced_tokens = forced_tokens(row.sequence, row.constraint)


def _write_ahead(row: _Row, words: np.ndarray) -> None:
    """The masks after a row's drafts, as far as they may be kept."""
    masks = np.zeros((len(row.drafts), words.shape[1]), np.int32)
    for place, can_end in enumerate(row.constraint.look_ahead(row.drafts, masks)):
        if can_end:
            allow(masks[place], row.sequence.stop_token_ids)
        if masks[place].any():  # else nothing may follow, which is told when the output comes there
            words[row.first + place + 1] = masks[place]


def allow(mask: np.ndarray, token_ids: Collection[int]) -> None:
    """Sets the bits of some tokens."""
    if token_ids:
        ids = np.fromiter(token_ids, np.int64, len(token_ids))
        bits = np.left_shift(np.uint32(1), (ids % MASK_BITS).astype(np.uint32)).view(np.int32)
        np.bitwise_or.at(mask, ids // MASK_BITS, bits)
