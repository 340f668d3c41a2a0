"""The process that an engine has to itself: starts it, does what it is told, sends what steps bring.

The threads of an engine and of a server in one process wait for each other's hold on the interpreter, many times in each
step. Here the engine's thread only puts a step's outputs into a queue; this process's main thread sends them.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from jaxserve.constraint import Constraint
from jaxserve.engine.process_messages import (
    Abort,
    Call,
    Command,
    ConstraintSource,
    Event,
    Failed,
    HostedEngine,
    Ready,
    Reply,
    Shutdown,
    Snapshot,
    StartEngine,
    Submit,
    encode_event,
    encode_outputs,
    portable,
)
from jaxserve.engine.request import EngineStoppedError, QueueFullError, RequestError, RequestOutput
from jaxserve.engine.submissions import StepReceiver
from jaxserve.progress import Progress

logger = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 0.1  # between snapshots of the engine's numbers, while they change
_SETTLE_SECONDS = 0.02  # from the end of an answer until its slot and its pages are free
_THREADS_SECONDS = 1.0  # that the engine's helpers get to end after it
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # the parent's business: it drains first
EXIT_OK = 0
EXIT_FAILED = 1


@dataclass(frozen=True)
class ProcessSetup:
    """How the engine's process speaks to people. Both are called in it, and can be pickled."""

    configure_logging: Callable[[], None]
    make_progress: Callable[[], Progress]


def run_engine_process(pipe: Connection, start: StartEngine, setup: ProcessSetup) -> None:
    """The process's main function; it comes back when the engine was shut down, and ends the process otherwise."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # they were blocked until somebody ignored them
    setup.configure_logging()
    host = _Host(pipe)
    try:
        hosted = start(setup.make_progress())
    except Exception as error:
        pipe.send_bytes(encode_event(Failed(portable(error))))
        _exit(EXIT_FAILED)
        return
    # Else, each time that Python looks through all objects for cycles, no step is launched for a tenth of a second or more:
    # what loading and compiling have left is a quarter of a million of them.
    gc.collect()
    gc.freeze()
    host.serve(hosted)
    if hosted.engine.failure is not None:
        _exit(EXIT_FAILED)  # a thread may still wait for a device, and jax for hosts that are gone
    hosted.close()
    if not _threads_end(_THREADS_SECONDS):
        _exit(EXIT_OK)  # nobody waits for the constraint that one of them still compiles


class _Host:
    """The engine's process between its two pipes' ends."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._outgoing: queue.SimpleQueue[list[RequestOutput] | Event | None] = queue.SimpleQueue()  # None: the end
        self._receiver = StepReceiver(self._outgoing.put)
        self._compiling: dict[str, Submit] = {}  # requests whose constraint is not there yet
        self._lock = threading.Lock()
        self._hosted: HostedEngine | None = None
        # From the start on, so that the process ends with its parent even while it loads.
        threading.Thread(target=self._receive, name="jaxserve-commands", daemon=True).start()

    def serve(self, hosted: HostedEngine) -> None:
        """Sends what the engine brings until it is shut down."""
        engine = hosted.engine
        self._hosted = hosted
        snapshot = self._snapshot(hosted)
        config = engine.config
        ready = Ready(
            config=config,
            model_config=engine.model_config,
            device_kind=engine.device_kind,
            max_model_len=engine.max_model_len,
            limits=engine.limits,
            num_engines=config.data_parallel_size,
            snapshot=snapshot,
        )
        try:
            self._pipe.send_bytes(encode_event(ready))
            self._send(hosted, snapshot)
        except OSError:
            _exit(EXIT_FAILED)  # the parent is gone

    def _send(self, hosted: HostedEngine, sent: Snapshot) -> None:
        """Sends outputs, events, and snapshots: as sequences come and go, and from time to time."""
        due = time.monotonic() + SNAPSHOT_SECONDS
        has_failed = False
        is_last = False
        while not is_last:
            outputs, events, is_last = self._take(max(0.0, due - time.monotonic()))
            failure = hosted.engine.failure
            if failure is not None and not has_failed:  # before the outputs that say so of each request
                has_failed = True
                self._pipe.send_bytes(encode_event(Failed(portable(failure))))
            has_ended = any(output.finish_reason is not None for output in outputs)
            is_due = has_ended or bool(events) or is_last or time.monotonic() >= due
            if is_due:
                due = time.monotonic() + (_SETTLE_SECONDS if has_ended else SNAPSHOT_SECONDS)
            news = self._news(hosted, sent) if is_due or hosted.engine.sequence_counts() != _counts(sent) else None
            sent = news or sent
            if outputs or news is not None:
                self._pipe.send_bytes(encode_outputs(outputs, news))
            for event in events:  # with numbers that know of them
                self._pipe.send_bytes(encode_event(event))

    def _take(self, timeout: float) -> tuple[list[RequestOutput], list[Event], bool]:
        """All that waits to be sent; waits for something. And whether it is the last."""
        outputs: list[RequestOutput] = []
        events: list[Event] = []
        try:
            item = self._outgoing.get(timeout=timeout)
            while item is not None:
                if isinstance(item, list):
                    outputs += item
                else:
                    events.append(item)
                item = self._outgoing.get_nowait()
        except queue.Empty:
            return outputs, events, False
        return outputs, events, True

    def _snapshot(self, hosted: HostedEngine) -> Snapshot:
        return Snapshot(hosted.engine.stats(), hosted.engine.is_ready)

    def _news(self, hosted: HostedEngine, sent: Snapshot) -> Snapshot | None:
        """The engine's numbers of now; None: nothing happened since the last ones."""
        snapshot = self._snapshot(hosted)
        return None if _is_same(snapshot, sent) else snapshot

    def _receive(self) -> None:
        """The thread that does what the parent says."""
        try:
            while self._obey(self._pipe.recv()):
                pass
        except (EOFError, OSError):
            _exit(EXIT_FAILED)  # the parent is gone, and nobody waits for anything here
        except BaseException:
            logger.exception("the engine's process cannot go on")
            _exit(EXIT_FAILED)

    def _obey(self, command: Command) -> bool:
        """Does what is asked; whether there will be more."""
        hosted = self._hosted
        if hosted is None:
            raise RuntimeError(f"{type(command).__name__} before the engine runs")
        match command:
            case Submit():
                self._submit(hosted, command)
            case Abort(request_id, index):
                self._abort(hosted, request_id, index)
            case Call():
                self._call(hosted, command)
            case Shutdown():
                if hosted.engine.failure is None:
                    hosted.engine.shutdown()
                self._outgoing.put(None)
                return False
        return True

    def _submit(self, hosted: HostedEngine, command: Submit) -> None:
        constraint = command.sampling.constraint
        if not isinstance(constraint, ConstraintSource):
            self._submit_now(hosted, command)
            return
        with self._lock:
            self._compiling[command.request_id] = command
        future = _compile(hosted, constraint.source)
        future.add_done_callback(lambda compiled: self._submit_compiled(hosted, command, compiled))

    def _submit_compiled(self, hosted: HostedEngine, command: Submit, compiled: Future[Constraint]) -> None:
        with self._lock:  # to the end: an abort comes before it, or finds the request in the engine
            if self._compiling.pop(command.request_id, None) is None:
                return  # aborted meanwhile
            try:
                sampling = dataclasses.replace(command.sampling, constraint=compiled.result())
            except Exception as error:
                self._refuse(command, error, is_retryable=isinstance(error, (QueueFullError, EngineStoppedError)))
                return
            self._submit_now(hosted, dataclasses.replace(command, sampling=sampling))

    def _submit_now(self, hosted: HostedEngine, command: Submit) -> None:
        prompt = tuple(array("i", command.prompt_bytes))
        try:
            hosted.engine.submit_as(
                command.request_id,
                prompt,
                command.sampling,
                self._receiver,
                cache_salt=command.cache_salt,
                priority=command.priority,
            )
        except RequestError as error:
            self._refuse(command, error, is_retryable=False)
        except (QueueFullError, EngineStoppedError) as error:  # a replica is gone, or the engine fails just now
            self._refuse(command, error, is_retryable=True)
        except Exception as error:  # a fault with one request must neither end the others nor let it wait for ever
            logger.exception("%s cannot be submitted", command.request_id)
            self._refuse(command, error, is_retryable=False)

    def _refuse(self, command: Submit, error: Exception, *, is_retryable: bool) -> None:
        self._end(command, "error", error=str(error), is_retryable=is_retryable)

    def _abort(self, hosted: HostedEngine, request_id: str, index: int | None) -> None:
        # One choice alone is only ever aborted after it brought something, and so after it was submitted.
        with self._lock:
            waiting = self._compiling.pop(request_id, None) if index is None else None
        if waiting is None:
            hosted.engine.abort(request_id, index)
            return
        if isinstance(waiting.sampling.constraint, ConstraintSource):
            hosted.drop_constraint(waiting.sampling.constraint.source)  # nobody may wait for it any more
        self._end(waiting, "abort")

    def _end(self, command: Submit, reason: Any, **fields: Any) -> None:
        """Ends all choices of a request that never came to the engine."""
        indices = range(command.sampling.n)
        self._outgoing.put([
            RequestOutput(command.request_id, index, (), finish_reason=reason, **fields) for index in indices
        ])  # fmt: skip

    def _call(self, hosted: HostedEngine, call: Call) -> None:
        match call.name:
            case "flush_prefix_cache":
                hosted.engine.flush_prefix_cache().add_done_callback(lambda future: self._reply(call, future))
            case "compile_constraint":
                future = _compile(hosted, call.argument)
                future.add_done_callback(lambda future: self._reply(call, future, has_value=False))
            case "drop_constraint":
                hosted.drop_constraint(call.argument)
                self._outgoing.put(Reply(call.number))
            case "pin_prompt":  # it blocks until the prompt is computed
                threading.Thread(target=self._pin, args=(hosted, call), name="jaxserve-pin", daemon=True).start()

    def _pin(self, hosted: HostedEngine, call: Call) -> None:
        done: Future[None] = Future()
        try:
            hosted.engine.pin_prompt(tuple(array("i", call.argument)))
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)
        self._reply(call, done)

    def _reply(self, call: Call, future: Future[Any], *, has_value: bool = True) -> None:
        error = EngineStoppedError("the engine has stopped") if future.cancelled() else future.exception()
        if error is not None:
            self._outgoing.put(Reply(call.number, error=portable(error)))
        else:
            self._outgoing.put(Reply(call.number, future.result() if has_value else None))


def _compile(hosted: HostedEngine, source: Any) -> Future[Constraint]:
    refused: Future[Constraint] = Future()
    if hosted.compile_constraint is None:
        refused.set_exception(RequestError("this engine takes no constraints"))
        return refused
    try:
        return hosted.compile_constraint(source)
    except (QueueFullError, EngineStoppedError) as error:
        refused.set_exception(error)
        return refused


def _counts(snapshot: Snapshot) -> tuple[int, int]:
    """As the engine's `sequence_counts` were."""
    return snapshot.stats.num_running, snapshot.stats.num_waiting


def _is_same(one: Snapshot, other: Snapshot) -> bool:
    """Whether nothing happened between the two."""
    aged = dataclasses.replace(one.stats, uptime_s=other.stats.uptime_s, replicas=())
    alike = dataclasses.replace(other.stats, replicas=())
    if aged != alike or one.is_ready != other.is_ready or len(one.stats.replicas) != len(other.stats.replicas):
        return False
    return all(
        (here is None) == (there is None)
        and (
            here is None
            or there is None
            or dataclasses.replace(here, uptime_s=there.uptime_s) == there
        )
        for here, there in zip(one.stats.replicas, other.stats.replicas, strict=True)
    )  # fmt: skip


def _threads_end(seconds: float) -> bool:
    """Whether all threads end within that time that Python would wait for: those of executors too, daemons or not."""
    deadline = time.monotonic() + seconds
    others = [
        thread
        for thread in threading.enumerate()
        if thread is not threading.current_thread() and (not thread.daemon or thread.name.startswith("jaxserve-"))
    ]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in others)


def _exit(code: int) -> None:
    """Ends the process at once: threads may be where an interpreter that ends around them crashes."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
