"""An engine in this process as a target, by its callbacks: no HTTP, no text."""

from __future__ import annotations

import threading
import time

from jaxserve.bench.load import OnEnd
from jaxserve.bench.records import RequestRecord, Snapshot
from jaxserve.bench.workload import Prompts
from jaxserve.bench.workload_files import Task
from jaxserve.engine.client import EngineClient
from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.engine.replicas import ReplicatedEngine
from jaxserve.engine.request import RequestOutput
from jaxserve.sampling_params import SamplingParams


class InProcessTarget:
    """Sends prompts of random tokens; end-of-text is ignored, so that answers have the length that is asked for.

    Attributes:
        num_begun: requests whose first token has come.
    """

    def __init__(self, engine: EngineClient | ReplicatedEngine, prompts: Prompts, *, temperature: float) -> None:
        self._engine = engine
        self._prompts = prompts
        self._temperature = temperature
        self.num_begun = 0
        self._lock = threading.Lock()
        self._live: set[str] = set()
        self._ended_early: set[str] = set()  # requests that ended before `start` had noted them

    def start(self, index: int, task: Task, on_end: OnEnd) -> None:
        prompt = self._prompts.token_ids(task, index)
        sampling = SamplingParams(max_tokens=task.output, temperature=self._temperature, seed=index, ignore_eos=True)
        submitted = time.perf_counter()
        first = 0.0
        count = first_count = 0
        last = 0.0
        gaps: list[float] = []

        def on_output(output: RequestOutput) -> None:
            nonlocal first, last, count, first_count
            now = time.perf_counter()
            count += len(output.token_ids)
            if output.token_ids:
                if first == 0.0:
                    first, first_count = now, count
                    with self._lock:
                        self.num_begun += 1
                else:
                    gaps.append(round(1e3 * (now - last), 3))
                last = now
            if output.finish_reason is None:
                return
            self._forget(output.request_id)
            if output.finish_reason == "abort":
                return
            on_end(
                RequestRecord(
                    prompt_tokens=task.prompt,
                    output_tokens=count,
                    submitted=submitted,
                    first_token=first,
                    last_token=now,
                    index=index,
                    first_count=first_count,
                    error=output.error if output.finish_reason == "error" else None,
                    gaps_ms=gaps,
                )
            )

        request_id = self._engine.submit_with_callback(prompt, sampling, on_output)
        with self._lock:
            if request_id in self._ended_early:
                self._ended_early.remove(request_id)
            else:
                self._live.add(request_id)

    def stop(self) -> None:
        with self._lock:
            live = list(self._live)
        for request_id in live:
            self._engine.abort(request_id)

    def output_tokens(self) -> float:
        return self._engine.stats().generation_tokens

    def busy_times(self) -> tuple[float, float]:
        return self._engine.busy_times()

    def speculation(self) -> SpeculativeStats | None:
        return self._engine.stats().speculative

    def snapshot(self, seconds: float) -> Snapshot:
        stats = self._engine.stats()
        return Snapshot(
            time=seconds,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            used_pages=stats.num_pages - stats.num_free_pages,
            num_pages=stats.num_pages,
            generation_tokens=stats.generation_tokens,
            prompt_tokens=stats.prompt_tokens,
            num_steps=stats.num_steps,
            host_s=stats.host_s,
        )

    def _forget(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._live:
                self._live.remove(request_id)
            else:
                self._ended_early.add(request_id)
