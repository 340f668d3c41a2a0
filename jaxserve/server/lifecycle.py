"""The server as a process: it binds, listens, loads, serves, drains and exits, and its exit code says how that went."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import uvicorn

from jaxserve.config import ServerConfig
from jaxserve.protocol.service import OpenAIService
from jaxserve.server.app import create_app
from jaxserve.server.slot import ServiceSlot

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CUT_SHORT = 3  # the shutdown timeout ran out, and answers were ended with an error

_POLL_SECONDS = 0.2  # how soon a failure of the engine is noticed
_STOP_SECONDS = 10.0  # what the engine gets to end its current step
_FLUSH_SECONDS = 2.0  # what error events get to reach their clients


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which ends the process by the signal it was sent instead of an exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(load: Callable[[], OpenAIService], config: ServerConfig) -> int:
    """Serves what `load` returns until SIGTERM or SIGINT, or until the engine fails.

    Returns:
        The exit code. While it loads, probes are answered with 503; a second signal ends the process at once.

    Raises:
        RuntimeError: it cannot listen on the address.
        Exception: whatever `load` raised.
    """
    try:
        listener = bind(config.host, config.port)
    except OSError as error:
        raise RuntimeError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from error
    process = _Process(load, config, listener)
    with listener, asyncio.Runner(loop_factory=process.uvicorn_config.get_loop_factory()) as runner:
        exit_code = runner.run(process.serve())
    if process.is_stuck:
        # A compilation cannot be interrupted, and a thread inside one may crash an interpreter that ends around it.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening.

    Raises:
        OSError: the port is in use, the address is not ours, or the name has no address.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)  # at once: connections that come before the event loop runs wait, and are not refused
    except OSError:
        listener.close()
        raise
    return listener


class _Process:
    """One run of the server, from the bound socket to the exit code."""

    def __init__(self, load: Callable[[], OpenAIService], config: ServerConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._slot = ServiceSlot()
        self.uvicorn_config = uvicorn.Config(
            create_app(self._slot, config), log_config=None, lifespan="off", ws="none", server_header=False
        )
        self._server = _Server(self.uvicorn_config)
        self._load = load
        self._calls: list[_ThreadCall[Any]] = []
        self._stop = asyncio.Event()

    @property
    def is_stuck(self) -> bool:
        """Whether a thread still loads, or waits for an engine that does not stop."""
        return any(call.is_alive() for call in self._calls)

    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        host, port = self._listener.getsockname()[:2]
        logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        try:
            return await self._load_and_watch()
        finally:
            self._server.should_exit = True
            await serving
            if self._slot.service is not None:
                await self._call_in_time(self._slot.service.close)

    async def _load_and_watch(self) -> int:
        loading = self._call(self._load)
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({stopped, loading.result}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.result.done():
                logger.info("stopped before the model was loaded")
                return EXIT_OK
            self._slot.fill(loading.result.result())
            return await self._watch(self._slot.loaded(), stopped)
        finally:
            stopped.cancel()

    async def _watch(self, service: OpenAIService, stopped: asyncio.Task[bool]) -> int:
        logger.info("ready: %s on %s", service.model_name, service.engine.device_kind)
        while not stopped.done():
            if service.engine.failure is not None:
                logger.critical("the engine failed: %s", service.engine.failure, exc_info=service.engine.failure)
                await self._finish_responses(_FLUSH_SECONDS)
                return EXIT_FAILED
            await asyncio.wait({stopped}, timeout=_POLL_SECONDS)
        return await self._drain(service)

    async def _drain(self, service: OpenAIService) -> int:
        timeout = self._config.shutdown_timeout
        logger.info("draining: running answers get up to %g s", timeout)
        self._slot.start_draining()
        deadline = asyncio.get_running_loop().time() + timeout
        drained = await service.engine.wait_drained(timeout)
        if drained and await self._finish_responses(max(deadline - asyncio.get_running_loop().time(), 0.1)):
            return EXIT_FAILED if service.engine.failure is not None else EXIT_OK
        logger.warning("shutdown timeout of %g s is over: ending the answers that still run", timeout)
        await self._call_in_time(service.engine.shutdown)
        await self._finish_responses(_FLUSH_SECONDS)
        return EXIT_CUT_SHORT

    def _call(self, work: Callable[[], ResultT]) -> _ThreadCall[ResultT]:
        call = _ThreadCall(work)
        self._calls.append(call)
        return call

    async def _call_in_time(self, work: Callable[[], object]) -> None:
        """Calls it in a thread, since it may wait for a device that never answers; goes on without it after a while."""
        call = self._call(work)
        done, _ = await asyncio.wait({call.result}, timeout=_STOP_SECONDS)
        if not done:
            logger.error("the engine does not stop within %g s; going on without it", _STOP_SECONDS)
            call.result.cancel()
        else:
            call.result.result()

    async def _finish_responses(self, timeout: float) -> bool:
        """Waits until every request was answered; False if that takes longer than `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while tasks := set(self._server.server_state.tasks):
                    await asyncio.wait(tasks)
        except TimeoutError:
            for task in self._server.server_state.tasks:
                task.cancel()
            return False
        return True

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            os._exit(128 + number)
        logger.info("%s: shutting down; a second signal ends the process at once", signal.Signals(number).name)
        self._stop.set()


class _ThreadCall(Generic[ResultT]):
    """Runs `work` in a thread of its own: one that the interpreter does not wait for."""

    def __init__(self, work: Callable[[], ResultT]) -> None:
        self.result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._work = work
        self._thread = threading.Thread(target=self._run, name="jaxserve-call", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            result = self._work()
        except Exception as error:
            self._report(self.result.set_exception, error)
        else:
            self._report(self.result.set_result, result)

    def _report(self, setter: Callable[[Any], None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process was stopped meanwhile
            self.result.get_loop().call_soon_threadsafe(lambda: None if self.result.done() else setter(value))
