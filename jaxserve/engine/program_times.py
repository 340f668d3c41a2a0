"""What each program of a start took to get ready, for the table that `-v` shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgramTime:
    """Seconds of its own: what a program waited for others, which are made at the same time, is left out.

    Attributes:
        name: of the step's size, or of what else it does.
        loaded: from disk; 0 if it was not there.
        traced: in Python, to what XLA takes; 0 if it was loaded.
        compiled: by XLA, trials of kernels included; 0 if it was loaded.
    """

    name: str
    loaded: float = 0.0
    traced: float = 0.0
    compiled: float = 0.0

    @property
    def total(self) -> float:
        return self.loaded + self.traced + self.compiled


def program_table(times: Iterable[ProgramTime]) -> str:
    """Lines of text, the programs that took longest first."""
    ordered = sorted(times, key=lambda time: (-time.total, time.name))
    everything = ProgramTime(
        f"all {len(ordered)}, many at once",
        sum(time.loaded for time in ordered),
        sum(time.traced for time in ordered),
        sum(time.compiled for time in ordered),
    )
    lines = [
        f"{_seconds(time.loaded)}  {_seconds(time.traced)}  {_seconds(time.compiled)}  {time.name}"
        for time in (*ordered, everything)
    ]
    return "\n".join(["programs, seconds:", f"{'loaded':>8}  {'traced':>8}  {'compiled':>8}", *lines])


def _seconds(value: float) -> str:
    return f"{value:8.2f}" if value else f"{'-':>8}"
