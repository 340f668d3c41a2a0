"""How many of the waiting prompt tokens make a good step beside those who decode. Host only."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MOST_PADDING = 0.25  # of a padded size

# Tokens of a step from which on computing takes longer than reading the weights, at two operations and two bytes a weight.
# Of an H100: 790 TFLOP/s over 3.09 TB/s. An H200 reads faster: beside 64 sequences 192 tokens of prompts take 1.3 ms more
# than 128, beside 16 256 take 1.8 more than 192.
BALANCED_TOKENS = 256
_BALANCED_H200 = 208


def balanced_tokens(device_kind: str) -> int:
    """As `PrefillSizes` has it, of a GPU."""
    return _BALANCED_H200 if "H200" in device_kind else BALANCED_TOKENS


@dataclass(frozen=True)
class PrefillSizes:
    """What is compiled for prompt tokens, and from how many tokens on a step takes longer with each of them.

    Attributes:
        sizes: padded numbers of prompt tokens, ascending.
        balanced_tokens: up to so many tokens a step takes no longer than reading the weights does; None: no such number.
        one_in: while one in so many slots decodes, steps keep to that number.
    """

    sizes: tuple[int, ...]
    balanced_tokens: int | None = None
    one_in: int = 4

    @classmethod
    def for_goal(cls, sizes: tuple[int, ...], balanced_tokens: int | None, goal: float | None) -> PrefillSizes:
        """For steps with a goal; without a bound (inf) prompts come first as long as they do not stop half of the slots.

        Args:
            goal: seconds, as `StepPace` takes it.
        """
        return cls(sizes, balanced_tokens, one_in=2 if goal == math.inf else 4)

    def choose(self, wanted: int, num_decode: int, max_num_seqs: int, *, between_drafts: bool = False) -> int:
        """Prompt tokens to compute beside `num_decode` decoding rows where `wanted` are waiting and allowed.

        While many slots decode, prompts ride along in the part of a step that costs little, a piece in each step: every
        stream would wait for a larger one, whose tokens cost up to twice as much each. And a step that would be mostly
        padding takes a full smaller size instead.

        Args:
            between_drafts: the steps without prompts bring drafts, which those with some do not: the fewer there are of
                these, the better.
        """
        rides_along = self.one_in * num_decode >= max_num_seqs and not between_drafts
        if self.balanced_tokens is not None and rides_along:
            room = self.balanced_tokens - num_decode
            wanted = min(wanted, max((size for size in self.sizes if size <= room), default=self.sizes[0]))
        full = max((size for size in self.sizes if size <= wanted), default=None)
        padded = min((size for size in self.sizes if size >= wanted), default=None)
        if full is not None and (padded is None or padded - wanted > _MOST_PADDING * padded):
            return full
        return wanted
