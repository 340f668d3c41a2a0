"""Which differences between two runs are beyond the noise: bootstrap intervals of the difference of means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.bench.records import RequestRecord
from jaxserve.bench.results import Point, Series

_SAMPLES = 2000
_METRICS: tuple[tuple[str, Callable[[RequestRecord], float | None]], ...] = (
    ("TPOT", lambda record: record.tpot),
    ("TTFT", lambda record: record.ttft),
)


@dataclass(frozen=True)
class Difference:
    """Of B to A, in one figure at one load.

    Attributes:
        before, after: means in milliseconds.
        low, high: 95% interval of the relative difference, by resampling requests (and rounds, where there are several).
    """

    name: str
    load: str
    metric: str
    before: float
    after: float
    low: float
    high: float

    @property
    def change(self) -> float:
        return self.after / self.before - 1

    @property
    def is_beyond_noise(self) -> bool:
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        if self.is_beyond_noise:
            words = f"{'slower' if self.change > 0 else 'faster'} by {abs(self.change):.1%}"
        else:
            words = "no difference beyond the noise"
        return (
            f"{self.name} at {self.load}, {self.metric}: {self.before:.2f} -> {self.after:.2f} ms, {words} "
            f"({self.low:+.1%} to {self.high:+.1%})"
        )


def compare(before: Sequence[Series], after: Sequence[Series]) -> list[Difference]:
    """Every load that both have, of runs of the same name; two single runs are compared whatever they are called.

    Raises:
        ValueError: they have nothing in common.
    """
    if len(before) == len(after) == 1:
        pairs = [(before[0], after[0])]
    else:
        by_name = {series.name: series for series in after}
        pairs = [(series, by_name[series.name]) for series in before if series.name in by_name]
    found = [
        difference
        for first, second in pairs
        for point in first.points
        for other in second.points
        if other.summary.load == point.summary.load
        for difference in _differences(first.name, point, other)
    ]
    if not found:
        raise ValueError("the two have no load of the same configuration in common")
    return found


def _differences(name: str, before: Point, after: Point) -> list[Difference]:
    found = []
    random = np.random.default_rng(0)
    for metric, value in _METRICS:
        first, second = _by_round(before.records, value), _by_round(after.records, value)
        if not first or not second:
            continue
        means = float(np.mean(np.concatenate(first))), float(np.mean(np.concatenate(second)))
        changes = _resampled_means(first, random) / _resampled_means(second, random)
        low, high = np.percentile(1 / changes - 1, (2.5, 97.5))
        found.append(
            Difference(name, before.summary.load.label, metric, means[0] * 1e3, means[1] * 1e3, float(low), float(high))
        )
    return found


def _by_round(records: Sequence[RequestRecord], value: Callable[[RequestRecord], float | None]) -> list[np.ndarray]:
    rounds: dict[int, list[float]] = {}
    for record in records:
        number = value(record) if record.error is None else None
        if number is not None and number > 0:
            rounds.setdefault(record.round, []).append(number)
    return [np.asarray(values) for values in rounds.values()]


def _resampled_means(rounds: list[np.ndarray], random: np.random.Generator) -> np.ndarray:
    """Means of samples with replacement: of rounds first, since requests of one round have much in common."""
    # One table of resampled means for each round, so that a sample only has to choose among them.
    tables = [
        random.choice(values, (_SAMPLES, len(values))).mean(axis=1) * len(values) for values in rounds
    ]  # sums, so that longer rounds weigh more
    chosen = random.integers(0, len(rounds), (_SAMPLES, len(rounds)))
    sums = np.stack(tables, axis=1)[np.arange(_SAMPLES)[:, None], chosen].sum(axis=1)
    counts = np.asarray([len(values) for values in rounds])[chosen].sum(axis=1)
    return sums / counts
