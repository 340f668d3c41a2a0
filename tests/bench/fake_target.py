"""A target whose requests end when the test says so."""

from __future__ import annotations

import threading
import time

from jaxserve.bench.load import OnEnd
from jaxserve.bench.records import RequestRecord, Snapshot
from jaxserve.bench.workload_files import Task
from jaxserve.engine.draft_stats import SpeculativeStats


class FakeTarget:
    """Keeps what was started. With `at_once`, every request ends as soon as it begins (in a thread of its own)."""

    def __init__(self, *, at_once: bool = False, refuse_from: int | None = None) -> None:
        self.at_once = at_once
        self.refuse_from = refuse_from
        self.started: list[tuple[int, Task, float]] = []
        self.live: dict[int, tuple[Task, OnEnd]] = {}
        self.most_live = 0
        self.stopped = False
        self.changed = threading.Condition()

    def start(self, index: int, task: Task, on_end: OnEnd) -> None:
        if self.refuse_from is not None and index >= self.refuse_from:
            raise RuntimeError("the engine takes no new requests")
        with self.changed:
            self.started.append((index, task, time.perf_counter()))
            self.live[index] = task, on_end
            self.most_live = max(self.most_live, len(self.live))
            self.changed.notify_all()
        if self.at_once:
            threading.Thread(target=self.end, args=(index,)).start()

    def end(self, index: int) -> None:
        with self.changed:
            task, on_end = self.live.pop(index)
        on_end(RequestRecord(task.prompt, task.output, 0.0, 1.0, 2.0, index=index))

    def wait_started(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.started) >= count, timeout=10)

    def stop(self) -> None:
        self.stopped = True
        self.live.clear()

    def output_tokens(self) -> float:
        return 10.0 * len(self.started)

    def busy_times(self) -> tuple[float, float]:
        return float(len(self.started)), len(self.started) / 4

    def speculation(self) -> SpeculativeStats | None:
        """Each request brings two drafts, of which the first is kept."""
        count = len(self.started)
        return SpeculativeStats("ngram", count, (count, count), (count, 0))

    def snapshot(self, seconds: float) -> Snapshot | None:
        return Snapshot(seconds, len(self.live), 0, 1, 2, 3, 4, 5)
