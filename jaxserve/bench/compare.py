"""Which differences between two runs are beyond the noise: bootstrap intervals of the change of each figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.bench.records import RequestRecord
from jaxserve.bench.results import Point, Series, differing

_SAMPLES = 1000
_AT_ONCE = 2_000_000  # weights that are held in memory
_LEAST_FOR_P90 = 20  # requests: with fewer, only one or two decide it
# What runs of one configuration may differ in as well, and what differs can be of.
_VERSIONS = ("architecture", "jaxserve", "git_commit", "jax", "python")

# From how often each request counts in a sample, [samples, requests], to the samples' figures.
Statistic = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Difference:
    """Of B to A, in one figure at one load.

    Attributes:
        before, after: in `unit`.
        low, high: 95% interval of the relative difference, by resampling requests (and rounds, where there are several).
        is_judged: whether it says which is faster: not where requests failed, since the others had their room.
    """

    name: str
    load: str
    metric: str
    before: float
    after: float
    low: float
    high: float
    unit: str = "ms"
    is_judged: bool = True

    @property
    def change(self) -> float:
        return self.after / self.before - 1

    @property
    def is_beyond_noise(self) -> bool:
        return self.is_judged and (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        if not self.is_judged:
            words = "not judged, since requests failed"
        elif self.is_beyond_noise:
            more, less = ("slower", "faster") if self.unit == "ms" else ("more", "less")
            words = f"{more if self.change > 0 else less} by {abs(self.change):.1%}"
        else:
            words = "no difference beyond the noise"
        return (
            f"{self.name} at {self.load}, {self.metric}: {self.before:.2f} -> {self.after:.2f} {self.unit}, {words} "
            f"({self.low:+.1%} to {self.high:+.1%})"
        )


@dataclass(frozen=True)
class Comparison:
    """Attributes:
    notes: what the two were not measured alike in, what only one of them has, and where requests failed: sentences.
    """

    notes: list[str]
    differences: list[Difference]


def compare(before: Sequence[Series], after: Sequence[Series]) -> Comparison:
    """Every load that both have, of runs of the same name; two single runs are compared whatever they are called.

    Raises:
        ValueError: they have nothing in common.
    """
    notes = []
    if len(before) == len(after) == 1:
        pairs = [(before[0], after[0])]
    else:
        by_name = {series.name: series for series in after}
        pairs = [(series, by_name[series.name]) for series in before if series.name in by_name]
        names = [{series.name for series in side} for side in (before, after)]
        for side, own, other in (("A", *names), ("B", *reversed(names))):
            if own - other:
                notes.append(f"only {side} has {', '.join(sorted(own - other))}")
    found = []
    for first, second in pairs:
        fields = differing(first.environment, second.environment, further=_VERSIONS)
        if fields:
            notes.append(f"{first.name} was not measured alike, which may be why figures differ: {', '.join(fields)}")
        others = {point.summary.load: point for point in second.points}
        shared = [(point, others[point.summary.load]) for point in first.points if point.summary.load in others]
        for side, part in (("A", first), ("B", second)):
            own = [point.summary.load for point in part.points]
            alone = [load.label for load in own if load not in {point.summary.load for point, _ in shared}]
            if alone:
                notes.append(f"only {side} has {part.name} at {', '.join(alone)}")
        for pair in shared:
            for side, point in zip("AB", pair, strict=True):
                if point.summary.failures:
                    notes.append(f"{first.name} at {point.summary.load.label} in {side}: {point.summary.failures}")
            found += _differences(first.name, *pair)
    if not found:
        raise ValueError("; ".join(["the two have no load of the same configuration in common", *notes]))
    return Comparison(notes, found)


def _differences(name: str, before: Point, after: Point) -> Iterator[Difference]:
    sides = [[record for record in point.records if record.error is None] for point in (before, after)]
    load = before.summary.load
    is_judged = not before.summary.num_failed and not after.summary.num_failed

    def difference(
        metric: str, make: Callable[[list[RequestRecord]], Statistic | None], figures: Sequence[float] | None = None
    ) -> Iterator[Difference]:
        """Args:
        figures: of both, in tokens a second, where they are not what `make`'s statistic says of all requests.
        """
        statistics = [make(records) for records in sides]
        first, second = statistics
        if first is None or second is None:
            return
        points = [
            float(statistic(np.ones((1, len(records))))[0])
            for statistic, records in ((first, sides[0]), (second, sides[1]))
        ]
        if not all(point > 0 for point in (*points, *(figures or ()))):
            return
        random = np.random.default_rng(0)
        with np.errstate(divide="ignore", invalid="ignore"):  # a sample may hold no request that says something
            changes = _resampled(second, sides[1], random) / _resampled(first, sides[0], random)
        low, high = np.nanpercentile(changes, (2.5, 97.5))
        shown = [point * 1e3 for point in points] if figures is None else figures
        scale = shown[1] / shown[0] / (points[1] / points[0])
        unit = "ms" if figures is None else "tok/s"
        yield Difference(
            name, load.label, metric, shown[0], shown[1], low * scale - 1, high * scale - 1, unit, is_judged
        )

    has_p90 = min(map(len, sides)) >= _LEAST_FOR_P90
    for metric, value in (("TPOT", _tpot), ("TTFT", _ttft)):
        yield from difference(metric, lambda records, value=value: _mean(records, value))
        if has_p90:
            yield from difference(f"{metric} p90", lambda records, value=value: _percentile(records, value, 0.9))
    if has_p90:
        yield from difference("ITL p99", lambda records: _percentile(records, _gaps, 0.99))
    # A rate of tokens is what was sent unless the engine could not keep up: then its times say so.
    if load.kind == "concurrency":
        rates = [point.summary.output_tokens_per_second for point in (before, after)]
        yield from difference("throughput", _pace, rates)


def _tpot(record: RequestRecord) -> list[float]:
    return [] if record.tpot is None else [record.tpot]


def _ttft(record: RequestRecord) -> list[float]:
    return [record.ttft]


def _gaps(record: RequestRecord) -> list[float]:
    return [gap / 1e3 for gap in record.gaps_ms]


def _values(
    records: Sequence[RequestRecord], value: Callable[[RequestRecord], list[float]]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Positive values in rising order, and which request each is of; None where there are none."""
    pairs = [(number, index) for index, record in enumerate(records) for number in value(record) if number > 0]
    if not pairs:
        return None
    pairs.sort()
    return np.asarray([number for number, _ in pairs]), np.asarray([index for _, index in pairs])


def _mean(records: Sequence[RequestRecord], value: Callable[[RequestRecord], list[float]]) -> Statistic | None:
    found = _values(records, value)
    if found is None:
        return None
    values, owners = found
    return lambda weights: weights[:, owners] @ values / weights[:, owners].sum(axis=1)


def _percentile(
    records: Sequence[RequestRecord], value: Callable[[RequestRecord], list[float]], share: float
) -> Statistic | None:
    """As numpy's, of each value as often as its request counts."""
    found = _values(records, value)
    if found is None:
        return None
    values, owners = found

    def statistic(weights: np.ndarray) -> np.ndarray:
        figures = []
        step = max(1, _AT_ONCE // len(values))
        for part in (weights[begin : begin + step] for begin in range(0, len(weights), step)):
            ends = part[:, owners].cumsum(axis=1)  # [samples, values]
            place = share * np.maximum(ends[:, -1] - 1, 0)
            low, high = (
                np.minimum((ends <= rank[:, None]).sum(axis=1), len(values) - 1)
                for rank in (np.floor(place), np.ceil(place))
            )
            figures.append(values[low] + (place % 1) * (values[high] - values[low]))
        return np.concatenate(figures)

    return statistic


def _pace(records: Sequence[RequestRecord]) -> Statistic | None:
    """Tokens of each second that a request was in flight: with as many in flight all the time, the rate of all together."""
    if not records:
        return None
    tokens = np.asarray([float(record.output_tokens) for record in records])
    seconds = np.asarray([record.last_token - record.submitted for record in records])
    return lambda weights: weights @ tokens / (weights @ seconds)


def _resampled(statistic: Statistic, records: Sequence[RequestRecord], random: np.random.Generator) -> np.ndarray:
    """Figures of samples with replacement: of rounds first, since requests of one round have much in common."""
    _, rounds = np.unique([record.round for record in records], return_inverse=True)
    members = [np.flatnonzero(rounds == number) for number in range(int(rounds.max()) + 1)]
    figures = []
    step = max(1, _AT_ONCE // len(records))
    for begin in range(0, _SAMPLES, step):
        samples = min(step, _SAMPLES - begin)
        chosen = random.multinomial(len(members), np.full(len(members), 1 / len(members)), samples)
        weights = np.zeros((samples, len(records)))
        for number, own in enumerate(members):
            drawn = random.multinomial(len(own), np.full(len(own), 1 / len(own)), samples)
            weights[:, own] = chosen[:, number, None] * drawn
        figures.append(statistic(weights))
    return np.concatenate(figures)
