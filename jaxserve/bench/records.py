"""Figures of a run: of each request, and over all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RequestRecord:
    """Times of one request, in seconds of one monotonic clock.

    TTFT is from submission to the first token; TPOT is (last - first) / (tokens - 1).
    """

    prompt_tokens: int
    output_tokens: int
    submitted: float
    first_token: float
    last_token: float

    @property
    def ttft(self) -> float:
        return self.first_token - self.submitted

    @property
    def tpot(self) -> float:
        return (self.last_token - self.first_token) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Summary:
    """One configuration's figures; times in milliseconds.

    Attributes:
        load: what was held: concurrent requests, or requests a second.
        floor_ms: least time of a step that memory bandwidth allows, None where the bandwidth is not known.
    """

    load: str
    num_requests: int
    output_tokens_per_second: float
    tpot_ms: dict[str, float]
    ttft_ms: dict[str, float]
    floor_ms: float | None = None
    host_gap: float | None = None

    @property
    def bandwidth_utilization(self) -> float | None:
        """Floor over mean TPOT: the share of the device's measured bandwidth that a step uses (MBU)."""
        return self.floor_ms / self.tpot_ms["mean"] if self.floor_ms else None


def summarize(
    load: str, records: list[RequestRecord], *, floor_ms: float | None, host_gap: float | None, tokens_per_second: float
) -> Summary:
    """Raises:
    ValueError: if no request was measured.
    """
    if not records:
        raise ValueError(f"no request was measured at {load}")
    return Summary(
        load=load,
        num_requests=len(records),
        output_tokens_per_second=tokens_per_second,
        tpot_ms=_statistics([record.tpot for record in records if record.output_tokens > 1]),
        ttft_ms=_statistics([record.ttft for record in records]),
        floor_ms=floor_ms,
        host_gap=host_gap,
    )


def _statistics(seconds: list[float]) -> dict[str, float]:
    values = np.asarray(seconds or [0.0]) * 1e3
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"mean": float(values.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def format_table(summaries: list[Summary]) -> str:
    """The figures as a table of plain text."""
    head = (
        "load",
        "requests",
        "TPOT mean",
        "p50",
        "p90",
        "p99",
        "floor",
        "MBU",
        "TTFT mean",
        "p90",
        "tok/s",
        "host gap",
    )
    rows: list[tuple[str, ...]] = [head]
    for summary in summaries:
        tpot, ttft, mbu = summary.tpot_ms, summary.ttft_ms, summary.bandwidth_utilization
        rows.append(
            (
                summary.load,
                str(summary.num_requests),
                *(f"{tpot[key]:.2f}" for key in ("mean", "p50", "p90", "p99")),
                f"{summary.floor_ms:.2f}" if summary.floor_ms else "-",
                f"{mbu:.0%}" if mbu else "-",
                f"{ttft['mean']:.1f}",
                f"{ttft['p90']:.1f}",
                f"{summary.output_tokens_per_second:.0f}",
                f"{summary.host_gap:.1%}" if summary.host_gap is not None else "-",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
