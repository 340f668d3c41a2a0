"""Sends a workload's requests as a load says: so many in flight, so many a second, or at the workload's own times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from jaxserve.bench.records import Load, RequestRecord, RunResult, Snapshot
from jaxserve.bench.workload import Workload
from jaxserve.bench.workload_files import Task
from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.wording import plural

OnEnd = Callable[[RequestRecord], None]
_POISSON_SECONDS = 30.0  # a rate is held for about so long where no number of requests is given
_SNAPSHOT_SECONDS = 0.25


class LoadTimeoutError(TimeoutError):
    """A load, or another measurement, took longer than it may; the message says which, and what helps."""


class Target(Protocol):
    """What requests are sent to."""

    def start(self, index: int, task: Task, on_end: OnEnd) -> None:
        """Sends a request and comes back at once; `on_end` is called once with its record, from any thread.

        It is not called for requests that `stop` ended.
        """
        ...

    def stop(self) -> None:
        """Ends the requests that still run."""
        ...

    def output_tokens(self) -> float:
        """Tokens of answers so far, over all requests."""
        ...

    def busy_times(self) -> tuple[float, float] | None:
        """Seconds with work so far, and of them those in which the device waited for the host; None: not known."""
        ...

    def speculation(self) -> SpeculativeStats | None:
        """What was drafted so far; None: nothing is, or it is not known."""
        ...

    def snapshot(self, seconds: float) -> Snapshot | None:
        """What the engine does at this moment, `seconds` after the start; None: not known."""
        ...


def num_measured(load: Load, workload: Workload, num_requests: int | None) -> int:
    """How many requests are measured: as asked, or what the load suggests."""
    if num_requests is not None:
        return num_requests
    if load.kind == "concurrency":
        return max(8, 3 * int(load.value))
    return len(workload.tasks) if load.kind == "trace" else max(16, int(_POISSON_SECONDS * load.value))


class LoadRun:
    """One repetition of a load.

    Under a load that is held (`concurrency`), requests beyond the measured ones keep it up until the last measured one
    has ended, and are ended then. Under a rate or trace just the measured ones are sent.
    """

    def __init__(self, target: Target, workload: Workload, load: Load, num_requests: int, *, seed: int = 0) -> None:
        if num_requests < 1:
            raise ValueError(f"{num_requests=} must be at least 1")
        self._target = target
        self._workload = workload
        self._load = load
        self._num_requests = num_requests
        self._seed = seed
        self._records: list[RequestRecord | None] = [None] * num_requests
        self._due: list[float | None] = [None] * num_requests
        self._num_started = 0
        self._num_recorded = 0
        self._finished_at = 0.0
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._cancelled = threading.Event()
        self._failure: Exception | None = None

    def run(self, timeout: float) -> RunResult:
        """Sends everything and waits for it.

        Raises:
            LoadTimeoutError: if it takes longer than `timeout` seconds.
            Exception: what the target raised at a request that it does not take.
        """
        busy_before, tokens_before = self._target.busy_times(), self._target.output_tokens()
        drafts_before = self._target.speculation()
        started = time.perf_counter()
        timeline: list[Snapshot] = []
        sender = threading.Thread(target=self._send, args=(started,), name="bench-sender", daemon=True)
        sender.start()
        finished = self._wait(started, timeout, timeline)
        tokens = self._target.output_tokens() - tokens_before
        busy_after, drafts_after = self._target.busy_times(), self._target.speculation()
        self._cancelled.set()
        self._target.stop()
        sender.join()
        if self._failure is not None:
            raise self._failure
        if not finished:
            # Under a load that is held so many requests run at once: to measure fewer than these is of little help.
            held = self._load.value if self._load.kind == "concurrency" else 1
            fewer = ", or measure fewer (--num-requests)" if self._num_requests > held else ""
            raise LoadTimeoutError(
                f"{self._num_recorded} of {self._num_requests} {plural('request', self._num_requests)} ended within "
                f"{timeout:g} s {self._load.words}: raise --timeout{fewer}"
            )
        gap = None
        if busy_before is not None and busy_after is not None:
            busy, idle = (after - before for before, after in zip(busy_before, busy_after, strict=True))
            gap = idle / busy if busy else 0.0
        return RunResult(
            records=[record for record in self._records if record is not None],
            duration=self._finished_at - started,
            output_tokens=tokens,
            host_gap=gap,
            speculation=None if drafts_before is None or drafts_after is None else drafts_after.since(drafts_before),
            timeline=timeline,
        )

    def _wait(self, started: float, timeout: float, timeline: list[Snapshot]) -> bool:
        """Waits for the measured requests, and takes a snapshot of the engine now and then."""
        while not self._done.wait(_SNAPSHOT_SECONDS):
            seconds = time.perf_counter() - started
            if seconds >= timeout:
                return False
            snapshot = self._target.snapshot(seconds)
            if snapshot is not None:
                timeline.append(snapshot)
        return True

    def _send(self, started: float) -> None:
        if self._load.kind == "concurrency":
            for _ in range(int(self._load.value)):
                self._start_next()
            return
        for index, offset in zip(range(self._num_requests), self._arrivals(), strict=False):
            self._due[index] = started + offset
            if self._cancelled.wait(max(0.0, started + offset - time.perf_counter())):
                return
            self._start_next()

    def _arrivals(self) -> Iterator[float]:
        """Seconds from the start at which requests are sent."""
        if self._load.kind == "trace":
            for task in self._workload.tasks:
                yield (task.arrival or 0.0) / self._load.value
            return
        random = np.random.default_rng(self._seed)
        moment = 0.0
        while True:
            yield moment
            moment += random.exponential(1.0 / self._load.value)

    def _start_next(self) -> None:
        with self._lock:
            index, self._num_started = self._num_started, self._num_started + 1
        try:
            self._target.start(index, self._workload.task(index), self._ended)
        except Exception as error:  # told by `run`: this may be the target's own thread
            self._failure = error
            self._done.set()

    def _ended(self, record: RequestRecord) -> None:
        """Keeps a measured request's record, and starts the next one in its place where the load is held."""
        if record.index < self._num_requests:
            with self._lock:
                self._records[record.index] = replace(record, due=self._due[record.index])
                self._num_recorded += 1
                if self._num_recorded == self._num_requests:
                    self._finished_at = time.perf_counter()
                    self._done.set()
        if self._load.kind == "concurrency" and not self._done.is_set() and not self._cancelled.is_set():
            self._start_next()
