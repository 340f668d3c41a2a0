"""How many prompt tokens a step computes: what the limits, the goal and the compiled sizes leave. Host only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.prefill_sizes import PrefillSizes
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.step_pace import StepPace


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

    def most(self, num_decode: int, context: int) -> int:
        """Tokens at most; 0: none in this step.

        Args:
            context: tokens that come before them in their sequence, which make each of them dearer.
        """
        most = self.limits.max_num_batched_tokens - num_decode
        return most if self.pace is None else min(most, self.pace.prefill_budget(num_decode, context))

    def fitting(self, most: int, num_decode: int, candidates: Iterable[Sequence]) -> int:
        """Tokens that make a good step, of those that are allowed and that the candidates have left to compute."""
        if self.sizes is None or not num_decode:
            return most
        waiting = sum(len(sequence.token_ids) - sequence.num_computed for sequence in candidates)
        return self.sizes.choose(min(most, waiting), num_decode, self.limits.max_num_seqs)
