"""Clients in processes of their own, so that many streams do not wait for one interpreter's lock."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, cast

from jaxserve.bench.endpoint import EndpointOptions, EndpointStats, first_model
from jaxserve.bench.http_target import HttpTarget, OwnClient, StreamClient
from jaxserve.bench.load import OnEnd
from jaxserve.bench.records import RequestRecord, Snapshot
from jaxserve.bench.workload import Prompts
from jaxserve.bench.workload_files import Task
from jaxserve.engine.draft_stats import SpeculativeStats

ClientName = Literal["own", "openai"]

_WARM_UP_SECONDS = 60.0


def make_client(name: str, options: EndpointOptions) -> StreamClient:
    """Raises:
    ValueError: no client is called so.
    """
    if name == "own":
        return OwnClient(options)
    if name == "openai":
        from jaxserve.bench.openai_client import OpenAIClient  # here: the package is optional

        return OpenAIClient(options)
    raise ValueError(f"client {name!r} must be 'own' or 'openai'")


class ProcessTarget:
    """Spreads requests over worker processes, each with a client and an event loop. To be closed after use.

    Args:
        warms_up: have each client get one token of an answer first: what it sets up at its first request would count as
            the endpoint's time.
    """

    def __init__(
        self, options: EndpointOptions, prompts: Prompts, *, client: str, processes: int, warms_up: bool = False
    ) -> None:
        if processes < 1:
            raise ValueError(f"client {processes=} must be at least 1")
        self.model = options.model or first_model(options)
        context = multiprocessing.get_context("spawn")
        self._workers = []
        self._pipes: list[Connection] = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            arguments = (theirs, replace(options, model=self.model), prompts, client, warms_up)
            worker = context.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        self._on_end: dict[int, OnEnd] = {}
        self._tokens = [0.0] * processes
        self._answers = threading.Semaphore(0)  # to `stop` and `output_tokens`
        self._lock = threading.Lock()
        self._stats = EndpointStats(options)
        self._thread = threading.Thread(target=self._receive, name="bench-clients", daemon=True)
        self._thread.start()
        self._ask_all("tokens")  # comes back when every worker has started

    def start(self, index: int, task: Task, on_end: OnEnd) -> None:
        self._on_end[index] = on_end
        with self._lock:
            self._pipes[index % len(self._pipes)].send(("start", index, task))

    def stop(self) -> None:
        self._ask_all("stop")
        self._on_end.clear()

    def output_tokens(self) -> float:
        self._ask_all("tokens")
        return sum(self._tokens)

    def busy_times(self) -> tuple[float, float] | None:
        return self._stats.busy_times()

    def speculation(self) -> SpeculativeStats | None:
        return self._stats.speculation()

    def snapshot(self, seconds: float) -> Snapshot | None:
        return self._stats.snapshot(seconds)

    def close(self) -> None:
        self._ask_all("close")
        for worker in self._workers:
            worker.join()
        self._thread.join()
        self._stats.close()

    def _ask_all(self, question: str) -> None:
        """Sends it to every worker and waits for their answers.

        Raises:
            RuntimeError: a worker has ended.
        """
        with self._lock:
            for pipe in self._pipes:
                try:
                    pipe.send((question, 0, None))
                except OSError:
                    raise RuntimeError("a client process has ended unexpectedly; see its error above") from None
        for _ in self._pipes:
            self._answers.acquire()
        if not all(worker.is_alive() for worker in self._workers) and question != "close":
            raise RuntimeError("a client process has ended unexpectedly; see its error above")

    def _receive(self) -> None:
        open_pipes = list(self._pipes)
        while open_pipes:
            for pipe in cast(list[Connection], wait(open_pipes)):
                try:
                    message: Any = pipe.recv()
                except EOFError:
                    open_pipes.remove(pipe)
                    self._answers.release()  # whoever waits for it looks whether it lives
                    continue
                if isinstance(message, RequestRecord):
                    on_end = self._on_end.pop(message.index, None)
                    if on_end is not None:
                        on_end(message)
                else:
                    self._tokens[self._pipes.index(pipe)] = message
                    self._answers.release()


def _work(pipe: Connection, options: EndpointOptions, prompts: Prompts, client: str, warms_up: bool) -> None:
    """A worker's process: starts requests as it is told, and sends their records back."""
    target = HttpTarget(options, options.model or "", prompts, make_client(client, options))
    if warms_up:
        ended = threading.Event()
        target.start(0, Task(prompt=1, output=1), lambda record: ended.set())
        ended.wait(_WARM_UP_SECONDS)  # an endpoint that does not answer shows in what is measured
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:
            pipe.send(message)

    while True:
        question, index, task = pipe.recv()
        if question == "start":
            target.start(index, task, send)
            continue
        if question == "stop":
            target.stop()
        tokens = target.output_tokens()
        if question == "close":
            target.close()
            send(tokens)
            return
        send(tokens)
