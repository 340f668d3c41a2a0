"""How many tokens a step drafts: as many as pay, going by what was kept and what steps took. Host only."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from jaxserve.engine.draft_record import DraftRecord
from jaxserve.engine.schedule import SampledTokens, ScheduledBatch
from jaxserve.engine.sequence import Sequence

_PRIOR_ACCEPTANCE = 0.6  # before anything was seen
_MEMORY = 0.95  # of what is known of a sequence's drafts, that a step later still counts
_COMMON_MEMORY = 0.98  # of all sequences' drafts, with each that brings some
_FEW = 3  # steps of a kind that show what it takes
_OUTLIER = 2.0  # a step that takes this many times as long as usual counts as this long
_PROBE_COST = 0.01  # of all time, that is spent on seeing whether drafts would pay by now
_MOST_ROUNDS = 1000  # steps between two probes at most
_LEAST_GAIN = 1.02  # of the throughput without drafts: they must be worth more than how well it is known


@dataclass(frozen=True)
class SpeculativeStats:
    """What was drafted so far, and what the model kept of it.

    Attributes:
        method: of drafting.
        num_drafts: rows of steps that brought any drafts.
        accepted_per_position: how many first, second, ... drafts were kept.
    """

    method: str
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]

    @staticmethod
    def sum(parts: Rows[SpeculativeStats]) -> SpeculativeStats | None:
        """Of several engines with the same configuration; None: of none."""
        if not parts:
            return None
        return SpeculativeStats(
            method=parts[0].method,
            num_drafts=sum(part.num_drafts for part in parts),
            num_draft_tokens=sum(part.num_draft_tokens for part in parts),
            num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
            accepted_per_position=tuple(
                sum(kept) for kept in zip(*(part.accepted_per_position for part in parts), strict=True)
            ),
        )


@dataclass
class _StepTime:
    """Mean seconds of one kind of step, the latest counting most."""

    seconds: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count > _FEW:
            seconds = min(seconds, _OUTLIER * self.seconds)
        self.seconds += max(0.05, 1 / self.count) * (seconds - self.seconds)


class DraftLengths:
    """Chooses the number of drafts of each step: the one that is expected to give most tokens a second, or none.

    What drafts bring follows from how often each sequence's were right lately, and what they cost from how long steps with
    and without them took at that number of rows. All rows of a step may bring as many: the step is padded to that in any
    case. Where drafts do not pay, one step in many brings some nevertheless, so that a change is noticed; how many depends
    on what that costs.

    Args:
        lengths: numbers of drafts that are compiled, ascending.
        max_rows: rows of a step with drafts at most.
        adaptive: False: every step drafts as many tokens as it can.
    """

    def __init__(self, method: str, lengths: tuple[int, ...], max_rows: int, *, adaptive: bool = True) -> None:
        self._method = method
        self._lengths = lengths
        self._max_rows = max_rows
        self._adaptive = adaptive
        self._common = DraftRecord()
        self._times: dict[tuple[int, int], _StepTime] = {}  # by the bit length of the number of rows, and drafts
        self._plain_steps = 0  # since the last one with drafts
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted = [0] * lengths[-1]

    @property
    def stats(self) -> SpeculativeStats:
        accepted = tuple(self._accepted)
        return SpeculativeStats(self._method, self._num_drafts, self._num_draft_tokens, sum(accepted), accepted)

    def choose(self, sequences: Rows[Sequence]) -> int:
        """Drafts that the next step's rows may bring: one of the compiled numbers, or 0."""
        if len(sequences) > self._max_rows:
            return 0
        if not self._adaptive:
            return self._lengths[-1]
        length = self._best(sequences)
        self._plain_steps = 0 if length else self._plain_steps + 1
        return length

    def observe_step(self, batch: ScheduledBatch, seconds: float) -> None:
        """Takes in what a step took."""
        if not batch.prefill:
            self._times.setdefault((len(batch.decode).bit_length(), batch.num_drafts), _StepTime()).add(seconds)

    def observe_tokens(self, batch: ScheduledBatch, sampled: SampledTokens) -> None:
        """Takes in what the model kept of a step's drafts."""
        if sampled.num_drafts is None:
            return
        found = zip(batch.decode, sampled.num_drafts.tolist(), sampled.counts.tolist(), strict=True)
        for row, drafted, count in found:
            if drafted:
                self._num_drafts += 1
                self._num_draft_tokens += drafted
                for position in range(count - 1):
                    self._accepted[position] += 1
            if row.num_drafts:  # else none was wanted
                row.sequence.draft_record.add(drafted, count - 1, _MEMORY)
                self._common.add(drafted, count - 1, _COMMON_MEMORY)

    def _best(self, sequences: Rows[Sequence]) -> int:
        bits = len(sequences).bit_length()
        plain = self._times.get((bits, 0))
        if plain is None or plain.count < _FEW:
            return 0  # costs nothing, and shows what drafts must beat
        best, best_rate = 0, _LEAST_GAIN / plain.seconds
        for length in self._lengths:
            known = self._times.get((bits, length))
            if known is None or known.count < _FEW:
                return length
            rate = self._expected_tokens(sequences, length) / known.seconds
            if rate > best_rate:
                best, best_rate = length, rate
        return best or self._probe(sequences, bits, plain.seconds)

    def _expected_tokens(self, sequences: Rows[Sequence], length: int) -> float:
        """Tokens that a step with so many drafts gives a sequence, on average."""
        common = self._common.acceptance(_PRIOR_ACCEPTANCE)
        total = 0.0
        for sequence in sequences:
            right = sequence.draft_record.acceptance(common)
            total += sum(right**position for position in range(length + 1))
        return total / len(sequences)

    def _probe(self, sequences: Rows[Sequence], bits: int, plain: float) -> int:
        """A length, if it is time to see whether drafts would pay by now; 0: it is not.

        What such a step is expected to lose, in steps without drafts, decides how seldom there is one.
        """
        losses = {
            length: self._times[bits, length].seconds / plain - self._expected_tokens(sequences, length)
            for length in self._lengths
        }
        length = min(losses, key=lambda length: losses[length])
        rounds = min(_MOST_ROUNDS, math.ceil(losses[length] / _PROBE_COST))
        return length if self._plain_steps >= rounds else 0
