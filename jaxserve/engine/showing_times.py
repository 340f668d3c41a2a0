"""What it takes to show a drafter tokens of prompts, from what the compiled sizes were measured to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.engine.buckets import Buckets
from jaxserve.engine.device_batch import Bucket


@dataclass(frozen=True)
class ShowingTimes:
    """A `ShowingSeconds`.

    Attributes:
        seconds: by size, as `Buckets.shown_for` has it. In one that is not there each token takes what it takes in the
            smallest; none at all: showing counts for nothing.
    """

    buckets: Buckets
    seconds: Mapping[Bucket, float]

    def __call__(self, num_decode: int, num_tokens: int) -> float:
        """Seconds for so many decode rows, and tokens in chunks."""
        if not self.seconds:
            return 0.0
        bucket = self.buckets.shown_for(self.buckets.for_prompts(num_decode, num_tokens))
        if bucket in self.seconds:
            return self.seconds[bucket]
        smallest = min(self.seconds, key=num_shown)
        return self.seconds[smallest] * num_shown(bucket) / num_shown(smallest)


def num_shown(bucket: Bucket) -> int:
    """Tokens that a drafter takes in with a step of this size, padding included."""
    return 2 * bucket.decode_rows + bucket.prefill_tokens  # of a row the last two
