"""Figures of a run: of each request, and over all of them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.json_fields import from_json
from jaxserve.wording import plural

_STATISTICS = ("mean", "p50", "p90", "p99")
_REASON_CHARACTERS = 160  # of why a request failed: an endpoint may answer with a whole page

LoadKind = Literal["concurrency", "rate", "trace"]


@dataclass(frozen=True)
class Load:
    """How requests are sent.

    Attributes:
        kind: "concurrency": that many in flight; "rate": that many a second, at random times (Poisson); "trace": at the
            workload's own times.
        value: requests in flight, requests a second, or by how much a trace runs faster than it was recorded.
    """

    kind: LoadKind
    value: float

    def __post_init__(self) -> None:
        if not 0 < self.value < math.inf:
            raise ValueError(f"{self.kind}={self.value:g} must be positive and finite")

    @property
    def label(self) -> str:
        if self.kind == "concurrency":
            return f"{self.value:g}"
        return f"{self.value:g}/s" if self.kind == "rate" else f"trace x{self.value:g}"

    @property
    def words(self) -> str:
        if self.kind == "concurrency":
            return f"with {self.value:g} {plural('request', self.value)} in flight"
        if self.kind == "rate":
            return f"at {self.value:g} {plural('request', self.value)} a second"
        return f"on the trace at {self.value:g} times its speed"

    @property
    def file_name(self) -> str:
        return f"{self.kind}-{self.value:g}"


@dataclass(frozen=True)
class RequestRecord:
    """Times of one request, in seconds of one monotonic clock.

    TTFT is from submission to the first token; TPOT is (last - first) / (tokens - those that came with the first); ITL are
    the times between tokens, or chunks of tokens, one after the other.

    Attributes:
        index: its place in the order of submission.
        first_count: tokens that came together with the first one, itself included.
        error: why there was no whole answer; then the times say nothing.
        round: which repetition of the load it belongs to.
        due: when it should have been submitted, under a load that says so; it was not if the client fell behind.
        gaps_ms: milliseconds between what came and what came before it, from the second token or chunk on.
    """

    prompt_tokens: int
    output_tokens: int
    submitted: float
    first_token: float
    last_token: float
    index: int = 0
    first_count: int = 1
    error: str | None = None
    round: int = 0
    due: float | None = None
    gaps_ms: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.first_token - self.submitted

    @property
    def tpot(self) -> float | None:
        """None for an answer that came all at once."""
        later = self.output_tokens - self.first_count
        return (self.last_token - self.first_token) / later if later > 0 else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> RequestRecord:
        """Raises:
        ValueError: it is no record.
        """
        return from_json(RequestRecord, data, ignore_unknown=True)


@dataclass(frozen=True)
class Snapshot:
    """What the engine was doing at one moment of a run.

    Attributes:
        time: seconds since the run began.
        generation_tokens, prompt_tokens, num_steps: since the engine's start.
        host_s: seconds that the host took to schedule and launch these steps.
    """

    time: float
    num_running: int
    num_waiting: int
    used_pages: int
    num_pages: int
    generation_tokens: int
    prompt_tokens: int
    num_steps: int
    host_s: float = 0.0

    @staticmethod
    def from_json(data: dict[str, Any]) -> Snapshot:
        """Raises:
        ValueError: it is no snapshot.
        """
        return from_json(Snapshot, data, ignore_unknown=True)


@dataclass(frozen=True)
class RunResult:
    """One repetition of a load.

    Attributes:
        records: of the measured requests.
        duration: seconds until the last of them had ended.
        output_tokens: generated meanwhile, for requests that are not measured as well.
        host_gap: share of the busy time in which the device waited for the host, where it is known.
        speculation: what was drafted meanwhile, for requests that are not measured as well; None: nothing is, or it is not
            known.
    """

    records: list[RequestRecord]
    duration: float
    output_tokens: float
    host_gap: float | None = None
    timeline: list[Snapshot] = field(default_factory=list)
    speculation: SpeculativeStats | None = None


@dataclass(frozen=True)
class Summary:
    """The figures of one load; times in milliseconds.

    Attributes:
        num_requests: with a whole answer.
        mean_running: requests that ran at once, averaged over the time; where a load is held and the engine's slots are not
            known, all that were in flight.
        floor_ms: least time of a step that memory bandwidth allows, None where the bandwidth is not known.
        ttft_floor_ms: least time of a prompt of mean length, alone, that bandwidth and matrix rate allow.
        compute_utilization: MFU: share of the device's measured matrix rate that prompts and answers needed.
        itl_ms: ITL over all requests together; "worst" is the largest 99th percentile that a single request had. None where
            it was not noted.
        first_failure: why the first of the failed requests did.
        speculation: what was drafted, over all repetitions; None: nothing is, or it is not known.
    """

    load: Load
    num_requests: int
    num_failed: int
    output_tokens_per_second: float
    tpot_ms: dict[str, float]
    ttft_ms: dict[str, float]
    mean_running: float
    floor_ms: float | None = None
    host_gap: float | None = None
    compute_utilization: float | None = None
    itl_ms: dict[str, float] | None = None
    ttft_floor_ms: float | None = None
    first_failure: str | None = None
    speculation: SpeculativeStats | None = None

    @property
    def failures(self) -> str | None:
        """How many requests failed and why, on one line; None where none did."""
        if not self.num_failed:
            return None
        reason = self.reason and f": {self.reason}"
        return f"{self.num_failed} of {self.num_requests + self.num_failed} requests failed{reason}"

    @property
    def reason(self) -> str:
        """`first_failure` on one line, as far as it is told; empty where there is none."""
        # An option's name in it is whole or not there.
        return textwrap.shorten(self.first_failure or "", _REASON_CHARACTERS, placeholder=" …", break_on_hyphens=False)

    @property
    def bandwidth_utilization(self) -> float | None:
        """Floor over mean TPOT: the share of the device's measured bandwidth that a step uses (MBU)."""
        return self.floor_ms / self.tpot_ms["mean"] if self.floor_ms and self.tpot_ms["mean"] else None

    @property
    def drafts(self) -> str | None:
        """What was drafted and kept, on one line; None where nothing is drafted."""
        if self.speculation is None:
            return None
        return "; ".join(filter(None, (self.speculation.kept, self.speculation.kept_by_position)))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "load": self.load.label, "load_kind": self.load.kind, "load_value": self.load.value,
                "bandwidth_utilization": self.bandwidth_utilization,
                "draft_acceptance": self.speculation and self.speculation.acceptance}  # fmt: skip

    @staticmethod
    def from_json(data: dict[str, Any]) -> Summary:
        """Raises:
        ValueError: it is no summary.
        """
        load = from_json(Load, {"kind": data.get("load_kind"), "value": data.get("load_value")})
        summary = from_json(Summary, {**data, "load": load}, ignore_unknown=True)
        for name in ("tpot_ms", "ttft_ms", "itl_ms"):
            statistics = getattr(summary, name)
            missing = [] if statistics is None else [key for key in _STATISTICS if key not in statistics]
            if missing:
                raise ValueError(f"{name} lacks {', '.join(missing)}")
        return summary


def summarize(load: Load, runs: Sequence[RunResult]) -> Summary:
    """Figures over the repetitions of a load: of each the mean and percentiles, and of these the median.

    Raises:
        RuntimeError: no request was answered, with the first reason.
    """
    records = [record for run in runs for record in run.records]
    failed = [record for record in records if record.error is not None]
    if len(failed) == len(records):
        reason = first_failure(records) or "none was sent"
        raise RuntimeError(f"no request was answered at {load.label}: {reason}")
    answered = [[record for record in run.records if record.error is None] for run in runs]
    answered = [part for part in answered if part]
    gaps = [run.host_gap for run in runs if run.host_gap is not None]
    return Summary(
        load=load,
        num_requests=len(records) - len(failed),
        num_failed=len(failed),
        output_tokens_per_second=float(np.median([run.output_tokens / run.duration for run in runs])),
        tpot_ms=_median_statistics(
            [[tpot for record in part if (tpot := record.tpot) is not None] for part in answered]
        ),
        ttft_ms=_median_statistics([[record.ttft for record in part] for part in answered]),
        mean_running=float(np.median([mean_running(part, load) for part in answered])),
        host_gap=float(np.median(gaps)) if gaps else None,
        itl_ms=_inter_token_statistics(answered),
        first_failure=first_failure(records),
        speculation=SpeculativeStats.sum([run.speculation for run in runs if run.speculation is not None]),
    )


def first_failure(records: Sequence[RequestRecord]) -> str | None:
    """Why the first of the requests that failed did; None where none did."""
    return next((record.error for record in records if record.error is not None), None)


def mean_running(records: Sequence[RequestRecord], load: Load) -> float:
    """Requests that ran at once, on average: as many as were held in flight, if all of them had a slot, or those that were
    decoding, by Little's law.
    """
    if load.kind == "concurrency":
        return load.value
    span = max(record.last_token for record in records) - min(record.submitted for record in records)
    return sum(record.last_token - record.first_token for record in records) / span if span else 0.0


def decoding_of_held(records: Sequence[RequestRecord], load: Load) -> float:
    """Requests that were decoding at once, on average, of those that a load holds in flight: the others wait."""
    in_flight = sum(record.last_token - record.submitted for record in records)
    decoding = sum(record.last_token - record.first_token for record in records)
    return load.value * decoding / in_flight if in_flight else 0.0


def _median_statistics(rounds: list[list[float]]) -> dict[str, float]:
    statistics = [_statistics(seconds) for seconds in rounds if seconds] or [_statistics([0.0])]
    return {name: float(np.median([part[name] for part in statistics])) for name in statistics[0]}


def _inter_token_statistics(rounds: list[list[RequestRecord]]) -> dict[str, float] | None:
    noted = [gaps for part in rounds if (gaps := [record.gaps_ms for record in part if record.gaps_ms])]
    if not noted:
        return None
    together = _median_statistics([[gap / 1e3 for gaps in part for gap in gaps] for part in noted])
    return {**together, "worst": float(np.median([max(np.percentile(gaps, 99) for gaps in part) for part in noted]))}


def _statistics(seconds: list[float]) -> dict[str, float]:
    values = np.asarray(seconds) * 1e3
    figures = (values.mean(), *np.percentile(values, (50, 90, 99)))
    return {name: float(figure) for name, figure in zip(_STATISTICS, figures, strict=True)}


def significant(value: float) -> str:
    """A rate for people: three digits that say something, however small it is, and thousands with commas."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def failed_requests(measured: Mapping[str, Sequence[Summary]]) -> str:
    """How many requests failed at which loads, and why, on one line; empty where none did.

    Args:
        measured: figures by the name of what they are of.
    """
    return "; ".join(
        f"{name} at {words}" for name, summaries in measured.items() if (words := _loads_that_failed(summaries))
    )


def _loads_that_failed(summaries: Sequence[Summary]) -> str | None:
    failed = [summary for summary in summaries if summary.num_failed]
    if not failed:
        return None
    loads = [f"{each.load.label} ({each.num_failed} of {each.num_requests + each.num_failed})" for each in failed]
    reason = next((f": {each.reason}" for each in failed if each.reason), "")
    return f"{', '.join(loads)}{reason}"


def format_table(summaries: Sequence[Summary]) -> str:
    """The figures as a table of plain text: times in milliseconds, floor and MBU beside each."""
    head = (
        "load", "requests", "TPOT mean", "p50", "p90", "p99", "ITL p99", "floor", "MBU", "TTFT mean", "p90", "p99", "tok/s",
        "host gap",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [head, *(_table_row(summary) for summary in summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += [f"at {part.load.label}: {words}" for part in summaries for words in (part.failures, part.drafts) if words]
    return "\n".join(lines)


def _table_row(summary: Summary) -> tuple[str, ...]:
    mbu, gap = summary.bandwidth_utilization, summary.host_gap
    return (
        summary.load.label,
        str(summary.num_requests),
        *(f"{summary.tpot_ms[key]:.2f}" for key in ("mean", "p50", "p90", "p99")),
        f"{summary.itl_ms['p99']:.2f}" if summary.itl_ms else "-",
        f"{summary.floor_ms:.2f}" if summary.floor_ms else "-",
        f"{mbu:.0%}" if mbu else "-",
        *(f"{summary.ttft_ms[key]:.1f}" for key in ("mean", "p90", "p99")),
        f"{summary.output_tokens_per_second:.0f}",
        f"{gap:.1%}" if gap is not None else "-",
    )
