"""One client's connection: uvicorn's, with limits on what a client may leave undone."""

from __future__ import annotations

import asyncio
import http
import json
import logging
import resource
import urllib.parse
from collections.abc import Callable
from typing import Any, Literal

import httptools
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxserve.config import ServerConfig
from jaxserve.protocol.errors import ApiError, BadRequestError, RequestTimeoutError
from jaxserve.server.access_log import log_answer
from jaxserve.server.request_state import OVER_LIMIT, REFUSED, request_id_of

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 65536  # request line and headers together
MAX_FILES = 65536  # open at once; more connections than that are not for one process
RESERVED_FILES = 128  # for checkpoints, logs, the device's driver and the like
SPARE_CONNECTIONS = 64  # over the limit, that are told so; further ones are closed without a word
MAX_PIPELINED = 16  # requests that one connection may send ahead; with more, all of it ends
MAX_PIPELINED_BYTES = 262_144  # of these requests' bodies, which the limit on all bodies together does not count yet


def uvicorn_config(app: Starlette, config: ServerConfig) -> uvicorn.Config:
    """How uvicorn serves the app: no logs or headers of its own, and connections that do not wait for ever.

    Raises:
        RuntimeError: the TLS files cannot be used.
    """

    class Connection(_Connection):
        stalled_timeout = config.stalled_client_timeout
        max_connections = config.max_connections or default_max_connections()
        access_log_form = config.access_log

    result = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=config.timeout_keep_alive,  # type: ignore[arg-type]  # any number will do
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


class _RefusedError(ValueError):
    """A client sends too much, or what nothing can be made of. Raised in a callback of the parser, which then gives up."""


class _Connection(HttpToolsProtocol):
    """Cuts a client off that does nothing for a while: takes nothing of its answer, or does not go on with its request.

    uvicorn stops taking from the app while its buffer for a client is full, so that a slow reader costs little memory;
    but one that never reads, or never ends what it began to send, would keep its request and its socket for ever.

    uvicorn also stops reading while requests wait for their turn, and then does not see their client go away. Here it
    reads on, and a connection on which too much comes ahead is closed.
    """

    stalled_timeout: float
    max_connections: int
    access_log_form: Literal["json", "text", "none"]
    parser: Any  # None once the connection is lost; nothing is received then

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall_check: asyncio.TimerHandle | None = None
        self._request_check: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._parsed_head_bytes = 0
        self._in_head = False
        self._begun = self.loop.time()  # the last request, or the connection
        self._body_bytes = 0
        self._cycles: list[Any] = []  # of requests that were not wholly answered; uvicorn knows the last one only

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self.app_state = {**self.app_state, OVER_LIMIT: True}
        if len(self.connections) > self.max_connections + SPARE_CONNECTIONS:
            transport.abort()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._stop_awaiting()
        self._end_answers()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        self._end_answers()  # before anything more is written to a connection that closes now
        super().eof_received()

    # What a client reads

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

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

    # What a client sends

    def data_received(self, data: bytes) -> None:
        """uvicorn's would log that a request is invalid, whatever the matter is, and nothing of whose it was."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # to web sockets or HTTP/2: answered as if it had not been asked for
        except httptools.HttpParserError as error:
            self._refuse_unread(_reason(error))
            return
        if not self._in_head:
            self._head_bytes = 0
            if self._is_idle and self.timeout_keep_alive_task is None and self._request_check is None:
                self._await_head()  # what came (an empty line) ended the keep-alive time and began nothing
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_unread(f"the request's head is longer than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._in_head = True
        self._begun = self.loop.time()
        self._parsed_head_bytes = 0
        if self._request_check is None:
            self._await_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._parsed_head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser gives up when one of these raises, and the request gets a 400."""
        self._parsed_head_bytes += len(name) + len(value) + len(b": \r\n")
        if self._parsed_head_bytes > MAX_HEAD_BYTES:
            raise _RefusedError(f"the request's head is longer than {MAX_HEAD_BYTES} bytes")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if _path_of(self.url) is None:
            raise _RefusedError("the request's target has no path")
        super().on_headers_complete()
        self._in_head = False
        self._cycles = [cycle for cycle in self._unanswered if cycle is not self.cycle] + [self.cycle]
        if len(self.pipeline) > MAX_PIPELINED:
            raise _RefusedError(f"more than {MAX_PIPELINED} requests were sent ahead of their answers")
        if self.pipeline:
            self.flow.resume_reading()
        self._await_body()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)
        if not self.pipeline:
            return  # whoever answers the request takes its body
        if sum(len(cycle.body) for cycle, _ in self.pipeline) > MAX_PIPELINED_BYTES:
            raise _RefusedError(f"more than {MAX_PIPELINED_BYTES} bytes of bodies were sent ahead of their answers")
        self.flow.resume_reading()

    def on_message_complete(self) -> None:
        self._stop_awaiting()
        super().on_message_complete()

    @property
    def _is_idle(self) -> bool:
        """Whether every request so far was answered."""
        return self.cycle is None or (self.cycle.response_complete and not self.pipeline)

    def _await_head(self) -> None:
        """A head gets its time as a whole: one that comes a letter at a time is not a request that gets on."""
        self._check_later(self._check_head)

    def _check_head(self) -> None:
        if not self._is_idle:
            self._await_head()  # the answers before it come first, and end this connection if they fail
            return
        self._time_out("head" if self._in_head else None)

    def _await_body(self) -> None:
        self._check_later(self._check_body, self._body_bytes)

    def _check_body(self, bytes_before: int) -> None:
        if self._body_bytes > bytes_before or self.flow.read_paused or self.pipeline:
            self._await_body()  # it comes, or it is we who do not take it
            return
        self._time_out("body")

    def _check_later(self, check: Callable[..., None], *arguments: int) -> None:
        self._stop_awaiting()
        self._request_check = self.loop.call_later(self.stalled_timeout, check, *arguments)

    def _stop_awaiting(self) -> None:
        if self._request_check is not None:
            self._request_check.cancel()
            self._request_check = None

    def _time_out(self, part: str | None) -> None:
        if part is None or self.transport.is_closing() or (self.cycle is not None and self.cycle.response_started):
            self._close()  # nothing was begun, or it was answered already
            return
        message = f"the {part} of the request did not come within {self.stalled_timeout:g} s"
        self._refuse(RequestTimeoutError(message, code="request_timeout"))

    def _refuse_unread(self, reason: str) -> None:
        """What comes cannot be read, so that nothing after it can be."""
        scope = self._scope_of_refusal()
        logger.warning("a connection is closed: %s, request id %s", reason, request_id_of(scope) if scope else "-")
        self._refuse(BadRequestError(reason, code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answers in the app's place, and closes. An answer that has begun is cut short instead."""
        scope = self._scope_of_refusal()
        unanswered = self._unanswered
        if scope is not None and not any(cycle.response_started for cycle in unanswered):
            self._answer(error, request_id_of(scope))
            if unanswered:
                scope["state"][REFUSED] = error  # the app, which ends now, has the line in the access log to write
            elif self.access_log_form != "none":
                seconds = self.loop.time() - self._begun
                log_answer(self.access_log_form, scope, status=error.status_code, complete=True, seconds=seconds)
        self._close()

    def _scope_of_refusal(self) -> dict[str, Any] | None:
        """Of the request that a client takes an answer to be for; None: they are all answered."""
        if unanswered := self._unanswered:
            return unanswered[0].scope
        if not self._in_head:
            return None
        scope: dict[str, Any] = {**self.scope}
        if self.url:
            scope |= {"method": self.parser.get_method().decode("ascii"), "path": _path_of(self.url)}
        return scope

    def _answer(self, error: ApiError, request_id: str) -> None:
        body = json.dumps(error.body()).encode()
        lines = (
            f"HTTP/1.1 {error.status_code} {http.HTTPStatus(error.status_code).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"x-request-id: {request_id}",
            "connection: close",
        )
        self.transport.write("".join(f"{line}\r\n" for line in (*lines, "")).encode("ascii") + body)

    @property
    def _unanswered(self) -> list[Any]:
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    def _close(self) -> None:
        self._end_answers()
        self.transport.close()

    def _end_answers(self) -> None:
        """Whatever is still being answered learns at once that its client is gone, and writes nothing more."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()


def _reason(error: httptools.HttpParserError) -> str:
    """Why the parser gave up, for the client and the log."""
    cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
    if isinstance(cause, _RefusedError):
        return str(cause)
    if not isinstance(cause, httptools.HttpParserError):
        logger.error("a request could not be taken", exc_info=cause)
        return "this is no HTTP that the server understands"
    return f"this is no valid HTTP: {str(cause)[:200]}"


def _path_of(url: bytes) -> str | None:
    """The path of a request's target, as routes would have it; None: there is none in it."""
    try:
        path = httptools.parse_url(url).path
    except httptools.HttpParserInvalidURLError:
        return None
    return None if path is None else urllib.parse.unquote(path.decode("ascii", "replace"))


def default_max_connections() -> int:
    """As many as the process may have files open, less some for everything else."""
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILES, 16)


def raise_file_limit() -> None:
    """Lets the process have as many files open as it is allowed to, for each connection is one; the usual 1024 are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
