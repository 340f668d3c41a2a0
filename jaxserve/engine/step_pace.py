"""How much prefill a step may take on beside those who decode, from what steps were seen to take. Host only."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from jaxserve.engine.schedule import ScheduledBatch

_MARGIN = 0.87  # of the time that the goal leaves: steps vary
_OUTLIER = 3.0  # a step that takes this many times as long as usual counts as this long
LEAST_SHARE = 0.02  # of a step without a prompt that one adds: less was only seen because steps vary
_LEARNING = 0.3  # of what a step took longer or less long than expected
_FEW = 4  # steps of a kind before which one that took long may well be an exception
_ENOUGH, _LATEST = 3, 15  # steps that only decode, by which they are known, and that count
# By which a size gets cheaper with each step that had another one, so that it is tried again some day. Below what it was
# measured to take it does so slowly, for that may be wrong, but if not each trial of a size that takes too long makes
# streams late: one that takes a fifth too long is tried in one step of 900.
_FORGETTING, _FORGETTING_MEASURED = 0.998, 0.9998
# Pairs of a prompt token and one of its context at which what they take and what the rest takes are learned equally fast.
_PAIRS_UNIT = float(1 << 20)
_TELLING = 0.1  # units of pairs in a step that tell what pairs take


class StepPace:
    """Learns what steps take, and chooses how many prompt tokens keep the next one within a goal.

    A step that only decodes is known by its number of rows, in powers of two. What a prefill adds to it has two parts: one
    for its padded size, since all tokens of a size cost the same, and one for each pair of a token and another that it
    attends to. Both are learned by normalised least mean squares.

    Args:
        prefill_sizes: padded numbers of prompt tokens that are compiled, ascending.
        goal: seconds that a step should take at most while somebody decodes; None: `factor` times a step that only decodes.
        context_tokens: first guess of how much context makes a prompt token cost twice as much as without any.
        measured: seconds that a size adds to a step without context, where that was measured: of each number of decode rows
            that is compiled, by size. Fewer rows take what the next larger number does.

    Whoever decodes alone is never slowed, and a prompt always goes on: by the smallest size where none keeps to the goal.
    """

    def __init__(
        self,
        prefill_sizes: Iterable[int],
        *,
        goal: float | None = None,
        factor: float = 2.0,
        context_tokens: float = 16384.0,
        measured: Mapping[int, Mapping[int, float]] | None = None,
    ) -> None:
        self._sizes = tuple(prefill_sizes)
        self._goal = goal
        self._factor = factor
        self._decode: dict[int, _LatestSteps] = {}  # by the bit length of the number of rows
        self._drafting: dict[int, _LatestSteps] = {}  # the same, of steps with drafts
        self._context_tokens = context_tokens
        self._pairs_seconds: float | None = None  # that a unit of pairs adds; None: nothing has told of it
        self._row_counts = sorted(measured or {0: {}})
        self._added: list[dict[int, _SizeCost]] = [
            {
                size: _SizeCost(seconds, _FEW, 0, measured=seconds)
                for size, seconds in (measured or {}).get(rows, {}).items()
            }
            for rows in self._row_counts
        ]
        self._num_prefills = 0

    def observe(self, batch: ScheduledBatch, seconds: float, *, had_more: bool = False) -> None:
        """Takes in what a step took.

        Args:
            had_more: it had more to do than its prompts and those who decode, which other steps will not have: it tells what
                its prompts take at most.
        """
        if not batch.prefill:
            seen = self._drafting if batch.num_drafts else self._decode
            seen.setdefault(len(batch.decode).bit_length(), _LatestSteps()).add(seconds)
            return
        decode = self.decode_seconds(len(batch.decode))
        if decode is None:
            return
        tokens = pairs = 0
        for chunk in batch.prefill:
            tokens += len(chunk.token_ids)
            pairs += len(chunk.token_ids) * (chunk.start + len(chunk.token_ids) // 2)
        self._num_prefills += 1
        least = LEAST_SHARE * decode
        added = max(least, seconds - decode)
        self._learn(len(batch.decode), self._size(tokens), pairs / _PAIRS_UNIT, added, least, is_bound=had_more)

    def decode_seconds(self, rows: int) -> float | None:
        """What a step takes that only decodes this many rows; None: no such step was seen, nor one with other rows."""
        seen = self._decode or self._drafting
        if not seen:
            return None
        wanted = rows.bit_length()
        nearest = min(seen, key=lambda bits: (abs(bits - wanted), bits))
        return seen[nearest].usual

    def prefill_budget(self, num_decode: int, context: int, *, between_drafts: bool = False) -> int:
        """Prompt tokens that the next step may compute: none, if some must show first what only decoding takes.

        Args:
            num_decode: rows that decode in it.
            context: tokens that come before those prompt tokens in their sequence.
            between_drafts: the steps that only decode bring drafts: `factor` counts from what such a step takes.
        """
        if not num_decode:
            return self._sizes[-1]
        bits = num_decode.bit_length()
        # Those with drafts: where every step has some.
        both = self._decode.get(bits), self._drafting.get(bits)
        decode = next((seen.usual for seen in both if seen is not None and seen.is_known), None)
        if decode is None:
            return 0
        drafting = both[1]
        usual = max(decode, drafting.usual) if between_drafts and drafting is not None and drafting.is_known else decode
        room = ((self._factor * usual if self._goal is None else self._goal) - decode) * _MARGIN
        best = self._sizes[0]
        pairs_seconds = self._seconds_of_pairs(num_decode)
        for size, seconds in self._without_context(num_decode):
            if seconds + pairs_seconds * size * (context + size / 2) / _PAIRS_UNIT > room:
                break
            best = size
        return best

    def added_seconds(self, num_decode: int, tokens: int) -> float:
        """What so many prompt tokens without context add to a step, as far as is known: else 0."""
        size = self._size(tokens)
        return next((seconds for known, seconds in self._without_context(num_decode) if known == size), 0.0)

    def _costs(self, num_decode: int) -> dict[int, _SizeCost]:
        """What sizes add beside so many rows."""
        return self._added[min(bisect_left(self._row_counts, num_decode), len(self._row_counts) - 1)]

    def _learn(self, num_decode: int, size: int, pairs: float, seconds: float, least: float, *, is_bound: bool) -> None:
        """Takes in what a prefill added.

        Args:
            pairs: in units.
            least: seconds that a size adds at least.
            is_bound: it may have added less than `seconds`, which are a first guess and else no more than a bound.
        """
        costs = self._costs(num_decode)
        cost = costs.get(size)
        if cost is None:
            if costs:
                seconds -= self._seconds_of_pairs(num_decode) * pairs
            else:
                seconds /= 1 + pairs * _PAIRS_UNIT / (size * self._context_tokens)
            costs[size] = _SizeCost(max(least, seconds), 1, self._num_prefills)
            return
        remembered = self._remembered(cost)
        pairs_seconds = self._seconds_of_pairs(num_decode)
        if is_bound and seconds >= remembered + pairs_seconds * pairs:
            return
        cost.count += 1
        cost.latest = self._num_prefills
        if seconds < remembered + pairs_seconds * pairs:
            cost.seconds = remembered  # what was forgotten of it was wrong
        expected = cost.seconds + pairs_seconds * pairs
        if cost.count >= _FEW:
            seconds = min(seconds, _OUTLIER * expected)
        error = max(_LEARNING, 1 / cost.count) * (seconds - expected) / (1 + pairs * pairs)
        cost.seconds = max(least, cost.seconds + error)
        if pairs >= _TELLING:
            self._pairs_seconds = max(0.0, pairs_seconds + error * pairs)

    def _seconds_of_pairs(self, num_decode: int) -> float:
        """What a unit of pairs adds; until something tells of it, the first guess, by the size whose tokens are cheapest."""
        if self._pairs_seconds is not None:
            return self._pairs_seconds
        token = min((cost.seconds / size for size, cost in self._costs(num_decode).items()), default=0.0)
        return token / self._context_tokens * _PAIRS_UNIT

    def _without_context(self, num_decode: int) -> Iterable[tuple[int, float]]:
        """Each size from the smallest with what it adds to a step by itself, as far as anything is known.

        Beyond the largest size that was seen only the next one is guessed, for small ones tell little of it.
        """
        known = self._known_sizes(self._costs(num_decode))
        least = 0.0
        for size in self._sizes:
            place = bisect_left(known, (size, -1.0))
            if place < len(known):
                above, seconds_above = known[place]
                below, seconds_below = known[place - 1] if place else (0, 0.0)
                seconds = seconds_below + (seconds_above - seconds_below) * (size - below) / (above - below)
            elif known:
                seconds = _extrapolated(known, size)
            else:
                return
            least = max(least, seconds)  # more tokens never take less
            yield size, least
            if place == len(known):
                return

    def _known_sizes(self, costs: Mapping[int, _SizeCost]) -> list[tuple[int, float]]:
        """Sizes that were seen, with what they add. What was seen long ago counts for less.

        So does what stands out, if it was seen only once and the sizes below it are well known: what little is known of
        those may itself be the exception, and streams would wait for large pieces until each has been seen often.
        """
        known: list[tuple[int, float]] = []
        well_known = 0  # sizes in a row, the last ones of `known`
        for size in self._sizes:
            cost = costs.get(size)
            if cost is None:
                continue
            seconds = cost.seconds
            if cost.count == 1 and well_known:
                seconds = min(seconds, _OUTLIER * _extrapolated(known[-well_known:], size))
            well_known = well_known + 1 if cost.count >= _FEW else 0
            known.append((size, self._remembered(cost, seconds)))
        return known

    def _remembered(self, cost: _SizeCost, most: float = math.inf) -> float:
        """What is left of what a size was seen to add."""
        seconds = min(cost.seconds, most)
        age = self._num_prefills - cost.latest
        return max(seconds * _FORGETTING**age, min(seconds, cost.measured) * _FORGETTING_MEASURED**age)

    def _size(self, tokens: int) -> int:
        return self._sizes[min(bisect_left(self._sizes, tokens), len(self._sizes) - 1)]


def _extrapolated(smaller: list[tuple[int, float]], size: int) -> float:
    """What a size adds, going by the two before it; at most, and by one alone, in proportion: it has a fixed part."""
    last_size, last = smaller[-1]
    in_proportion = last * size / last_size
    if len(smaller) == 1:
        return in_proportion
    before_size, before = smaller[-2]
    return min(in_proportion, last + max(0.0, last - before) * (size - last_size) / (last_size - before_size))


@dataclass
class _SizeCost:
    """What a size adds to a step, without context.

    Attributes:
        count: steps that had it.
        latest: number of the last one, of all that had a prefill.
        measured: seconds that it was measured to add at the start; 0: it was not.
    """

    seconds: float
    count: int
    latest: int
    measured: float = 0.0


class _LatestSteps:
    """What the latest steps of a kind took.

    Their median counts: when many sequences begin at once, the device has waited for the host before some of their first
    steps, and the times of others began late. A goal that such steps set would stay for as long as a prompt rides along,
    since no step only decodes meanwhile.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_LATEST)

    @property
    def usual(self) -> float:
        """What such a step takes, once one was seen."""
        return median(self._seconds)

    @property
    def is_known(self) -> bool:
        """Whether there were enough of them to go by."""
        return len(self._seconds) >= _ENOUGH

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)
