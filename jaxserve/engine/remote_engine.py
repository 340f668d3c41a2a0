"""An engine in a process of its own, with the face of `EngineClient`: the device is that process's alone."""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import logging
import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing import connection, resource_tracker
from typing import Any

from jaxserve.constraint import Constraint
from jaxserve.engine.client import EngineStats
from jaxserve.engine.engine_process import SIGNALS, ProcessSetup, run_engine_process
from jaxserve.engine.process_messages import (
    Abort,
    Call,
    CallName,
    ConstraintSource,
    Event,
    Failed,
    Ready,
    Reply,
    Shutdown,
    Snapshot,
    StartEngine,
    Submit,
    decode,
    pickled,
)
from jaxserve.engine.request import EngineStoppedError, RequestOutput, token_bytes
from jaxserve.engine.submissions import Receiver, Submissions, SubmittingEngine
from jaxserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

STOP_SECONDS = 8.0  # what the process gets to end its current step, before it is killed
_EXIT_SECONDS = 5.0  # between a process's last word and its end


class EngineProcessError(RuntimeError):
    """The engine's process has ended by itself."""


class RemoteEngine(SubmittingEngine):
    """Offers what `EngineClient` does. Starts the process, and waits until its engine runs.

    Requests are checked and counted here, so that a refusal is raised at once; what only the other process can know
    (constraints that do not compile, a replica that has just failed) comes as an output with an error.

    Args:
        start: builds the engine, in its process.
        setup: how that process logs and shows progress.

    Raises:
        EngineProcessError: the process ended while it loaded.
        Exception: whatever `start` raised.
    """

    def __init__(self, start: StartEngine, setup: ProcessSetup) -> None:
        super().__init__()
        self.failure: BaseException | None = None
        self._stopped = self._draining = False
        self._ended = False  # whether the process will bring nothing more
        self._end_lock = threading.Lock()
        self._process_lock = threading.Lock()
        self._call_numbers = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._pipe, self._process = _start_process(start, setup)
        # At exit multiprocessing would send it SIGTERM, which it ignores, and wait for its end.
        atexit.register(self._process.kill)
        try:
            ready = self._wait_ready()
        except BaseException as error:
            self._end_process(_EXIT_SECONDS if isinstance(error, Exception) else 0.0)
            self._pipe.close()
            raise
        self.config = ready.config
        self.model_config = ready.model_config
        self.device_kind = ready.device_kind
        self.max_model_len = ready.max_model_len
        self._snapshot = ready.snapshot
        self._snapshot_at = time.monotonic()
        self._submissions = Submissions(
            ready.config, ready.model_config.vocab_size, ready.limits, self.abort, num_engines=ready.num_engines
        )
        self._receiver = threading.Thread(target=self._receive, name="jaxserve-outputs", daemon=True)
        self._sender = threading.Thread(target=self._send, name="jaxserve-commands", daemon=True)
        self._receiver.start()
        self._sender.start()

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return self._snapshot.is_ready and not (self._draining or self._stopped or self.failure)

    @property
    def num_live(self) -> int:
        return self._submissions.num_live

    @property
    def process_id(self) -> int:
        """Of the engine's process."""
        return self._process.pid or 0

    def submit_as(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        receiver: Receiver,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> None:
        self._submissions.check(prompt_token_ids, sampling, priority)
        if not self.is_ready:
            raise EngineStoppedError("the engine takes no new requests: it drains, was shut down, or failed")
        command = pickled(Submit(request_id, token_bytes(prompt_token_ids), sampling, cache_salt, priority))
        with self._end_lock:
            if self._ended:
                raise EngineStoppedError("the engine has stopped")
            self._submissions.admit(request_id, len(prompt_token_ids), sampling.n, receiver)
        self._commands.put(command)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._commands.put(pickled(Abort(request_id, index)))

    def flush_prefix_cache(self) -> Future[int]:
        """As `EngineClient.flush_prefix_cache`."""
        return self._call("flush_prefix_cache")

    def pin_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """As `EngineClient.pin_prompt`."""
        self._call("pin_prompt", token_bytes(prompt_token_ids)).result()

    def compile_constraint(self, source: Any) -> Future[Constraint]:
        """Has a constraint compiled in the engine's process, where it stays; the result stands for it.

        The result raises whatever is wrong with the source, and `EngineStoppedError`. If it is cancelled, nothing is
        compiled that nobody else waits for.
        """
        compiled: Future[Constraint] = Future()

        def done(call: Future[None]) -> None:
            error = call.exception()
            if not compiled.set_running_or_notify_cancel():
                return
            if error is None:
                compiled.set_result(ConstraintSource(source))
            else:
                compiled.set_exception(error)

        def drop(compiled: Future[Constraint]) -> None:
            if compiled.cancelled():
                self._call("drop_constraint", source)

        self._call("compile_constraint", source).add_done_callback(done)
        compiled.add_done_callback(drop)
        return compiled

    def stats(self) -> EngineStats:
        """The latest numbers that came: those after the last answer that ended, and at most 0.1 s old while work runs."""
        return _aged(self._snapshot.stats, time.monotonic() - self._snapshot_at)

    def busy_times(self) -> tuple[float, float]:
        """As `EngineClient.busy_times`."""
        stats = self._snapshot.stats
        return stats.busy_s, stats.device_idle_s

    def start_draining(self) -> None:
        """Takes no new requests from now on; those that run go on."""
        self._draining = True

    def shutdown(self) -> None:
        """Stops the engine and ends its process; requests that still run get finish_reason "error"."""
        self._stopped = True
        self._commands.put(pickled(Shutdown()))
        if not self._end_process(STOP_SECONDS):
            logger.error("the engine's process did not end within %g s and was killed", STOP_SECONDS)
        if threading.current_thread() is not self._receiver:
            self._receiver.join()
        self._commands.put(None)
        self._sender.join()
        self._pipe.close()

    def _call(self, name: CallName, argument: Any = None) -> Future[Any]:
        number = next(self._call_numbers)
        result: Future[Any] = Future()
        result.set_running_or_notify_cancel()  # a cancelled one would raise in the thread that brings outputs
        with self._end_lock:
            if not self._ended:
                self._calls[number] = result
                self._commands.put(pickled(Call(number, name, argument)))
                return result
        result.set_exception(EngineStoppedError("the engine has stopped"))
        return result

    def _send(self) -> None:
        """The thread that writes commands, which may have to wait for the other process to read them."""
        while (command := self._commands.get()) is not None:
            try:
                self._pipe.send_bytes(command)
            except OSError:
                return  # it has ended, and `_receive` tells everybody

    def _receive(self) -> None:
        """The thread that reads what the process sends, to its end."""
        error: BaseException | None = None
        try:
            while True:
                outputs, event = decode(self._pipe.recv_bytes())
                if event is not None:
                    self._take(event)
                self._submissions.distribute(outputs)
        except (EOFError, OSError):
            if not self._stopped:
                error = EngineProcessError(f"the engine's process {self._how_it_ended()}")
        except Exception as fault:
            logger.exception("what the engine's process sends cannot be read")
            error = fault
        if error is not None and self.failure is None:
            self.failure = error
        self._fail_live("the engine was shut down" if error is None else "the engine failed")

    def _take(self, event: Event) -> None:
        match event:
            case Snapshot():
                self._snapshot, self._snapshot_at = event, time.monotonic()
            case Failed(error):
                self.failure = error
            case Reply(number, value, error):
                call = self._calls.pop(number)
                if error is None:
                    call.set_result(value)
                else:
                    call.set_exception(error)
            case Ready():
                raise RuntimeError("the engine's process started twice")

    def _fail_live(self, message: str) -> None:
        with self._end_lock:
            self._ended = True
        for call in self._calls.values():
            call.set_exception(EngineStoppedError(message))
        self._submissions.distribute([
            RequestOutput(*key, (), finish_reason="error", error=message, is_retryable=True)
            for key in self._submissions.live()
        ])  # fmt: skip

    def _wait_ready(self) -> Ready:
        try:
            _, event = decode(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise EngineProcessError(f"the engine's process {self._how_it_ended()} while it loaded") from None
        if isinstance(event, Failed):
            raise event.error
        if not isinstance(event, Ready):
            raise RuntimeError(f"the engine's process began with {type(event).__name__}")
        return event

    def _how_it_ended(self) -> str:
        self._wait_process(_EXIT_SECONDS)
        code = self._process.exitcode
        if code is None:
            return "closed its connection, though it still runs"
        if code < 0:
            name = next((f" ({known.name})" for known in signal.Signals if known == -code), "")
            return f"was ended by signal {-code}{name}"
        return f"ended with exit code {code}"

    def _wait_process(self, timeout: float) -> bool:
        """Whether it has ended within that time. Any thread."""
        deadline = time.monotonic() + timeout
        connection.wait([self._process.sentinel], timeout)
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(0.005)  # it has let go of all it had open, and is about to end
        return self._has_ended()

    def _has_ended(self) -> bool:
        with self._process_lock:  # of two threads that ask for it, one would not get the exit code
            return self._process.exitcode is not None

    def _end_process(self, timeout: float) -> bool:
        """Waits for the process to end, and kills it after a while: False."""
        has_ended = self._wait_process(timeout)
        if not has_ended:
            self._process.kill()
            self._wait_process(_EXIT_SECONDS)
        atexit.unregister(self._process.kill)
        return has_ended


def _start_process(start: StartEngine, setup: ProcessSetup) -> tuple[connection.Connection, Any]:
    """The parent's end of the pipe, and the process, which alone has the other end: so each sees when the other ends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=run_engine_process, args=(theirs, start, setup), name="jaxserve-engine", daemon=True
    )
    with _blocked_signals():
        process.start()
    theirs.close()
    return ours, process


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """A process that is started here begins with these signals blocked, until it can say what it does about them."""
    resource_tracker.ensure_running()  # at its own start it would let them through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _aged(stats: EngineStats, seconds: float) -> EngineStats:
    """The same numbers, with the time that has passed since."""
    return dataclasses.replace(
        stats,
        uptime_s=stats.uptime_s + seconds,
        replicas=tuple(replica and _aged(replica, seconds) for replica in stats.replicas),
    )
