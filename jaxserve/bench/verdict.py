"""Which configuration gives the most tokens while every user gets theirs fast enough, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.bench.records import Summary, failed_requests
from jaxserve.bench.results import Series


@dataclass(frozen=True)
class Candidate:
    """One measured point."""

    series: Series
    summary: Summary

    @property
    def tpot(self) -> float:
        return self.summary.tpot_ms["mean"]

    @property
    def per_device(self) -> float:
        return self.summary.output_tokens_per_second / self.series.num_devices

    def __str__(self) -> str:
        return f"{self.series.name} {self.summary.load.words}"


def verdict(series: Sequence[Series], slo_tpot_ms: float) -> str:
    """The best point under the goal (mean TPOT), by output tokens a second for each device, and the next configuration.

    Points with failed requests do not count, and are named: whoever answers few has time for them. Static batching does not
    count either, and is named with what it gives.
    """
    judged = [part for part in series if not _is_static(part)]
    told = [_best(judged, slo_tpot_ms)]
    if left_out := failed_requests({part.name: [point.summary for point in part.points] for part in judged}):
        told.append(f"Left out, since requests failed: {left_out}.")
    told += [_of_static(part, slo_tpot_ms) for part in series if _is_static(part)]
    return " ".join(told)


def _is_static(part: Series) -> bool:
    return bool(part.setting("static_batching"))


def _of_static(part: Series, slo_tpot_ms: float) -> str:
    """Static batching is there to be looked at: its tokens come fast since nobody is let in, and who waits is not asked."""
    good = [candidate for candidate in _candidates([part]) if candidate.tpot <= slo_tpot_ms]
    best = max(good, key=lambda candidate: candidate.per_device, default=None)
    figures = (
        ""
        if best is None
        else f" (under the goal at most {best.per_device:,.0f} output tokens a second for each device, "
        f"{best.summary.load.words}, TTFT {best.summary.ttft_ms['mean']:.0f} ms)"
    )
    return f"Not judged, since static batching has whoever comes wait for a whole batch: {part.name}{figures}."


def _candidates(series: Sequence[Series]) -> list[Candidate]:
    return [
        Candidate(part, point.summary)
        for part in series
        for point in part.points
        if point.summary.tpot_ms["mean"] and not point.summary.num_failed
    ]


def _best(series: Sequence[Series], slo_tpot_ms: float) -> str:
    candidates = _candidates(series)
    if not candidates:
        return "There is no load to judge."
    good = [candidate for candidate in candidates if candidate.tpot <= slo_tpot_ms]
    goal = f"a goal of {slo_tpot_ms:g} ms per token ({1000 / slo_tpot_ms:.0f} tokens a second for each user)"
    if not good:
        nearest = min(candidates, key=lambda candidate: candidate.tpot)
        return f"No configuration meets {goal}: the fastest is {nearest}, with {nearest.tpot:.2f} ms."
    best = max(good, key=lambda candidate: candidate.per_device)
    devices = best.series.num_devices
    text = (
        f"Under {goal}, the best configuration is {best}: {best.per_device:,.0f} output tokens a second for each device"
        f"{f' ({best.summary.output_tokens_per_second:,.0f} on {devices} devices)' if devices > 1 else ''}, "
        f"TPOT {best.tpot:.2f} ms (p90 {best.summary.tpot_ms['p90']:.2f}), TTFT {best.summary.ttft_ms['mean']:.0f} ms."
    )
    others = [candidate for candidate in good if candidate.series.name != best.series.name]
    if others:
        following = max(others, key=lambda candidate: candidate.per_device)
        gain = best.per_device / following.per_device - 1
        return f"{text} That is {gain:.0%} more than the next, {following}: {following.per_device:,.0f}."
    failing = sorted({candidate.series.name for candidate in candidates} - {best.series.name})
    return f"{text} None of the others meets it: {', '.join(failing)}." if failing else text
