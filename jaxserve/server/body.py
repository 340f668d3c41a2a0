"""Reading a request's body: declared as JSON, bounded in size."""

from __future__ import annotations

from starlette.requests import Request

from jaxserve.protocol.errors import BadRequestError, RequestTooLargeError
from jaxserve.server.errors import ClientDisconnectedError


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
