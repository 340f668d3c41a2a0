"""Server-sent events.

Starlette's response classes would do for the bytes. This does three things more: nothing is sent before the first chunk
is there, so that a failure until then is an HTTP error and not an event; the client is watched, so that its answer ends
when it goes away; and a long chunk is written in a thread. sse-starlette's response was measured too: each event costs it
about 14 µs more of a core, twice what is left of the way to the socket, for pings and resumption that no OpenAI client
asks for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.protocol.chunk_stream import ChunkStream
from jaxserve.protocol.errors import ApiError
from jaxserve.protocol.long_answers import is_long
from jaxserve.protocol.responses import ChatCompletionChunk, Completion
from jaxserve.protocol.responses_api_objects import ResponseEvent
from jaxserve.protocol.text_chunks import WrittenChunk
from jaxserve.server.disconnect import until_disconnected
from jaxserve.server.errors import ClientDisconnectedError, internal_error
from jaxserve.server.long_json import pieces_in_thread

logger = logging.getLogger(__name__)

TURN_SECONDS = 0.002  # what one stream may hold all others up for
DONE = b"data: [DONE]\n\n"


class EventStreamResponse(Response):
    """Sends each chunk as one event, then `[DONE]`; after a failure an event with the error, and no `[DONE]`.

    Events of the responses route have names, and the last of them says itself that it is.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: ChunkStream[ChatCompletionChunk | Completion | WrittenChunk] | ChunkStream[ResponseEvent]
    ) -> None:
        self._chunks = chunks
        self._started = False
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnected(receive, self._send_events(scope, send))
        except ClientDisconnectedError:
            if not self._started:
                raise  # as of an answer that comes whole
            logger.debug("client went away, request id %s", scope["state"]["request_id"])
        finally:
            await self._chunks.aclose()

    def init_headers(self, headers: Any = None) -> None:
        super().init_headers(headers)
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def _send_events(self, scope: Scope, send: Send) -> None:
        first = await anext(self._chunks)  # raises what is still an HTTP error
        self._started = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            last = b"" if isinstance(first, ResponseEvent) else DONE
            await self._send_event(send, first)
            turn = _Turn()
            async for chunk in self._chunks:
                await self._send_event(send, chunk)
                if turn.is_over():
                    await asyncio.sleep(0)
                    turn = _Turn()
        except Exception as error:
            last = _error_event(error, scope["state"]["request_id"])
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_event(
        self, send: Send, chunk: ChatCompletionChunk | Completion | WrittenChunk | ResponseEvent
    ) -> None:
        if isinstance(chunk, WrittenChunk):
            await _send_part(send, b"data: %b\n\n" % chunk.json.encode("utf-8"))
            return
        head = b"event: %b\ndata: " % chunk.type.encode("ascii") if isinstance(chunk, ResponseEvent) else b"data: "
        if not (self._chunks.may_be_long and is_long(chunk)):
            await _send_part(send, b"%b%b\n\n" % (head, chunk.to_json().encode("utf-8")))
            return
        await _send_part(send, head)
        async with aclosing(pieces_in_thread(chunk)) as pieces:
            async for piece in pieces:
                await _send_part(send, piece)
        await _send_part(send, b"\n\n")


class _Turn:
    """A task's time on the event loop. Where chunks wait and the socket takes them, nothing else ends it."""

    def __init__(self) -> None:
        self._end = time.monotonic() + TURN_SECONDS

    def is_over(self) -> bool:
        return time.monotonic() >= self._end


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


def _error_event(error: Exception, request_id: str) -> bytes:
    if not isinstance(error, ApiError):
        logger.error("unforeseen error in a stream, request id %s", request_id, exc_info=error)
        error = internal_error(request_id)
    return b"data: %b\n\n" % json.dumps(error.body()).encode("utf-8")
