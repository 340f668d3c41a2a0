"""Reading a request's body: JSON, bounded in size and in what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request

from jaxserve.protocol.errors import BadRequestError, RequestTooLargeError
from jaxserve.protocol.parsing import parse_json
from jaxserve.server.errors import ClientDisconnectedError

ParsedT = TypeVar("ParsedT")

PARSED_AT_ONCE = 64 * 1024  # bytes; larger bodies are parsed in a thread, so that nobody else waits for them


async def parse_body(raw: bytes, parse: Callable[[Mapping[str, Any]], ParsedT]) -> tuple[Mapping[str, Any], ParsedT]:
    """The body as JSON, and what `parse` makes of it.

    Raises:
        BadRequestError: it is no JSON object, or `parse` refuses it.
    """

    def work() -> tuple[Mapping[str, Any], ParsedT]:
        body = parse_json(raw)
        return body, parse(body)

    return work() if len(raw) <= PARSED_AT_ONCE else await asyncio.to_thread(work)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, whole.

    Raises:
        RequestTooLargeError: it is longer than `max_bytes`; no more than that is kept. The connection stays open: uvicorn
            throws away what still comes, while closing would reset it before the client has read why.
        BadRequestError: it is not declared as JSON, which keeps web pages of other origins from sending one without
            asking first.
        ClientDisconnectedError: the client went away before it had sent all.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise BadRequestError(f"send the header `Content-Type: application/json`, not {content_type[:60] or 'none'!r}")
    return await _read(request, max_bytes)


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the body is larger than the {max_bytes} bytes that this server accepts")
