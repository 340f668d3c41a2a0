"""The engine thread: takes commands, schedules, launches, fetches one step late, hands out what is new."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxserve.engine.request import EngineStoppedError, RequestError, RequestOutput
from jaxserve.engine.runner_protocol import Runner
from jaxserve.engine.schedule import ScheduledBatch
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.time_histogram import TimeHistogram
from jaxserve.engine.token_masks import MaskWriter, is_constrained

logger = logging.getLogger(__name__)

_STEP_BOUNDS = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0,
    5.0,
)  # fmt: skip

OutputSink = Callable[[list[RequestOutput]], None]


@dataclass(frozen=True)
class LoopStats:
    """Counters of the loop; times in seconds.

    Attributes:
        device_idle: time that the host took for its part of a step while nothing was left for the device to do. If the
            device got done meanwhile, half of it.
        busy: time in which there was work.
        last_step: between the last two fetches.
        host: what the host took for scheduling and launching steps, while the device worked or not.
        last_host: what it took for the last one.
    """

    num_steps: int = 0
    busy: float = 0.0
    device_idle: float = 0.0
    last_step: float = 0.0
    host: float = 0.0
    last_host: float = 0.0


@dataclass(frozen=True)
class _Add:
    sequences: tuple[Sequence, ...]


@dataclass(frozen=True)
class _Abort:
    request_id: str
    index: int | None


@dataclass(frozen=True)
class _Call:
    function: Callable[[], Any]
    result: Future[Any]

    def run(self) -> None:
        try:
            self.result.set_result(self.function())
        except Exception as error:
            self.result.set_exception(error)


@dataclass(frozen=True)
class _Stop:
    pass


class EngineLoop:
    """Runs scheduler and runner in a thread of its own; nothing else touches them while it runs.

    Step N + 1 is launched before the tokens of step N are fetched, so that the device does not wait for the host. Where a
    row of step N + 1 has a constraint, only its forward pass is: its sampling is launched when the tokens of step N are
    known and the masks are written, which the device spends on the forward pass. It waits for the host for as long as that
    takes longer, and then for the next step to be scheduled; every row of such a step does.

    Args:
        masks: writes the masks of constrained rows; None: no request may have a constraint.
        sink: called in the engine thread with what each step brought; must return quickly.
        on_failure: called in the engine thread when a step raised, before every live request gets an error output.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sink: OutputSink,
        on_failure: Callable[[BaseException], None],
        masks: MaskWriter | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sink = sink
        self._on_failure = on_failure
        self._masks = masks
        self._commands: queue.SimpleQueue[_Add | _Abort | _Call | _Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._live: set[tuple[str, int]] = set()
        self._stopping = False
        self._end_lock = threading.Lock()
        self._ended = False  # whether the commands have been read for the last time
        self.step_times = TimeHistogram(_STEP_BOUNDS)  # between fetches, while there is work
        self.host_times = TimeHistogram(_STEP_BOUNDS)  # that the host took to schedule and launch each of these steps
        self.stats = LoopStats()  # replaced as a whole, so that any thread reads one moment

    def start(self) -> None:
        self._thread.start()

    def add(self, sequences: tuple[Sequence, ...]) -> None:
        """Queues the choices of one request; they get an error output if the thread has ended. Any thread."""
        with self._end_lock:
            if not self._ended:
                self._commands.put(_Add(sequences))
                return
        keys = [(sequence.request.request_id, sequence.index) for sequence in sequences]
        stopped = "the engine has stopped"
        self._sink([RequestOutput(*key, (), finish_reason="error", error=stopped, is_retryable=True) for key in keys])

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request or one of its choices. Any thread."""
        self._commands.put(_Abort(request_id, index))

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Runs a function in the engine's thread, between steps; it must be quick. Any thread.

        The result raises `EngineStoppedError` if the thread has ended. It cannot be cancelled.
        """
        call = _Call(function, Future())
        call.result.set_running_or_notify_cancel()  # a cancelled one would raise in the engine's thread
        with self._end_lock:
            if not self._ended:
                self._commands.put(call)
                return call.result
        call.result.set_exception(EngineStoppedError("the engine has stopped"))
        return call.result

    def stop(self, timeout: float | None = None) -> None:
        """Ends the thread; requests that still run get an error output."""
        self._commands.put(_Stop())
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def fail(self, error: BaseException) -> None:
        """Gives up, though the thread may wait for a device that never answers: live requests get an error output."""
        self._on_failure(error)
        self._fail_live_requests("the engine failed")

    def _run(self) -> None:
        try:
            self._loop()
            self._fail_live_requests("the engine was shut down")
        except Exception as error:
            logger.exception("the engine thread failed")
            self.fail(error)
        finally:
            self._runner.close()
            del self._runner  # so that the device is free even while somebody holds on to a stream, and it to this

    def _loop(self) -> None:
        pending: Any = None
        last_fetch = time.perf_counter()
        while True:
            idle = pending is None and not self._scheduler.has_work
            self._take_commands(block=idle)
            if self._stopping:
                if pending is not None:
                    self._runner.fetch(pending[1])  # so that nothing runs on the device when the thread has ended
                return
            if idle:
                last_fetch = time.perf_counter()
            waited_for_host = pending is not None and self._runner.is_ready(pending[1])
            started = time.perf_counter()
            batch = self._scheduler.schedule()
            waits = is_constrained(batch)
            launched = self._launch(batch) if batch and not waits else None
            logits = self._runner.launch_forward(batch) if waits else None
            host_time = time.perf_counter() - started
            device_idle = self._device_idle(pending, waited_for_host, host_time) if batch else 0.0
            if pending is None and not batch:
                self._deliver(self._scheduler.take_pending_outputs())
                if self._scheduler.waiting or self._scheduler.running:
                    raise RuntimeError(
                        f"nothing can be scheduled: {len(self._scheduler.waiting)} waiting, "
                        f"{len(self._scheduler.running)} running, {self._scheduler.pages.num_free} free pages"
                    )
                continue
            if pending is not None:
                sampled = self._runner.fetch(pending[1])
                fetched_at = time.perf_counter()
                outputs = self._scheduler.update(pending[0], sampled)
                self._deliver(outputs)
                self._scheduler.observe_step(pending[0], fetched_at - last_fetch)
                self._count_step(fetched_at - last_fetch, device_idle, host_time)
                last_fetch = fetched_at
            if waits:
                launched = self._launch_masked_sample(batch, logits)
            pending = None if launched is None else (batch, launched)

    def _launch(self, batch: ScheduledBatch) -> Any:
        return self._runner.launch_sample(self._runner.launch_forward(batch))

    def _launch_masked_sample(self, batch: ScheduledBatch, logits: Any) -> Any:
        """Starts the sampling of a launched step with constrained rows; every token before it is known."""
        if self._masks is None:
            raise RuntimeError("a request has a constraint, and this engine was built without masks")
        drafted = self._runner.fetch_drafts(logits) if batch.num_drafts else None
        masks = self._masks.write(batch, drafted)
        for sequence, message in masks.failed:
            self._scheduler.fail(sequence, message)
        launched = self._runner.launch_sample(logits, masks.words)
        self._masks.find_forced(masks)
        return launched

    def _device_idle(self, pending: Any, waited_for_host: bool, host_time: float) -> float:
        """How long the device had nothing to do while the host launched a step: all that time, none of it, or a part."""
        if pending is None:
            return 0.0
        if waited_for_host:
            return host_time
        return host_time / 2 if self._runner.is_ready(pending[1]) else 0.0

    def _count_step(self, duration: float, idle: float, host: float) -> None:
        stats = self.stats
        self.step_times.add(duration)
        self.host_times.add(host)
        self.stats = LoopStats(
            num_steps=stats.num_steps + 1,
            busy=stats.busy + duration,
            device_idle=stats.device_idle + idle,
            last_step=duration,
            host=stats.host + host,
            last_host=host,
        )

    def _take_commands(self, *, block: bool) -> None:
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return
            block = False
            match command:
                case _Add(sequences):
                    self._add(sequences)
                case _Abort(request_id, index):
                    self._scheduler.abort(request_id, index)
                case _Call():
                    command.run()
                case _Stop():
                    self._stopping = True
                    return

    def _add(self, sequences: tuple[Sequence, ...]) -> None:
        for sequence in sequences:
            key = (sequence.request.request_id, sequence.index)
            self._live.add(key)
            try:
                self._scheduler.add(sequence)
            except RequestError as error:
                self._deliver([RequestOutput(*key, (), finish_reason="error", error=str(error))])

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        if not outputs:
            return
        for output in outputs:
            if output.finish_reason is not None:
                self._live.discard((output.request_id, output.index))
        self._sink(outputs)

    def _fail_live_requests(self, message: str) -> None:
        if self._masks is not None:
            self._masks.close()
        with self._end_lock:
            self._ended = True
        while not self._commands.empty():  # requests that came too late for the scheduler
            command = self._commands.get()
            if isinstance(command, _Add):
                self._live.update((sequence.request.request_id, sequence.index) for sequence in command.sequences)
            elif isinstance(command, _Call):
                command.result.set_exception(EngineStoppedError("the engine has stopped"))
        live = sorted(self._live)
        self._deliver(
            [RequestOutput(*key, (), finish_reason="error", error=message, is_retryable=True) for key in live]
        )
