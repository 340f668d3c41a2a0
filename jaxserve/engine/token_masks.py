"""Masks of the tokens that may come next, for the rows of a step that have a constraint.

A step's forward pass does not depend on the tokens that may follow, and so it is launched first. While the device runs it,
the host takes in the tokens of the step before and writes the masks; then sampling is launched with them. Batches without
a constraint never take that way.

A row with drafts has a mask for each of its positions: after its last token, and after each draft as if that and those
before it were kept. A draft that its mask does not hold has no probability, so that it is refused, and what comes after it
does not matter.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from jaxserve.constraint import ConstraintError, TokenConstraint
from jaxserve.engine.forced_tokens import forced_tokens
from jaxserve.engine.schedule import DraftedTokens, ScheduledBatch
from jaxserve.engine.sequence import Sequence, SequenceStatus

MASK_BITS = 32  # tokens in one word of a mask
_MAX_THREADS = 16
_MASKS_PER_THREAD = 4  # fewer are not worth waking a thread for


@dataclass(frozen=True)
class StepMasks:
    """The masks of one step, and who could not get any.

    Attributes:
        words: [rows of the batch, words] int32: decode rows, then prefill chunks; in a step with drafts
            [decode rows * (num_drafts + 1), words]: those of one row after the other's. Bit b of word w stands for token
            32 w + b; rows without a constraint have every bit set.
        failed: sequences whose constraint failed, with what to tell the client.
    """

    words: np.ndarray
    failed: tuple[tuple[Sequence, str], ...] = ()


@dataclass(frozen=True)
class _Row:
    """A constrained row: its drafts, and where its masks go: [positions, words], all bits set."""

    sequence: Sequence
    constraint: TokenConstraint
    drafts: tuple[int, ...]
    words: np.ndarray


def is_constrained(batch: ScheduledBatch) -> bool:
    """Whether sampling must wait for masks."""
    return any(row.sequence.constraint is not None for row in batch.decode) or any(
        chunk.samples and chunk.sequence.constraint is not None for chunk in batch.prefill
    )


def num_words(vocab_size: int) -> int:
    """Words of one row's mask."""
    return -(-vocab_size // MASK_BITS)


class MaskWriter:
    """Writes the masks of a step, in threads where there are many of them."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = num_words(vocab_size)
        self._num_threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) - 1))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="jaxserve-masks")

    def write(self, batch: ScheduledBatch, drafted: DraftedTokens | None = None) -> StepMasks:
        """The masks of a step, when the tokens of the step before it are known.

        Args:
            drafted: what the step brings to be verified; None: it has no drafts.
        """
        sequences = [row.sequence for row in batch.decode] + [chunk.sequence for chunk in batch.prefill]
        words = np.full((len(sequences), batch.num_drafts + 1, self._num_words), -1, np.int32)
        samples = [True] * len(batch.decode) + [chunk.samples for chunk in batch.prefill]
        rows = [
            _Row(sequence, sequence.constraint, () if drafted is None else drafted.of_row(row), words[row])
            for row, sequence in enumerate(sequences)
            if sequence.constraint is not None
            and samples[row]
            and sequence.status is not SequenceStatus.FINISHED  # what was launched past its end is thrown away
        ]
        num_masks = len(rows) * (batch.num_drafts + 1)
        num_parts = min(self._num_threads, -(-num_masks // _MASKS_PER_THREAD), len(rows)) or 1
        parts = [rows[first::num_parts] for first in range(num_parts)]
        others = [self._threads.submit(_write_rows, part) for part in parts[1:]]
        failed = _write_rows(parts[0])
        for other in others:
            failed += other.result()
        return StepMasks(words.reshape(-1, self._num_words), tuple(failed))

    def close(self) -> None:
        self._threads.shutdown(wait=False)


def _write_rows(rows: list[_Row]) -> list[tuple[Sequence, str]]:
    """The masks of some rows; of those that cannot get any, why."""
    failed: list[tuple[Sequence, str]] = []
    for row in rows:
        try:
            error = None if _write_next(row) else "no token may follow, and the output is not complete"
        except ConstraintError as raised:
            error = str(raised)
        if error is not None:
            failed.append((row.sequence, error))
            row.words[0] = -1  # what is drawn is thrown away
        elif row.drafts:
            _write_ahead(row)
    return failed


def _write_next(row: _Row) -> bool:
    """The mask of a row's next token; whether there is any."""
    sequence, mask = row.sequence, row.words[0]
    mask[:] = 0
    sequence.forced_tokens = ()
    row.constraint.write_mask(mask)
    if row.constraint.is_complete:
        allow(mask, sequence.stop_token_ids)
    else:
        sequence.forced_tokens = forced_tokens(sequence, row.constraint)
    return bool(mask.any())


def _write_ahead(row: _Row) -> None:
    """The masks after a row's drafts, as far as they may be kept."""
    masks = np.zeros((len(row.drafts), row.words.shape[1]), np.int32)
    for place, can_end in enumerate(row.constraint.look_ahead(row.drafts, masks)):
        if can_end:
            allow(masks[place], row.sequence.stop_token_ids)
        if masks[place].any():  # else nothing may follow, which is told when the output comes there
            row.words[place + 1] = masks[place]


def allow(mask: np.ndarray, token_ids: Collection[int]) -> None:
    """Sets the bits of some tokens."""
    if token_ids:
        ids = np.fromiter(token_ids, np.int64, len(token_ids))
        bits = np.left_shift(np.uint32(1), (ids % MASK_BITS).astype(np.uint32)).view(np.int32)
        np.bitwise_or.at(mask, ids // MASK_BITS, bits)
