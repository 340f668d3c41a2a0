"""How many tokens a step drafts, and what came of it. Host only."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from jaxserve.engine.schedule import SampledTokens, ScheduledBatch
from jaxserve.engine.sequence import Sequence


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


class DraftLengths:
    """Chooses the number of drafts of each step.

    Args:
        lengths: numbers of drafts that are compiled, ascending.
        max_rows: rows of a step with drafts at most.
    """

    def __init__(self, method: str, lengths: tuple[int, ...], max_rows: int) -> None:
        self._method = method
        self._lengths = lengths
        self._max_rows = max_rows
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted = [0] * lengths[-1]

    @property
    def stats(self) -> SpeculativeStats:
        accepted = tuple(self._accepted)
        return SpeculativeStats(self._method, self._num_drafts, self._num_draft_tokens, sum(accepted), accepted)

    def choose(self, sequences: Rows[Sequence]) -> int:
        """Drafts that the next step's rows may bring: one of the compiled numbers, or 0."""
        return self._lengths[-1] if len(sequences) <= self._max_rows else 0

    def observe_step(self, batch: ScheduledBatch, seconds: float) -> None:
        """Takes in what a step took."""

    def observe_tokens(self, batch: ScheduledBatch, sampled: SampledTokens) -> None:
        """Takes in what the model kept of a step's drafts."""
        if sampled.num_drafts is None:
            return
        for drafted, count in zip(sampled.num_drafts.tolist(), sampled.counts.tolist(), strict=True):
            if drafted:
                self._num_drafts += 1
                self._num_draft_tokens += drafted
                for position in range(count - 1):
                    self._accepted[position] += 1
