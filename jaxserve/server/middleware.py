"""What every request passes before it reaches a route: its id, the last resort for errors, limits, and the API key."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.protocol.errors import AuthenticationError, UnavailableError
from jaxserve.server.errors import error_response, internal_error
from jaxserve.server.request_state import OVER_LIMIT, request_id_of
from jaxserve.server.web_page import WEB_PATHS

logger = logging.getLogger(__name__)

PUBLIC_PATHS = frozenset({"/health"})  # everything else needs a key, routes yet to be written included
ADMIN_PATHS = frozenset({"/flush_cache"})  # what one client does here touches all others

BODIES_AT_ONCE = 64  # of the largest size; smaller ones may be more


class RequestContextMiddleware:
    """Gives each request an id, and each answer the same."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class LastResortMiddleware:
    """Answers errors that nobody foresaw."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            request_id = request_id_of(scope)
            logger.exception("unforeseen error in %s %s, request id %s", scope["method"], scope["path"], request_id)
            if started:
                raise  # the server closes the connection, so that the client cannot take the answer for whole
            await error_response(internal_error(request_id))(scope, receive, send)


class ConnectionLimitMiddleware:
    """Refuses requests on connections that are too many, but for `PUBLIC_PATHS`: a busy server is not a dead one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or OVER_LIMIT not in scope["state"] or route_path(scope) in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        error = UnavailableError("the server has as many connections as it takes", code="too_many_connections")
        await error_response(error, {"connection": "close"})(scope, receive, send)


class OldHttpMiddleware:
    """Gives clients that speak HTTP/1.0 answers in one piece: they know no chunks, and would take them for text.

    uvicorn sends whatever has no length in chunks, to them too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["http_version"] not in ("0.9", "1.0"):
            await self._app(scope, receive, send)
            return
        start: Message | None = None  # while the length of what follows it is not known
        body = bytearray()

        async def send_whole(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and "content-length" not in MutableHeaders(scope=message):
                start = message
                return
            if start is None:
                await send(message)
                return
            body.extend(message.get("body", b""))
            if message.get("more_body", False):
                return
            MutableHeaders(scope=start)["content-length"] = str(len(body))
            await send(start)
            await send({"type": "http.response.body", "body": bytes(body)})

        await self._app(scope, receive, send_whole)


class RootPathMiddleware:
    """Takes off what a proxy puts before every path, whether the proxy has done so already or not."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            path: str = scope["path"]
            if not path.startswith(f"{self._root_path}/"):
                path = self._root_path + path
            scope = {**scope, "root_path": self._root_path, "path": path}
        await self._app(scope, receive, send)


class BodyMemoryMiddleware:
    """Bounds what the bodies of all requests take together, each until its answer has ended."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = 0

        async def receive_and_count() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            if size and self._held + size > self._max_bytes:
                raise UnavailableError(
                    f"the requests that are being answered fill the {self._max_bytes} bytes that there are for them",
                    code="too_many_bodies",
                )
            held += size
            self._held += size
            return message

        try:
            await self._app(scope, receive_and_count, send)
        finally:
            self._held -= held


class LoadMiddleware:
    """Counts the requests under /v1/ that are being answered, streams until their end."""

    def __init__(self, app: ASGIApp, load: ServerLoad) -> None:
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not route_path(scope).startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        self._load.requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._load.requests -= 1


class ServerLoad:
    """How many requests are being answered."""

    def __init__(self) -> None:
        self.requests = 0


class ApiKeyMiddleware:
    """Lets only requests with a known key through, but for `PUBLIC_PATHS` and the page.

    `ADMIN_PATHS` want an administrator's. Without keys, everyone is let through.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], admin_api_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._admin_digests = _digests(admin_api_keys)
        self._digests = _digests(api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = AuthenticationError("send a valid API key as `Authorization: Bearer KEY`", code="invalid_api_key")
            await error_response(error, {"www-authenticate": "Bearer"})(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if (
            scope["type"] == "http"
            and route_path(scope) in PUBLIC_PATHS | WEB_PATHS
            and scope["method"] in ("GET", "HEAD")
        ):
            return True
        is_admin = scope["type"] == "http" and route_path(scope) in ADMIN_PATHS
        if not self._digests and not (is_admin and self._admin_digests):
            return True
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(headers) != 1:  # of two, a proxy before us may have checked the other
            return False
        scheme, _, key = headers[0].partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()  # of equal length, whatever was sent
        allowed = self._admin_digests if is_admin else [*self._digests, *self._admin_digests]
        matches = [hmac.compare_digest(digest, known) for known in allowed]  # all of them, in constant time
        return scheme.lower() == b"bearer" and any(matches)


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode("utf-8")).digest() for key in keys]


def route_path(scope: Scope) -> str:
    """The path as the routes know it: without the root path."""
    path: str = scope["path"]
    root_path: str = scope.get("root_path", "")
    return path[len(root_path) :] if root_path and path.startswith(f"{root_path}/") else path
