"""One log line for each answer, as text or JSON, with the request's id and without anything that was said."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.protocol.errors import ApiError
from jaxserve.server.request_state import REFUSED

logger = logging.getLogger("jaxserve.access")

AccessLogForm = Literal["json", "text"]

_MAX_PATH = 200  # characters of a path that are logged


def log_answer(form: AccessLogForm, scope: Mapping[str, Any], *, status: int, complete: bool, seconds: float) -> None:
    """Logs one answer.

    Args:
        scope: of its request; without `method` and `path` where they could not be read.
        complete: whether all of it went out.
        seconds: that it took.
    """
    client = scope.get("client")
    path: str | None = scope.get("path")
    fields: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "request_id": scope.get("state", {}).get("request_id"),
        "client": f"{client[0]}:{client[1]}" if client else None,
        "method": scope.get("method"),
        "path": None if path is None else path[:_MAX_PATH],
        "status": status,
        "complete": complete,
        "duration_ms": round(seconds * 1000, 3),
    }
    if form == "json":
        logger.info(json.dumps(fields, ensure_ascii=True))
        return
    # The path is quoted: a line break in it makes no second line.
    shown_path = "-" if path is None else json.dumps(fields["path"], ensure_ascii=True)
    logger.info(
        f"{fields['time']} {fields['client'] or '-'} {fields['request_id'] or '-'} {fields['method'] or '-'} {shown_path} "
        f"{status} {fields['duration_ms']} ms{'' if complete else ' cut short'}"
    )


class AccessLogMiddleware:
    """Logs each answer when it has been sent, or when its client is gone.

    A stream's duration is that of the whole stream. `complete` is false where the client, or a fault, ended it early.
    The query is left out: it is none of the log's business what clients put there. Where the connection has answered in
    the app's place, that answer is the one that is logged.
    """

    def __init__(self, app: ASGIApp, form: AccessLogForm) -> None:
        self._app = app
        self._form: AccessLogForm = form

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
            refused: ApiError | None = scope.get("state", {}).get(REFUSED)
            if refused is not None:
                status, complete = refused.status_code, True
            seconds = time.monotonic() - started
            log_answer(self._form, scope, status=status or 500, complete=complete, seconds=seconds)
