"""Times each kernel by itself: microseconds, bytes, bandwidth and the share of the measured ceiling, by shape."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.bench.floor import Ceiling
from jaxserve.bench.records import significant

_REPETITIONS = 7
ABOVE = 1.005  # shares that are shown as more than 100%

Step = Callable[[int, jax.Array, Any], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one shape.

    Attributes:
        num_bytes: that a call must read and write at least.
        operations: floating-point operations of a call.
        make: makes the first input, the arrays, and what a call does: `step(number, x, arrays) -> (next x, arrays)`. Each
            call's result decides the next one's input, so that the calls run one after the other as in a model.
    """

    kernel: str
    shape: str
    num_bytes: int
    operations: float
    make: Callable[[], tuple[jax.Array, Any, Step]]


@dataclass(frozen=True)
class KernelTime:
    """What a case took: seconds of one call; not a number where more calls took no longer than fewer (noise)."""

    case: KernelCase
    seconds: float

    @property
    def microseconds(self) -> str:
        return "noise" if math.isnan(self.seconds) else f"{self.seconds * 1e6:.1f}"

    @property
    def bandwidth(self) -> float:
        return self.case.num_bytes / self.seconds

    def floor(self, ceiling: Ceiling) -> float:
        """Seconds that a call takes at least: for its bytes, or for its operations where these take longer."""
        return max(self.case.num_bytes / ceiling.bandwidth, self.case.operations / ceiling.matrix_rate)


def time_kernel(case: KernelCase, *, calls: tuple[int, int]) -> KernelTime:
    """Two programs of different length are timed: what a program costs once is not in the difference."""
    x, arrays, step = case.make()
    fastest = []
    for count in calls:

        def run(x: jax.Array, arrays: Any, count: int = count) -> jax.Array:
            for number in range(count):
                x, arrays = step(number, x, arrays)
            return x

        program = jax.jit(run).lower(x, arrays).compile()
        jax.block_until_ready(program(x, arrays))
        times = []
        for _ in range(_REPETITIONS):
            started = time.perf_counter()
            jax.block_until_ready(program(x, arrays))
            times.append(time.perf_counter() - started)
        fastest.append(min(times))
    difference = fastest[1] - fastest[0]
    return KernelTime(case, difference / (calls[1] - calls[0]) if difference > 0 else math.nan)


def format_kernels(times: Sequence[KernelTime], ceiling: Ceiling) -> str:
    """A table: share is the floor over the time. Where some are above 100%, a line under it says why."""
    rows = [("kernel", "shape", "us", "MB", "GB/s", "TFLOP/s", "floor us", "share")]
    for entry in times:
        case, floor = entry.case, entry.floor(ceiling)
        measured = ("-", "-", "-")
        if not math.isnan(entry.seconds):
            rate = case.operations / entry.seconds
            measured = significant(entry.bandwidth / 1e9), significant(rate / 1e12), f"{floor / entry.seconds:.0%}"
        bandwidth, rate_text, share = measured
        megabytes, floor_text = significant(case.num_bytes / 1e6), significant(floor * 1e6)
        rows.append((case.kernel, case.shape, entry.microseconds, megabytes, bandwidth, rate_text, floor_text, share))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if any(entry.floor(ceiling) > ABOVE * entry.seconds for entry in times):
        lines.append(
            "above 100%: so small that a cache serves the calls, which the floor, the memory's, does not count"
        )
    return "\n".join(lines)
