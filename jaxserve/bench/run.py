"""Runs the loads of one benchmark one after the other, and writes what they gave."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxserve.bench.load import LoadRun, LoadTimeoutError, Target, num_measured
from jaxserve.bench.records import Load, RunResult, Summary, summarize
from jaxserve.bench.results import is_done, read_series, write_load
from jaxserve.bench.workload import Workload

logger = logging.getLogger(__name__)
_SETTLING_SECONDS = 0.2


@dataclass(frozen=True)
class BenchOptions:
    """What is measured.

    Attributes:
        num_requests: measured at each load; None: max(8, 3 x concurrency), or half a minute of a rate.
        rounds: repetitions of each load; the figures are the medians of theirs.
        timeout: seconds that one repetition may take.
        on_load: told of each load before it is measured, and how many requests it has; None: nobody is.
    """

    workload: Workload
    loads: tuple[Load, ...]
    num_requests: int | None = None
    rounds: int = 1
    timeout: float = 600.0
    on_load: Callable[[Load, int], None] | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds} must be at least 1")
        if any(load.kind == "trace" for load in self.loads) and not self.workload.has_arrivals:
            raise ValueError(
                f"workload {self.workload.name!r} has no arrival times: give --concurrency or --request-rate"
            )

    def traffic(self, temperature: float) -> dict[str, int | float | None]:
        """What was sent, beside the workload and its loads, for the record."""
        return {"num_requests": self.num_requests, "rounds": self.rounds, "temperature": temperature}


Judge = Callable[[Summary, Sequence[RunResult]], Summary]  # adds what only the engine's own configuration tells
Keep = Callable[[Sequence[Summary], dict[str, list[RunResult]]], None]


def run_loads(
    target: Target,
    options: BenchOptions,
    *,
    judge: Judge,
    on_summary: Callable[[Summary], None],
    folder: Path | None = None,
    keep: Keep | None = None,
) -> tuple[list[Summary], dict[str, list[RunResult]]]:
    """Measures each load in turn, after one short unmeasured run.

    Args:
        folder: where each load's files are written as soon as it is done; loads that are done there are taken as they are.
        keep: is given all that was measured so far, each time that a load is done.

    Raises:
        LoadTimeoutError: a load took longer than `options.timeout`.
        RuntimeError: no request of a load was answered.
    """
    done = {} if folder is None else _done_before(folder, options.loads)
    if len(done) < len(options.loads):
        try:
            LoadRun(target, options.workload, Load("concurrency", 2), 2).run(options.timeout)
        except LoadTimeoutError as error:
            raise LoadTimeoutError(f"the short run before the first load: {error}") from error
    summaries: list[Summary] = []
    results: dict[str, list[RunResult]] = {}
    for load in options.loads:
        if load in done:
            summaries.append(done[load])
            continue
        count = num_measured(load, options.workload, options.num_requests)
        if options.on_load is not None:
            options.on_load(load, count)
        runs = []
        for number in range(options.rounds):
            wait_until_idle(target)
            result = LoadRun(target, options.workload, load, count, seed=number).run(options.timeout)
            runs.append(_with_round(result, number))
        summary = judge(summarize(load, runs), runs)
        summaries.append(summary)
        results[load.label] = runs
        if folder is not None:
            write_load(folder, summary, runs)
        if keep is not None:
            keep(summaries, results)
        on_summary(summary)
    return summaries, results


def wait_until_idle(target: Target, timeout: float = 10.0) -> None:
    """Waits until the engine has done with what the run before left: its last steps would be in the first measured TTFTs.

    An endpoint that does not tell what it does gets a moment.
    """
    began = time.perf_counter()
    before = target.snapshot(0.0)
    while time.perf_counter() - began < timeout:
        time.sleep(_SETTLING_SECONDS)
        now = target.snapshot(time.perf_counter() - began)
        if before is None or now is None:
            return
        if now.num_running + now.num_waiting == 0 and now.num_steps == before.num_steps:
            return
        before = now
    logger.warning("the engine still has work of what was sent before: it is measured beside that")


def _done_before(folder: Path, loads: Sequence[Load]) -> dict[Load, Summary]:
    if not any(is_done(folder, load) for load in loads):
        return {}
    return {point.summary.load: point.summary for point in read_series(folder).points if point.summary.load in loads}


def _with_round(result: RunResult, number: int) -> RunResult:
    return replace(result, records=[replace(record, round=number) for record in result.records])
