"""One client's connection: uvicorn's, with limits on what a client may leave undone."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from jaxserve.config import ServerConfig
from jaxserve.protocol.errors import BadRequestError

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 65536  # request line and headers together


def uvicorn_config(app: Starlette, config: ServerConfig) -> uvicorn.Config:
    """How uvicorn serves the app: no logs or headers of its own, and connections that do not wait for ever.

    Raises:
        RuntimeError: the TLS files cannot be used.
    """

    class Connection(_Connection):
        stalled_timeout = config.stalled_client_timeout

    result = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
    try:
        result.load()
    except OSError as error:  # ssl.SSLError is one
        raise RuntimeError(
            f"cannot use the TLS files {config.ssl_certfile} and {config.ssl_keyfile}: {error.strerror or error}"
        ) from error
    return result


_Protocol: Any = AutoHTTPProtocol  # httptools' or h11's, whichever is installed


class _Connection(_Protocol):
    """Cuts a client off that takes nothing of its answer for a while, or sends headers without end.

    uvicorn stops taking from the app while its buffer for a client is full, so that a slow reader costs little memory;
    but one that never reads would keep its request and its socket for ever.
    """

    stalled_timeout: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall_check: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = False

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head:
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the request's head is longer than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(BadRequestError(msg, code="invalid_http").body()).encode()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _watch_stall(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._stall_check = self.loop.call_later(self.stalled_timeout, self._check_stall, waiting)

    def _check_stall(self, waiting_before: int) -> None:
        if self.transport.get_write_buffer_size() < waiting_before:
            self._watch_stall()  # it reads, if slowly
            return
        logger.warning("a client took nothing of its answer for %g s: cut off", self.stalled_timeout)
        self.transport.abort()

    def _stop_watching(self) -> None:
        if self._stall_check is not None:
            self._stall_check.cancel()
            self._stall_check = None
