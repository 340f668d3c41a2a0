"""How many prompt tokens a step computes: what the limits, the goal and the compiled sizes leave. Host only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.prefill_sizes import PrefillSizes
from jaxserve.engine.step_pace import StepPace


class PromptPiece(NamedTuple):
    """Prompt tokens that a step would take on if the steps between those with prompts brought drafts.

    Attributes:
        tokens: how many.
        seconds: that they add.
    """

    tokens: int
    seconds: float


@dataclass(frozen=True)
class PrefillBudget:
    """Numbers of prompt tokens beside those who decode.

    Attributes:
        pace: how much a step may take on; None: as much as `limits` allow.
        sizes: which numbers of tokens make a good step; None: any.
    """

    limits: SchedulerLimits
    pace: StepPace | None = None
    sizes: PrefillSizes | None = None

    def most(self, num_decode: int, context: int, *, between_drafts: bool = False) -> int:
        """Tokens at most; 0: none in this step.

        Args:
            context: tokens that come before them in their sequence, which make each of them dearer.
            between_drafts: the steps without prompts bring drafts.
        """
        most = self.limits.max_num_batched_tokens - num_decode
        if self.pace is None:
            return most
        return min(most, self.pace.prefill_budget(num_decode, context, between_drafts=between_drafts))

    def fitting(self, most: int, num_decode: int, waiting: int, *, between_drafts: bool = False) -> int:
        """Tokens that make a good step, of those that are allowed and of those that wait to be computed."""
        if self.sizes is None or not num_decode:
            return most
        slots = self.limits.max_num_seqs
        return self.sizes.choose(min(most, waiting), num_decode, slots, between_drafts=between_drafts)

    def piece_between_drafts(self, num_decode: int, waiting: int) -> PromptPiece:
        """What a step would take of the tokens that wait."""
        most = min(waiting, self.most(num_decode, 0, between_drafts=True))
        tokens = self.fitting(most, num_decode, waiting, between_drafts=True)
        return PromptPiece(tokens, self.added_seconds(num_decode, tokens))

    def added_seconds(self, num_decode: int, tokens: int) -> float:
        """What so many prompt tokens add to a step, as far as is known: else 0."""
        return 0.0 if self.pace is None else self.pace.added_seconds(num_decode, tokens)
