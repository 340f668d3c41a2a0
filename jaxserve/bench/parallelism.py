"""The same devices as one model over all of them, or as replicas over fewer each: which gives more, and from where on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.bench.results import Point, Series

Curve = tuple[np.ndarray, np.ndarray]  # what rises along the curve, and what is told of it
_PLACES = 400  # between a curve's ends, at which it is looked at


@dataclass(frozen=True)
class Comparison:
    """Two ways of using as many devices.

    Attributes:
        wide: one model over all of them.
        narrow: with fewer devices for each replica.
        times: replicas that `narrow`'s figures are to be multiplied by; 1: they were measured together.
    """

    wide: Series
    narrow: Series
    times: int

    @property
    def degree(self) -> int:
        """Devices of either."""
        return degrees_of(self.wide)[0]

    @property
    def origin(self) -> str:
        """Where the replicas' figures are from."""
        if self.times == 1:
            return "measured"
        devices = degrees_of(self.narrow)[0]
        return "from one device's figures" if devices == 1 else f"from {devices} devices' figures"

    def __str__(self) -> str:
        """From which time per token on which of them gives more tokens a second."""
        wide, narrow = tokens_by_tpot(self.wide, 1), tokens_by_tpot(self.narrow, self.times)
        one = self.wide.name
        many = f"{'' if self.times == 1 else f'{self.times} x '}{self.narrow.name} ({self.origin})"
        low, high = max(wide[0][0], narrow[0][0]), min(wide[0][-1], narrow[0][-1])
        if low > high:
            (fast, first), (slow, second) = sorted(((wide[0], one), (narrow[0], many)), key=lambda each: each[0][0])
            return (
                f"{first} is faster than {second} at every load that was measured: {fast[0]:.1f} to {fast[-1]:.1f} ms "
                f"per token, and {slow[0]:.1f} to {slow[-1]:.1f} ms."
            )
        if low == high:
            [ours], [theirs] = _tokens_at(np.asarray([low]), wide), _tokens_at(np.asarray([low]), narrow)
            (more, first), (less, second) = sorted(((ours, one), (theirs, many)), key=lambda each: -each[0])
            gives = "as many output tokens a second as" if more == less else "more output tokens a second than"
            return (
                f"{first} gives {gives} {second} at {low:.1f} ms per token, the only time that both have: "
                f"{more:,.0f} and {less:,.0f}."
            )
        times = np.geomspace(low, high, _PLACES)
        ours, theirs = _tokens_at(times, wide), _tokens_at(times, narrow)
        has_more = theirs > ours
        first, second = (many, one) if has_more[-1] else (one, many)
        others = np.flatnonzero(has_more != has_more[-1])
        text = f"{first} gives more output tokens a second than {second} at the same time per token"
        if not len(others):
            return f"{text}, whichever it is of the {low:.1f} to {high:.1f} ms that both have."
        start = others[-1] + 1
        return (
            f"{text} from {times[start]:.1f} ms on, where each gives {ours[start]:,.0f}, to {high:.1f} ms, the longest that "
            "both have."
        )


def comparisons(series: Sequence[Series]) -> list[Comparison]:
    """Of everything that was measured in process over several devices, plain and speculating each with its like.

    Replicas that were measured together count; where there are none, a measured part of them does, the smallest.
    """
    groups: dict[tuple[str, ...], dict[tuple[int, int], Series]] = {}
    for part in series:
        if is_comparable(part) and answered(part):
            groups.setdefault(group_of(part), {})[degrees_of(part)] = part
    found = []
    for by_degrees in groups.values():
        for (tensor, data), wide in sorted(by_degrees.items(), key=lambda item: item[0]):
            if tensor == 1 or data > 1:
                continue
            fewer = {degrees: part for degrees, part in sorted(by_degrees.items()) if degrees[0] < tensor}
            measured = [part for (own, replicas), part in fewer.items() if own * replicas == tensor]
            parts = [(own, part) for (own, replicas), part in fewer.items() if replicas == 1 and tensor % own == 0]
            if measured:
                found += [Comparison(wide, part, 1) for part in measured]
            elif parts:
                found.append(Comparison(wide, parts[0][1], tensor // parts[0][0]))
    return found


def timed(part: Series) -> list[Point]:
    """At fixed concurrency, where some request got the second token that a time per token takes."""
    return [point for point in part.of_kind("concurrency") if point.summary.tpot_ms["mean"] > 0]


def answered(part: Series) -> list[Point]:
    """Of these, those at which no request failed: else the others had their room."""
    return [point for point in timed(part) if not point.summary.num_failed]


def tokens_by_tpot(part: Series, times: int) -> Curve:
    """Times per token in rising order, and the most output tokens a second (of so many replicas) with no longer one."""
    points = sorted(
        (point.summary.tpot_ms["mean"], times * point.summary.output_tokens_per_second) for point in answered(part)
    )
    tpot, rate = np.asarray(points).T
    return tpot, np.maximum.accumulate(rate)


def _tokens_at(times: np.ndarray, tokens: Curve) -> np.ndarray:
    """Output tokens a second between the points of `tokens_by_tpot`: as many are in flight as lies on a straight line."""
    tpot, rate = tokens
    return np.interp(times, tpot, rate * tpot) / times


def tpot_by_load(points: Sequence[Point], times: int) -> Curve:
    """Requests in flight over all of so many replicas, and the mean time per token."""
    loads = np.asarray([point.summary.load.value * times for point in points])
    return loads, np.asarray([point.summary.tpot_ms["mean"] for point in points])


def crossing(first: Curve, second: Curve) -> float | None:
    """Where the second curve begins to be the lower one for good, between points on a logarithmic axis; None: nowhere, or
    it always is.
    """
    low, high = max(first[0][0], second[0][0]), min(first[0][-1], second[0][-1])
    if low >= high:
        return None
    places = np.geomspace(low, high, _PLACES)
    gap = np.interp(np.log(places), np.log(first[0]), first[1]) - np.interp(
        np.log(places), np.log(second[0]), second[1]
    )
    lower = gap > 0
    if not lower[-1] or lower.all():
        return None
    return float(places[np.flatnonzero(~lower)[-1] + 1])


def is_comparable(part: Series) -> bool:
    """Whether it is an engine of ours in process, with continuous batching."""
    engine = part.environment.get("engine") == "jaxserve" and part.environment.get("transport") == "in process"
    return engine and not part.setting("static_batching")


def degrees_of(part: Series) -> tuple[int, int]:
    """Of tensor and data parallelism."""
    return int(part.setting("tensor_parallel_size", 1)), int(part.setting("data_parallel_size", 1))


def setup_of(part: Series) -> tuple[str, ...]:
    """What is measured, on what, with what traffic; whether it speculates is no part of it."""
    known = part.environment
    return (*(str(known.get(name)) for name in ("model", "device", "workload")), str(part.setting("quantization")))


def group_of(part: Series) -> tuple[str, ...]:
    """What runs must have in common to be set against each other."""
    return (*setup_of(part), str(part.setting("speculative_config")))
