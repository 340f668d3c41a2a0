"""Clients of an OpenAI endpoint as targets: streamed completions or chat completions over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable
from typing import Any, Protocol
from urllib.parse import urlsplit

from jaxserve.bench.endpoint import EndpointOptions, EndpointStats, request_of
from jaxserve.bench.event_stream import AnswerReader, error_message
from jaxserve.bench.http_streams import StreamPool
from jaxserve.bench.load import OnEnd
from jaxserve.bench.records import RequestRecord, Snapshot
from jaxserve.bench.workload import Prompts
from jaxserve.bench.workload_files import Task
from jaxserve.engine.draft_stats import SpeculativeStats

_SHOWN_BYTES = 300  # of an answer in no form that is known


class StreamClient(Protocol):
    """Sends one request and feeds what comes to a reader; returns what went wrong, or None."""

    def ask(self, path: str, body: dict[str, Any], reader: AnswerReader) -> Awaitable[str | None]: ...
    def close(self) -> Awaitable[None]: ...


class OwnClient:
    """The one that measures at the least cost."""

    def __init__(self, options: EndpointOptions) -> None:
        self._pool = StreamPool(options.root)
        self._prefix = urlsplit(options.root).path
        self._headers = {"content-type": "application/json", **options.headers}

    async def ask(self, path: str, body: dict[str, Any], reader: AnswerReader) -> str | None:
        try:
            response = await self._pool.post(self._prefix + path, self._headers, json.dumps(body).encode(), reader.feed)
        except OSError as failure:
            return str(failure) or type(failure).__name__
        if response.status != 200:
            return f"status {response.status}: {_reason(response.body)}"
        return None if reader.complete or reader.error else "the stream ended without [DONE]"

    async def close(self) -> None:
        self._pool.close()


class HttpTarget:
    """Sends requests from a thread with an event loop of its own. To be closed after use.

    Args:
        model: what the endpoint calls it.
        client: what sends and reads.
    """

    def __init__(self, options: EndpointOptions, model: str, prompts: Prompts, client: StreamClient) -> None:
        self._options = options
        self._model = model
        self._prompts = prompts
        self._client = client
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="bench-http", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished_tokens = 0
        self._finished_events = 0
        self._unfinished: set[AnswerReader] = set()  # that still run, or failed
        self._stats = EndpointStats(options)
        self._thread.start()

    def start(self, index: int, task: Task, on_end: OnEnd) -> None:
        path, body = request_of(self._options, self._model, self._prompts, task, index)
        self._loop.call_soon_threadsafe(self._spawn, index, task, path, body, on_end)

    def stop(self) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(self._cancel, done)
        done.wait()

    def output_tokens(self) -> float:
        """Those of whole answers as the endpoint counted them; of the others by the chunks that came."""
        per_event = self._finished_tokens / self._finished_events if self._finished_events else 1.0
        return self._finished_tokens + per_event * sum(reader.events for reader in list(self._unfinished))

    def busy_times(self) -> tuple[float, float] | None:
        return self._stats.busy_times()

    def speculation(self) -> SpeculativeStats | None:
        return self._stats.speculation()

    def snapshot(self, seconds: float) -> Snapshot | None:
        return self._stats.snapshot(seconds)

    def close(self) -> None:
        self.stop()
        asyncio.run_coroutine_threadsafe(_awaited(self._client.close()), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._stats.close()

    # On the loop's thread.

    def _run_loop(self) -> None:
        """Ends as `asyncio.run` does: what is left open, such as a stream that was given up, is closed while it can be."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(asyncio.sleep(0))  # transports close with the loop's next turn
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    def _spawn(self, index: int, task: Task, path: str, body: dict[str, Any], on_end: OnEnd) -> None:
        running = self._loop.create_task(self._answer(index, task, path, body, on_end))
        self._tasks.add(running)
        running.add_done_callback(self._tasks.discard)

    def _cancel(self, done: threading.Event) -> None:
        for running in self._tasks:
            running.cancel()
        self._loop.create_task(_set_after(list(self._tasks), done))

    async def _answer(self, index: int, task: Task, path: str, body: dict[str, Any], on_end: OnEnd) -> None:
        reader = AnswerReader()
        self._unfinished.add(reader)
        submitted = time.perf_counter()
        error = await self._client.ask(path, body, reader) or _failure(reader)
        if error is None:
            self._unfinished.discard(reader)
            self._finished_tokens += reader.output_tokens or 0
            self._finished_events += reader.events
        on_end(
            RequestRecord(
                prompt_tokens=task.prompt if reader.prompt_tokens is None else reader.prompt_tokens,
                output_tokens=reader.output_tokens or 0,
                submitted=submitted,
                first_token=reader.first_time or submitted,
                last_token=reader.last_time or submitted,
                index=index,
                first_count=reader.first_count,
                error=error,
                gaps_ms=reader.gaps_ms,
            )
        )


def _reason(body: bytes) -> str:
    """Why a request was refused, as far as the answer tells it in a way that is known; else how the answer begins."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        data = None
    return error_message(data) if isinstance(data, dict) else body[:_SHOWN_BYTES].decode(errors="replace")


async def _awaited(closing: Awaitable[None]) -> None:
    await closing


async def _set_after(tasks: list[asyncio.Task[None]], done: threading.Event) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
    done.set()


def _failure(reader: AnswerReader) -> str | None:
    """What is wrong with an answer that came to its end, or None."""
    if reader.error is not None:
        return reader.error
    if reader.first_time is None:
        return "the answer holds no token"
    if reader.output_tokens is None:
        return "the endpoint told neither usage nor tokens, so that they cannot be counted"
    return None


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed: it takes less than half as much of a core for each chunk."""
    try:
        import uvloop
    except ImportError:  # not on every system
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
