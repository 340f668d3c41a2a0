"""What was drafted, and what of it reached an answer: counts by place. Host only."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from jaxserve.wording import plural


@dataclass(frozen=True)
class SpeculativeStats:
    """What was drafted for answers so far, and what of it is part of them.

    A draft behind the end of an answer counts as little as one that was made after it: nobody could have kept it. The end
    is where the engine ends it: a stop string is found outside, and what comes until that aborts the answer counts.

    Attributes:
        method: of drafting.
        num_drafts: rows of steps that brought any drafts.
        drafted_per_position, accepted_per_position: how many first, second, ... drafts there were, and were kept.
    """

    method: str
    num_drafts: int
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.drafted_per_position)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def acceptance(self) -> float | None:
        """Share of the drafts that were kept; None where there were none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def kept(self) -> str:
        """The method with what was kept, in words."""
        if self.acceptance is None:
            return f"drafts ({self.method}): none"
        kept, drafted = self.num_accepted_tokens, self.num_draft_tokens
        return f"drafts ({self.method}): {kept} of {drafted} {plural('token', drafted)} kept ({self.acceptance:.0%})"

    @property
    def kept_by_position(self) -> str:
        """The acceptance at each place that had drafts, in words; empty where there were none."""
        places = enumerate(zip(self.accepted_per_position, self.drafted_per_position, strict=True), 1)
        shares = [f"{place}: {accepted / tried:.0%} of {tried}" for place, (accepted, tried) in places if tried]
        return f"kept by position: {', '.join(shares)}" if shares else ""

    @staticmethod
    def sum(parts: Rows[SpeculativeStats]) -> SpeculativeStats | None:
        """Of several engines with the same configuration; None: of none."""
        if not parts:
            return None
        return SpeculativeStats(
            method=parts[0].method,
            num_drafts=sum(part.num_drafts for part in parts),
            drafted_per_position=_sums([part.drafted_per_position for part in parts]),
            accepted_per_position=_sums([part.accepted_per_position for part in parts]),
        )

    def since(self, before: SpeculativeStats) -> SpeculativeStats:
        """What came after `before`."""
        return SpeculativeStats(
            method=self.method,
            num_drafts=self.num_drafts - before.num_drafts,
            drafted_per_position=_differences(self.drafted_per_position, before.drafted_per_position),
            accepted_per_position=_differences(self.accepted_per_position, before.accepted_per_position),
        )


class DraftCounts:
    """Counts them, row by row."""

    def __init__(self, method: str, longest: int) -> None:
        self._method = method
        self._num_drafts = 0
        self._drafted = [0] * longest
        self._accepted = [0] * longest

    @property
    def stats(self) -> SpeculativeStats:
        return SpeculativeStats(self._method, self._num_drafts, tuple(self._drafted), tuple(self._accepted))

    def add(self, drafted: int, kept: int, taken: int, *, is_end: bool) -> None:
        """Counts the drafts of a row whose tokens an answer took.

        Args:
            kept: drafts that the model kept.
            taken: tokens that became part of the answer: kept drafts first.
            is_end: whether the answer ended with them.
        """
        if is_end:
            drafted = min(drafted, taken)
        self._num_drafts += drafted > 0
        for position in range(drafted):
            self._drafted[position] += 1
        for position in range(min(kept, taken)):
            self._accepted[position] += 1


def _sums(parts: Rows[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(counts) for counts in zip(*parts, strict=True))


def _differences(after: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(now - then for now, then in zip(after, before, strict=True))
