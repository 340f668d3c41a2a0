"""Server-sent events, and noticing that a client has gone away.

Starlette's response classes would do for the bytes. This does two things more: nothing is sent before the first chunk
is there, so that a failure until then is an HTTP error and not an event; and a plain handler is watched for
disconnects, like a stream. sse-starlette's response was measured too: each event costs it about 14 µs more of a core, twice
what is left of the way to the socket, for pings and resumption that no OpenAI client asks for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.protocol.errors import ApiError
from jaxserve.protocol.responses import ChatCompletionChunk, Completion
from jaxserve.protocol.responses_api_objects import ResponseEvent
from jaxserve.protocol.service import ChunkStream
from jaxserve.server.errors import ClientDisconnectedError, internal_error

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

TURN_SECONDS = 0.002  # what one stream may hold all others up for
DONE = b"data: [DONE]\n\n"


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client is gone. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The work's result; cancels it when the client goes away.

    Raises:
        ClientDisconnectedError: the client went away first.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnectedError
        return worker.result()
    finally:
        await _cancel(worker, watcher)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStreamResponse(Response):
    """Sends each chunk as one event, then `[DONE]`; after a failure an event with the error, and no `[DONE]`.

    Events of the responses route have names, and the last of them says itself that it is.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: ChunkStream[ChatCompletionChunk] | ChunkStream[Completion] | ChunkStream[ResponseEvent]
    ) -> None:
        self._chunks = chunks
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnected(receive, self._send_events(scope, send))
        except ClientDisconnectedError:
            logger.debug("client went away, request id %s", scope["state"]["request_id"])
        finally:
            await self._chunks.aclose()

    def init_headers(self, headers: Any = None) -> None:
        super().init_headers(headers)
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def _send_events(self, scope: Scope, send: Send) -> None:
        first = await anext(self._chunks)  # raises what is still an HTTP error
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            encode, last = (_named_event, b"") if isinstance(first, ResponseEvent) else (_event, DONE)
            await _send_event(send, encode(first))
            turn = _Turn()
            async for chunk in self._chunks:
                await _send_event(send, encode(chunk))
                if turn.is_over():
                    await asyncio.sleep(0)
                    turn = _Turn()
        except Exception as error:
            last = _error_event(error, scope["state"]["request_id"])
        await send({"type": "http.response.body", "body": last, "more_body": False})


class _Turn:
    """A task's time on the event loop. Where chunks wait and the socket takes them, nothing else ends it."""

    def __init__(self) -> None:
        self._end = time.monotonic() + TURN_SECONDS

    def is_over(self) -> bool:
        return time.monotonic() >= self._end


async def _send_event(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})


def _event(chunk: Any) -> bytes:
    return b"data: %b\n\n" % chunk.to_json().encode("utf-8")


def _named_event(event: Any) -> bytes:
    return b"event: %b\n%b" % (event.type.encode("ascii"), _event(event))


def _error_event(error: Exception, request_id: str) -> bytes:
    if not isinstance(error, ApiError):
        logger.error("unforeseen error in a stream, request id %s", request_id, exc_info=error)
        error = internal_error(request_id)
    return b"data: %b\n\n" % json.dumps(error.body()).encode("utf-8")
