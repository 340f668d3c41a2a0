"""Masks of the tokens that may come next, for the rows of a step that have a constraint.

A step's forward pass does not depend on the tokens that may follow, and so it is launched first. While the device runs it,
the host takes in the tokens of the step before and writes the masks; then sampling is launched with them. Batches without
a constraint never take that way.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from jaxserve.constraint import ConstraintError
from jaxserve.engine.forced_tokens import forced_tokens
from jaxserve.engine.schedule import ScheduledBatch
from jaxserve.engine.sequence import Sequence, SequenceStatus

MASK_BITS = 32  # tokens in one word of a mask
_MAX_THREADS = 16
_ROWS_PER_THREAD = 4  # fewer are not worth waking a thread for


@dataclass(frozen=True)
class StepMasks:
    """The masks of one step, and who could not get any.

    Attributes:
        words: [rows of the batch, words] int32: decode rows, then prefill chunks. Bit b of word w stands for token
            32 w + b; rows without a constraint have every bit set.
        failed: sequences whose constraint failed, with what to tell the client.
    """

    words: np.ndarray
    failed: tuple[tuple[Sequence, str], ...] = ()


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

    def write(self, batch: ScheduledBatch) -> StepMasks:
        """The masks of a step, when the tokens of the step before it are known."""
        rows = [row.sequence for row in batch.decode] + [chunk.sequence for chunk in batch.prefill]
        words = np.full((len(rows), self._num_words), -1, np.int32)
        samples = [True] * len(batch.decode) + [chunk.samples for chunk in batch.prefill]
        constrained = [
            (row, sequence)
            for row, sequence in enumerate(rows)
            if sequence.constraint is not None
            and samples[row]
            and sequence.status is not SequenceStatus.FINISHED  # what was launched past its end is thrown away
        ]
        num_parts = min(self._num_threads, -(-len(constrained) // _ROWS_PER_THREAD)) or 1
        parts = [constrained[first::num_parts] for first in range(num_parts)]
        others = [self._threads.submit(_write_rows, part, words) for part in parts[1:]]
        failed = _write_rows(parts[0], words)
        for other in others:
            failed += other.result()
        return StepMasks(words, tuple(failed))

    def close(self) -> None:
        self._threads.shutdown(wait=False)


def _write_rows(rows: list[tuple[int, Sequence]], words: np.ndarray) -> list[tuple[Sequence, str]]:
    failed: list[tuple[Sequence, str]] = []
    for row, sequence in rows:
        constraint = sequence.constraint
        if constraint is None:
            continue
        words[row] = 0
        sequence.forced_tokens = ()
        try:
            constraint.write_mask(words[row])
            if constraint.is_complete:
                allow(words[row], sequence.stop_token_ids)
            else:
                sequence.forced_tokens = forced_tokens(sequence, constraint)
        except ConstraintError as error:
            failed.append((sequence, str(error)))
        if not words[row].any():
            if not failed or failed[-1][0] is not sequence:
                failed.append((sequence, "no token may follow, and the output is not complete"))
            words[row] = -1  # what is drawn is thrown away
    return failed


def allow(mask: np.ndarray, token_ids: Collection[int]) -> None:
    """Sets the bits of some tokens."""
    if token_ids:
        ids = np.fromiter(token_ids, np.int64, len(token_ids))
        bits = np.left_shift(np.uint32(1), (ids % MASK_BITS).astype(np.uint32)).view(np.int32)
        np.bitwise_or.at(mask, ids // MASK_BITS, bits)
