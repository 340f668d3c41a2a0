"""How much prefill a step may take on beside those who decode, from what steps were seen to take. Host only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from jaxserve.engine.schedule import ScheduledBatch

_MARGIN = 0.9  # of the time that the goal leaves: steps vary
_OUTLIER = 3.0  # a step that takes this many times as long as usual counts as this long


class StepPace:
    """Learns what steps take, and chooses how many prompt tokens keep the next one within a goal.

    A step that only decodes is known by its number of rows, in powers of two; what a prefill adds to it by its padded size,
    for all tokens of a size cost the same. Both are running means, so that they follow contexts as they grow.

    Args:
        prefill_sizes: padded numbers of prompt tokens that are compiled, ascending.
        goal: seconds that a step should take at most while somebody decodes; None: `factor` times a step that only decodes.
        context_tokens: tokens of context at which a prompt token costs twice as much as without any, for it attends to all.

    Whoever decodes alone is never slowed, and a prompt always goes on: by the smallest size where none keeps to the goal.
    """

    def __init__(
        self,
        prefill_sizes: Iterable[int],
        *,
        goal: float | None = None,
        factor: float = 2.0,
        context_tokens: float = 16384.0,
    ) -> None:
        self._sizes = tuple(prefill_sizes)
        self._goal = goal
        self._factor = factor
        self._context_tokens = context_tokens
        self._num_steps = 0
        self._decode: dict[int, _RunningMean] = {}  # by the bit length of the number of rows
        self._added = {size: _RunningMean(0.2) for size in self._sizes}

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        """Takes in what a step took."""
        self._num_steps += 1
        if not batch.prefill:
            self._decode.setdefault(len(batch.decode).bit_length(), _RunningMean(0.05)).add(seconds, self._num_steps)
            return
        tokens = context = 0
        for chunk in batch.prefill:
            tokens += len(chunk.token_ids)
            context += len(chunk.token_ids) * chunk.start
        added = max(0.0, seconds - (self.decode_seconds(len(batch.decode)) or 0.0))
        self._added[self._size(tokens)].add(added / self._attention_factor(context / tokens), self._num_steps)

    def decode_seconds(self, rows: int) -> float | None:
        """What a step takes that only decodes this many rows; None: no such step was seen, nor one with other rows."""
        if not self._decode:
            return None
        wanted = rows.bit_length()
        nearest = min(self._decode, key=lambda bits: (abs(bits - wanted), bits))
        return self._decode[nearest].value

    def prefill_budget(self, num_decode: int, context: int) -> int:
        """Prompt tokens that the next step may compute.

        Args:
            num_decode: rows that decode in it.
            context: tokens that come before those prompt tokens in their sequence.
        """
        if not num_decode:
            return self._sizes[-1]
        decode = self.decode_seconds(num_decode)
        if decode is None and self._goal is None:
            return self._sizes[-1]  # nothing to hold a goal against yet
        decode = decode or 0.0
        goal = self._factor * decode if self._goal is None else self._goal
        room = (goal - decode) * _MARGIN / self._attention_factor(context)
        best = self._sizes[0]
        for size, seconds in self._estimates():
            if seconds > room:
                break
            best = size
        return best

    def _estimates(self) -> Iterable[tuple[int, float]]:
        """Each size from the smallest with what it adds to a step, as far as anything is known."""
        smaller: list[tuple[int, float]] = []
        newest = 0
        for position, size in enumerate(self._sizes):
            seen = self._added[size]
            seconds = seen.value
            if not smaller:
                if seconds is None:
                    above = next((other for other in self._sizes[position:] if self._added[other].latest), None)
                    if above is None:
                        return
                    seconds = (self._added[above].value or 0.0) * size / above
            elif seconds is None:
                seconds = _extrapolated(smaller, size)
            elif seen.latest < newest:  # smaller ones were seen since: this one may have been slow that once
                seconds = min(seconds, _extrapolated(smaller, size))
            newest = max(newest, seen.latest)
            smaller.append((size, seconds))
            yield size, seconds

    def _size(self, tokens: int) -> int:
        return self._sizes[min(bisect_left(self._sizes, tokens), len(self._sizes) - 1)]

    def _attention_factor(self, context: float) -> float:
        return 1.0 + context / self._context_tokens


def _extrapolated(smaller: list[tuple[int, float]], size: int) -> float:
    """What a size adds, going by the two sizes before it; by one alone it is in proportion, which is rather too much."""
    (last_size, last) = smaller[-1]
    if len(smaller) == 1:
        return last * size / last_size
    before_size, before = smaller[-2]
    return last + max(0.0, last - before) * (size - last_size) / (last_size - before_size)


class _RunningMean:
    """Mean of the latest values: of all of them at first, then each new one weighs `weight`.

    Attributes:
        latest: number of the latest value, counted over all means; 0: none came.
    """

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._count = 0
        self.value: float | None = None
        self.latest = 0

    def add(self, value: float, number: int) -> None:
        self._count += 1
        self.latest = number
        if self.value is None:
            self.value = value
            return
        if self._count > 3:
            value = min(value, _OUTLIER * self.value)
        self.value += max(self._weight, 1 / self._count) * (value - self.value)
