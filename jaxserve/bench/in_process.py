"""Loads on an engine in this process, by its callbacks: no HTTP, no text."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxserve.bench.records import RequestRecord
from jaxserve.bench.workload import Lengths, Workload, random_prompt
from jaxserve.engine.client import EngineClient
from jaxserve.engine.request import RequestOutput
from jaxserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class LoadResult:
    """Records of the measured requests, and what the engine did meanwhile."""

    records: list[RequestRecord]
    tokens_per_second: float
    host_gap: float


class ClosedLoop:
    """Holds `concurrency` requests in flight until the first `num_requests` have ended.

    The load is held to the end: requests beyond the measured ones keep the batch full, and are aborted when the last
    measured one has ended.
    """

    def __init__(
        self, engine: EngineClient, workload: Workload, *, concurrency: int, num_requests: int, temperature: float
    ) -> None:
        self._engine = engine
        self._lengths: Iterator[Lengths] = iter(workload)
        self._concurrency = concurrency
        self._num_requests = num_requests
        self._temperature = temperature
        self._random = np.random.default_rng(0)
        self._records: list[RequestRecord | None] = [None] * num_requests
        self._num_started = 0
        self._num_recorded = 0
        self._num_tokens = 0
        self._error: str | None = None
        self._live: set[str] = set()
        self._lock = threading.Lock()
        self._done = threading.Event()

    def run(self, timeout: float) -> LoadResult:
        """Raises:
        TimeoutError: if it takes longer than `timeout` seconds.
        RuntimeError: if the engine fails.
        """
        before = self._engine.stats()
        busy_before = self._engine.busy_times()
        started = time.perf_counter()
        for _ in range(self._concurrency):
            self._start_next()
        finished = self._done.wait(timeout)
        duration = time.perf_counter() - started
        tokens = self._engine.stats().generation_tokens - before.generation_tokens
        busy, idle = (after - at_start for after, at_start in zip(self._engine.busy_times(), busy_before, strict=True))
        for request_id in list(self._live):
            self._engine.abort(request_id)
        if self._error is not None:
            raise RuntimeError(f"a request failed: {self._error}")
        if not finished:
            raise TimeoutError(f"{self._num_recorded} of {self._num_requests} requests ended within {timeout} s")
        return LoadResult(
            records=[record for record in self._records if record is not None],
            tokens_per_second=tokens / duration,
            host_gap=idle / busy if busy else 0.0,
        )

    def _start_next(self) -> None:
        with self._lock:
            index, self._num_started = self._num_started, self._num_started + 1
            lengths = next(self._lengths)
            prompt = random_prompt(self._random, lengths.prompt, self._engine.model_config.vocab_size)
        sampling = SamplingParams(max_tokens=lengths.output, temperature=self._temperature, seed=index, ignore_eos=True)
        submitted = time.perf_counter()
        first = 0.0
        count = 0

        def on_output(output: RequestOutput) -> None:
            nonlocal first, count
            now = time.perf_counter()
            count += len(output.token_ids)
            if first == 0.0:
                first = now
            if output.finish_reason is None:
                return
            self._live.discard(output.request_id)
            if output.finish_reason == "error":
                self._error = output.error
                self._done.set()
            elif output.finish_reason != "abort":
                self._record(index, RequestRecord(lengths.prompt, count, submitted, first, now))

        self._live.add(self._engine.submit_with_callback(prompt, sampling, on_output))

    def _record(self, index: int, record: RequestRecord) -> None:
        """Engine thread: keeps a measured request's record, and starts the next one in its place."""
        if index < self._num_requests:
            self._records[index] = record
            self._num_recorded += 1
            if self._num_recorded == self._num_requests:
                self._done.set()
        if not self._done.is_set():
            self._start_next()
