"""One log line for each answer, as text or JSON, with the request's id and without anything that was said."""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("jaxserve.access")

_MAX_PATH = 200  # characters of a path that are logged


class AccessLogMiddleware:
    """Logs each answer when it has been sent, or when its client is gone.

    A stream's duration is that of the whole stream. `complete` is false where the client, or a fault, ended it early.
    The query is left out: it is none of the log's business what clients put there.
    """

    def __init__(self, app: ASGIApp, form: Literal["json", "text"]) -> None:
        self._app = app
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status = 0
        complete = False

        async def send_and_note(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            logger.info(self._line(scope, status or 500, complete, time.monotonic() - started))

    def _line(self, scope: Scope, status: int, complete: bool, seconds: float) -> str:
        client = scope.get("client")
        fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request_id": scope.get("state", {}).get("request_id"),
            "client": f"{client[0]}:{client[1]}" if client else None,
            "method": scope["method"],
            "path": scope["path"][:_MAX_PATH],
            "status": status,
            "complete": complete,
            "duration_ms": round(seconds * 1000, 3),
        }
        if self._form == "json":
            return json.dumps(fields, ensure_ascii=True)
        path = json.dumps(fields["path"], ensure_ascii=True)  # quoted: a line break in it makes no second line
        ending = "" if complete else " cut short"
        return (
            f"{fields['time']} {fields['client'] or '-'} {fields['request_id'] or '-'} {fields['method']} {path} "
            f"{status} {fields['duration_ms']} ms{ending}"
        )
