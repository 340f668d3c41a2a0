"""The server as a process: it binds, listens, loads, serves, drains and exits, and its exit code says how that went."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import uvicorn

from jaxserve.config import ServerConfig
from jaxserve.protocol.service import OpenAIService
from jaxserve.server.app import create_app
from jaxserve.server.connection import raise_file_limit, uvicorn_config
from jaxserve.server.listener import listener, shown_address
from jaxserve.server.slot import ServiceSlot
from jaxserve.server.thread_call import ThreadCall
from jaxserve.server.traces import tracer_for
from jaxserve.version import version

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CUT_SHORT = 3  # the shutdown timeout ran out, and answers were ended with an error

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_SECONDS = 0.2  # how soon a failure of the engine is noticed
_STOP_SECONDS = 10.0  # what the engine gets to end its current step
_THREADS_SECONDS = 1.0  # what threads get to end that have nothing to do any more
_TRACE_SECONDS = 3.0  # what the last traces get to be sent in
_MAX_RESTARTS = 5  # within the window, with --restart-engine; then the fault is not one that passes
_FAILURE_WINDOW_SECONDS = 600.0
_FLUSH_SECONDS = 2.0  # what error events get to reach their clients


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handling, which ends the process by the signal it was sent instead of an exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(load: Callable[[], OpenAIService], config: ServerConfig) -> int:
    """Serves what `load` returns until SIGTERM or SIGINT, or until the engine fails.

    Returns:
        The exit code. While it loads, probes are answered with 503; a second signal ends the process at once.

    Raises:
        RuntimeError: it cannot listen on the address, use the TLS files, or keep traces.
        Exception: whatever `load` raised.
    """
    raise_file_limit()
    with listener(config) as bound:
        process = _Process(load, config, bound)
        with asyncio.Runner(loop_factory=process.uvicorn_config.get_loop_factory()) as runner:
            exit_code = runner.run(process.serve())
            for number in _SIGNALS:  # the loop that would have heard of them has ended
                signal.signal(number, signal.SIG_DFL)
            if process.is_stuck or not _threads_end(_THREADS_SECONDS):
                # What compiles cannot be interrupted, and a thread inside it may crash an interpreter that ends around it.
                # Others would be waited for, by the loop or by Python, however long they take.
                logging.shutdown()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(exit_code)
    return exit_code


def _threads_end(seconds: float) -> bool:
    """Whether all threads of ours end within that time; they were told to."""
    deadline = time.monotonic() + seconds
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("jaxserve-")]
    for thread in ours:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in ours)


class _Process:
    """One run of the server, from the bound socket to the exit code."""

    def __init__(self, load: Callable[[], OpenAIService], config: ServerConfig, bound: socket.socket) -> None:
        self._config = config
        self._listener = bound
        self._slot = ServiceSlot()
        self._tracer = tracer_for(config.otlp_traces_endpoint, version())
        self.uvicorn_config = uvicorn_config(create_app(self._slot, config, self._tracer), config)
        self._server = QuietServer(self.uvicorn_config)
        self._load = load
        self._calls: list[ThreadCall[Any]] = []
        self._stop = asyncio.Event()
        self._failures: list[float] = []  # when the engine failed

    @property
    def is_stuck(self) -> bool:
        """Whether a thread still loads, or waits for an engine or a collector of traces that does not answer."""
        return any(call.is_alive() for call in self._calls)

    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        work = ThreadPoolExecutor(thread_name_prefix="jaxserve-work")
        loop.set_default_executor(work)
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        logger.info("listening on %s", shown_address(self._listener, self._config))
        try:
            return await self._load_and_watch()
        finally:
            self._server.should_exit = True
            await serving
            if self._slot.service is not None:
                await self._call_in_time(self._slot.service.close, "the engine does not stop", _STOP_SECONDS)
            if self._tracer is not None:
                await self._call_in_time(self._tracer.close, "the last traces are not sent", _TRACE_SECONDS)
            work.shutdown(wait=False, cancel_futures=True)

    async def _load_and_watch(self) -> int:
        stopped = asyncio.create_task(self._stop.wait())
        try:
            while True:
                loading = self._call(self._load)
                await asyncio.wait({stopped, loading.result}, return_when=asyncio.FIRST_COMPLETED)
                if not loading.result.done():
                    logger.info("stopped before the model was loaded")
                    return EXIT_OK
                self._slot.fill(loading.result.result())
                del loading  # it holds the service
                failed = await self._watch(self._slot.loaded(), stopped)
                if not failed:
                    return await self._drain(self._slot.loaded())
                await self._finish_responses(_FLUSH_SECONDS)
                if not self._may_restart():
                    return EXIT_FAILED
                await self._discard_engine()
        finally:
            stopped.cancel()

    async def _watch(self, service: OpenAIService, stopped: asyncio.Task[bool]) -> bool:
        """Waits for a signal (False) or for the engine to fail (True)."""
        logger.info("ready: %s on %s", service.model_name, service.engine.device_kind)
        while not stopped.done():
            if service.engine.failure is not None:
                logger.critical("the engine failed: %s", service.engine.failure, exc_info=service.engine.failure)
                return True
            await asyncio.wait({stopped}, timeout=_POLL_SECONDS)
        return False

    def _may_restart(self) -> bool:
        if not self._config.restart_engine:
            return False
        now = asyncio.get_running_loop().time()
        self._failures = [*(at for at in self._failures if now - at < _FAILURE_WINDOW_SECONDS), now]
        if len(self._failures) > _MAX_RESTARTS:
            logger.critical(
                "the engine failed %d times within %g s: giving up", len(self._failures), _FAILURE_WINDOW_SECONDS
            )
            return False
        return True

    async def _discard_engine(self) -> None:
        """Lets go of the failed engine and of all that it has on the device, so that there is room for the next."""
        service = self._slot.loaded()
        self._slot.empty()
        await self._call_in_time(service.close, "the engine does not stop", _STOP_SECONDS)
        if service.engine.failure is not None:
            traceback.clear_frames(service.engine.failure.__traceback__)  # they hold the device's arrays
        del service
        self._calls = [call for call in self._calls if call.is_alive()]
        gc.collect()
        logger.info("building the engine anew")

    async def _drain(self, service: OpenAIService) -> int:
        timeout = self._config.shutdown_timeout
        logger.info("draining: running answers get up to %g s", timeout)
        self._slot.start_draining()
        deadline = asyncio.get_running_loop().time() + timeout
        drained = await service.engine.wait_drained(timeout)
        left = max(deadline - asyncio.get_running_loop().time(), 0.1)
        if drained and await self._finish_responses(left, cuts=False):
            return EXIT_FAILED if service.engine.failure is not None else EXIT_OK
        logger.warning("shutdown timeout of %g s is over: ending the answers that still run", timeout)
        await self._call_in_time(service.close, "the engine does not stop", _STOP_SECONDS)
        await self._finish_responses(_FLUSH_SECONDS)
        return EXIT_CUT_SHORT

    def _call(self, work: Callable[[], ResultT]) -> ThreadCall[ResultT]:
        call = ThreadCall(work)
        self._calls.append(call)
        return call

    async def _call_in_time(self, work: Callable[[], object], complaint: str, seconds: float) -> None:
        """Calls it in a thread, since it may wait for what never answers; complains and goes on after a while."""
        call = self._call(work)
        done, _ = await asyncio.wait({call.result}, timeout=seconds)
        if not done:
            logger.error("%s within %g s; going on without it", complaint, seconds)
            call.result.cancel()
        else:
            call.result.result()

    async def _finish_responses(self, timeout: float, *, cuts: bool = True) -> bool:
        """Waits until every request was answered; False if that takes longer than `timeout` seconds.

        Args:
            cuts: those that were not are ended without an answer.
        """
        try:
            async with asyncio.timeout(timeout):
                while tasks := set(self._server.server_state.tasks):
                    await asyncio.wait(tasks)
        except TimeoutError:
            for task in self._server.server_state.tasks if cuts else ():
                task.cancel()
            return False
        return True

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            os._exit(128 + number)
        logger.info("%s: shutting down; a second signal ends the process at once", signal.Signals(number).name)
        self._stop.set()
