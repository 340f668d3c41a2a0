"""Answers as JSON on their way to the client; long ones in pieces that a thread writes, so that nobody else waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.protocol.long_answers import is_long, json_pieces
from jaxserve.protocol.responses import ResponseModel
from jaxserve.server.disconnect import until_disconnected
from jaxserve.server.errors import ClientDisconnectedError

logger = logging.getLogger(__name__)


async def pieces_in_thread(answer: ResponseModel) -> AsyncGenerator[bytes]:
    """Its JSON, each piece written in a thread when it is asked for."""
    pieces = json_pieces(answer)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def answer_response(answer: ResponseModel) -> Response:
    """The response with this body, whichever way it is written."""
    if is_long(answer):
        return _LongResponse(answer)
    return Response(answer.to_json(), media_type="application/json")


class _LongResponse(Response):
    """Sends no piece before the client has taken most of the ones before it; ends when the client goes away."""

    media_type = "application/json"

    def __init__(self, answer: ResponseModel) -> None:
        super().__init__()
        self._answer = answer
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnected(receive, self._send(send))
        except ClientDisconnectedError:
            logger.debug("client went away, request id %s", scope["state"]["request_id"])

    async def _send(self, send: Send) -> None:
        async with aclosing(pieces_in_thread(self._answer)) as pieces:
            first = await anext(pieces)  # a failure until here is still an HTTP error
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
