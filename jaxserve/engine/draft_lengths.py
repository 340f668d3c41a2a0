"""How many tokens a step drafts: as many as pay, going by what was kept and what steps took. Host only."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.engine.draft_record import DraftRecord
from jaxserve.engine.draft_stats import DraftCounts, SpeculativeStats
from jaxserve.engine.schedule import SampledTokens, ScheduledBatch
from jaxserve.engine.sequence import Sequence, SequenceStatus

_PRIOR_ACCEPTANCE = 0.6  # before anything was seen
_MEMORY = 0.95  # of what is known of a sequence's drafts, that a step later still counts
_COMMON_MEMORY = 0.98  # of all sequences' drafts, with each that brings some
_FEW = 3  # steps of a kind that show what it takes
_OUTLIER = 2.0  # a step that takes this many times as long as usual counts as this long
_PROBE_COST = 0.01  # of all time, that is spent on seeing whether drafts would pay by now
_LEAST_CHANCE = 0.05  # of being right, below which a row's drafts practically never are: it brings none
_LOOK_AGAIN = 32  # tokens after which a row that brings no drafts is allowed some, to see whether they would be right
_SHOWING_SHARE = 0.05  # of a step without drafts, that showing it to a head takes until that is known
_LEAST_GAIN = 1.02  # of the throughput without drafts: they must be worth more than how well it is known


class Trial(NamedTuple):
    """Rows that cannot draft in a step as it is, but that could be made to, to see what drafts bring.

    Attributes:
        seconds: that it takes.
    """

    sequences: tuple[Sequence, ...] = ()
    seconds: float = 0.0


@dataclass
class StepTime:
    """Mean seconds of one kind of step, the latest counting most.

    Attributes:
        count: of steps that were seen.
    """

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
    and without them took at that number of rows. A step is padded to as many for all rows, whatever each of them brings, so
    that a row saves nothing by bringing fewer: it brings all, or none where its own drafts practically never hold. Where
    drafts do not pay, one step in many brings some nevertheless, so that a change is noticed; how many depends on what that
    costs.

    Args:
        lengths: numbers of drafts that are compiled, ascending.
        max_rows: rows of a step with drafts at most.
        adaptive: False: every step drafts as many tokens as it can.
        reads_states: the drafter is a head, which is shown steps without drafts too.
    """

    def __init__(
        self,
        method: str,
        lengths: tuple[int, ...],
        max_rows: int,
        *,
        adaptive: bool = True,
        reads_states: bool = False,
    ) -> None:
        self.reads_states = reads_states
        self._lengths = lengths
        self._max_rows = max_rows
        self._adaptive = adaptive
        self._common = DraftRecord()
        # By `size_class` of the number of rows, drafts, and whether a head was shown the step.
        self._times: dict[tuple[int, int, bool], StepTime] = {}
        self._plain_steps = 0  # since the last one with drafts
        self.counts = DraftCounts(method, lengths[-1])

    @property
    def stats(self) -> SpeculativeStats:
        return self.counts.stats

    @property
    def is_adaptive(self) -> bool:
        return self._adaptive

    def may_draft(self, num_rows: int) -> bool:
        """Whether a step of so many rows can bring drafts at all."""
        return num_rows <= self._max_rows

    def choose(self, ready: Rows[Sequence], others: int = 0, trial: Trial | None = None) -> int:
        """Drafts that the next step's rows may bring: one of the compiled numbers, or 0.

        Args:
            ready: sequences that can bring drafts.
            others: rows of the step that cannot.
            trial: of the others, those that could be made to. If none is ready and the choice is not 0, they are wanted.
        """
        num_rows = len(ready) + others
        if not self.may_draft(num_rows):
            return 0
        if not self._adaptive:
            return self._lengths[-1] if ready else 0
        length = self._best(ready, num_rows, trial or Trial())
        self._plain_steps = 0 if length else self._plain_steps + 1
        return length

    def of_rows(self, drafting: Rows[Sequence], length: int) -> list[int]:
        """How many drafts each of the rows brings to a step for which so many were chosen, its room left aside."""
        counts = self._of_rows(drafting, length)
        for count in counts:
            if not count:  # else those that are drafted for would seem to be right as often as all
                self._common.add(length, 0, _COMMON_MEMORY)
        return counts

    def saving(self, num_rows: int) -> float | None:
        """Seconds that drafts save with each token of so many rows, if all of them bring some; None: it is not known yet.

        It is negative where they do not pay.
        """
        if not self.may_draft(num_rows):
            return -math.inf
        plain, drafting = self._plain_time(num_rows), [self._time(num_rows, length) for length in self._lengths]
        if plain is None or None in drafting:
            return None
        right = self._common.acceptance(_PRIOR_ACCEPTANCE)
        took = zip(self._lengths, drafting, strict=True)
        return plain / _LEAST_GAIN - min(seconds / _tokens(right, length) for length, seconds in took if seconds)

    def showing_share(self, num_rows: int) -> float:
        """What showing a head a step without drafts adds to it, as a share of it."""
        if not self.reads_states:
            return 0.0
        shown, unshown = self._time(num_rows, 0), self._time(num_rows, 0, is_shown=False)
        return _SHOWING_SHARE if shown is None or unshown is None else max(0.0, shown / unshown - 1)

    def observe_step(self, batch: ScheduledBatch, seconds: float) -> None:
        """Takes in what a step took."""
        if not batch.prefill:
            kind = size_class(len(batch.decode)), batch.num_drafts, batch.is_shown
            self._times.setdefault(kind, StepTime()).add(seconds)

    def observe_tokens(self, batch: ScheduledBatch, sampled: SampledTokens) -> None:
        """Learns from what the model kept of a step's drafts."""
        if sampled.num_drafts is None:
            return
        found = zip(batch.decode, sampled.num_drafts.tolist(), sampled.counts.tolist(), strict=True)
        for row, drafted, count in found:
            # Without any, none was wanted; and what is drafted behind the end of an answer tells nothing of others.
            if row.num_drafts and row.sequence.status is not SequenceStatus.FINISHED:
                row.sequence.draft_record.add(drafted, count - 1, _MEMORY)
                self._common.add(drafted, count - 1, _COMMON_MEMORY)

    def expected_tokens(self, sequences: Rows[Sequence], length: int, num_rows: int) -> float:
        """Tokens of a row, on average, where these of the step's sequences bring so many drafts."""
        common = self._common.acceptance(_PRIOR_ACCEPTANCE)
        drafting = sum(
            _tokens(sequence.draft_record.acceptance(common), own)
            for sequence, own in zip(sequences, self._of_rows(sequences, length), strict=True)
        )
        return (drafting + num_rows - len(sequences)) / num_rows

    def _of_rows(self, drafting: Rows[Sequence], length: int) -> list[int]:
        if not self._adaptive:
            return [length] * len(drafting)
        counts = [_own_length(sequence, length) for sequence in drafting]
        # Where all had none, the step would show nothing of what it was chosen for.
        return counts if any(counts) else [length] * len(drafting)

    def _best(self, ready: Rows[Sequence], num_rows: int, trial: Trial) -> int:
        plain = self._plain_time(num_rows)
        if plain is None or not (ready or trial.sequences):
            return 0  # costs nothing, and shows what drafts must beat
        best, best_rate = 0, _LEAST_GAIN / plain
        for length in self._lengths:
            seconds = self._time(num_rows, length)
            if seconds is None:
                return length
            rate = self.expected_tokens(ready, length, num_rows) / seconds
            if rate > best_rate:
                best, best_rate = length, rate
        return best or self._probe(ready, num_rows, plain, trial)

    def _probe(self, ready: Rows[Sequence], num_rows: int, plain: float, trial: Trial) -> int:
        """A length, if it is time to see whether drafts would pay by now; 0: it is not.

        What such a step is expected to lose, in steps without drafts, decides how seldom there is one.
        """
        drafting, more = (ready, 0.0) if ready else trial
        losses = {
            length: ((self._time(num_rows, length) or 0.0) + more) / plain
            - self.expected_tokens(drafting, length, num_rows)
            for length in self._lengths
        }
        length = min(losses, key=lambda length: losses[length])
        return length if self._plain_steps >= math.ceil(losses[length] / _PROBE_COST) else 0

    def _plain_time(self, num_rows: int) -> float | None:
        """Seconds of a step without drafts as it would be without a drafter; None: too few were seen."""
        unshown = self._time(num_rows, 0, is_shown=False)
        if unshown is not None:
            return unshown
        shown = self._time(num_rows, 0)
        return None if shown is None else shown / (1 + self.showing_share(num_rows))

    def _time(self, num_rows: int, num_drafts: int, *, is_shown: bool = True) -> float | None:
        """Seconds of a step that only decodes; None: too few were seen."""
        known = self._times.get((size_class(num_rows), num_drafts, is_shown))
        return None if known is None or known.count < _FEW else known.seconds


def size_class(num_rows: int) -> int:
    """The same for numbers of rows up to a power of two, as they are padded: 1, 2, 3 to 4, 5 to 8, ..."""
    return (num_rows - 1).bit_length()


def _own_length(sequence: Sequence, length: int) -> int:
    """Drafts that a row brings to a step of so many: all, or none where its own ones of late practically never held."""
    if sequence.num_output_launched - sequence.drafted_at >= _LOOK_AGAIN:
        return length
    return length if sequence.draft_record.found_acceptance() >= _LEAST_CHANCE else 0


def _tokens(right: float, length: int) -> float:
    """Tokens that a row with so many drafts is expected to give, each of which is right with this probability."""
    return sum(right**position for position in range(length + 1))
