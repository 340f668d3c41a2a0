"""How often durations fell into which bounds: counted in a fraction of a microsecond, for what happens at every step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TimeCounts:
    """A moment's counts.

    Attributes:
        bounds: upper ends in seconds, ascending.
        counts: of durations up to each bound and above the one before; the last entry is of those above every bound.
        total: sum of all durations in seconds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @staticmethod
    def sum(parts: Sequence[TimeCounts]) -> TimeCounts:
        """All durations of several histograms with the same bounds."""
        bounds = parts[0].bounds if parts else ()
        counts = tuple(map(sum, zip(*(part.counts for part in parts), strict=True))) if parts else (0,)
        return TimeCounts(bounds, counts, math.fsum(part.total for part in parts))

    def cumulative(self) -> list[tuple[float, int]]:
        """Each bound with the count of durations up to it; the last bound is infinity."""
        pairs: list[tuple[float, int]] = []
        count = 0
        for bound, here in zip((*self.bounds, float("inf")), self.counts, strict=True):
            count += here
            pairs.append((bound, count))
        return pairs


class TimeHistogram:
    """Counts durations. Only one thread may add; any may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """`count` durations of this length."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._total += seconds * count

    def read(self) -> TimeCounts:
        return TimeCounts(self._bounds, tuple(self._counts), self._total)
