"""Streams of POST requests over plain asyncio connections, cheap enough to measure engines with.

httpx takes three times as much of a core for each chunk, so that one process could not follow 64 streams of 150 tokens a
second each; it does everything here that is no stream.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

from jaxserve.bench.endpoint_url import split_url

OnBytes = Callable[[float, bytes], None]


@dataclass(frozen=True)
class Response:
    """How an answer began.

    Attributes:
        body: of an answer that is no success; empty for one that is, whose bytes went to the reader.
    """

    status: int
    body: bytes


class ConnectionLostError(ConnectionError):
    """The endpoint closed the connection before the end of its answer."""


class StreamPool:
    """Connections to one endpoint, kept open from request to request. Used from one event loop only."""

    def __init__(self, url: str) -> None:
        parts = split_url(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._authority = parts.netloc.rpartition("@")[2]
        self._idle: list[_Connection] = []

    async def post(self, path: str, headers: dict[str, str], body: bytes, on_bytes: OnBytes) -> Response:
        """Sends a request and reads the answer to its end; `on_bytes` gets the body of a success as it comes.

        Raises:
            OSError: no connection, or it was lost before the end of the answer.
        """
        fields = {"host": self._authority, "content-length": str(len(body)), "accept-encoding": "identity", **headers}
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items()) + "\r\n"
        message = head.encode() + body
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            try:
                return await self._exchange(connection, message, on_bytes)
            except ConnectionLostError:
                if connection.has_begun:
                    raise
                # The endpoint closed an idle connection just as it was taken: another one will do.
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        return await self._exchange(connection, message, on_bytes)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, connection: _Connection, message: bytes, on_bytes: OnBytes) -> Response:
        try:
            response = await connection.exchange(message, on_bytes)
        except BaseException:
            connection.close()  # what is left of the answer would be taken for the next one's
            raise
        if connection.is_open:
            self._idle.append(connection)
        return response


@dataclass(eq=False)
class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    has_begun: bool = False  # whether anything of the current answer has come
    _transport: asyncio.Transport | None = None
    _on_bytes: OnBytes | None = None
    _result: asyncio.Future[Response] | None = None
    _parser: httptools.HttpResponseParser | None = None
    _body: list[bytes] = field(default_factory=list)
    _now: float = 0.0
    _has_length: bool = False  # whether the answer's head tells where its body ends
    _ends_with_connection: bool = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, message: bytes, on_bytes: OnBytes) -> Response:
        self._on_bytes = on_bytes
        self.has_begun = False
        self._body = []
        self._ends_with_connection = False
        self._parser = httptools.HttpResponseParser(self)
        self._result = asyncio.get_running_loop().create_future()
        if self._transport is None or self._transport.is_closing():
            raise ConnectionLostError("the connection is closed")
        self._transport.write(message)
        return await self._result

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # what create_connection makes

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self.has_begun = True
        if self._parser is None:
            self.close()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionLostError(f"the endpoint's answer is no HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._ends_with_connection:
            self.on_message_complete()
        self._fail(ConnectionLostError(f"the endpoint closed the connection{f': {exc}' if exc else ''}"))

    # What httptools calls, while it is fed.

    def on_message_begin(self) -> None:
        self._has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        field = name.lower()
        self._has_length |= field == b"content-length" or (
            field == b"transfer-encoding" and b"chunked" in value.lower()
        )

    def on_headers_complete(self) -> None:
        self._ends_with_connection = not self._has_length

    def on_body(self, body: bytes) -> None:
        if self._parser is not None and self._parser.get_status_code() == 200 and self._on_bytes is not None:
            self._on_bytes(self._now, body)
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser is None or self._result is None or self._result.done():
            return
        if not self._parser.should_keep_alive():
            self.close()
        self._result.set_result(Response(self._parser.get_status_code(), b"".join(self._body)))

    def _fail(self, error: Exception) -> None:
        if self._result is not None and not self._result.done():
            self._result.set_exception(error)
