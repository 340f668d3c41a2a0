"""Errors as HTTP responses: always OpenAI's error object, whatever went wrong."""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.protocol.errors import (
    ApiError,
    BadRequestError,
    InternalServerError,
    MethodNotAllowedError,
    NotFoundError,
)

CLIENT_CLOSED_REQUEST = 499  # nginx's status for it; only logs ever see it


class ClientDisconnectedError(Exception):
    """The client went away before it was answered; nobody reads a response."""


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    """The response for an error, with `Retry-After` where trying again makes sense."""
    headers = dict(headers or {})
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return json_response(error.body(), status_code=error.status_code, headers=headers)


def json_response(content: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(body, status_code, headers, media_type="application/json")


def internal_error(request_id: str) -> InternalServerError:
    """What a client is told of a fault of ours: nothing but where to look for it."""
    return InternalServerError(
        f"the server failed on this request; its log says more under request id {request_id}", code="internal_error"
    )


async def on_api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors: no such route, or not for this method."""
    if not isinstance(error, HTTPException):
        raise error
    where = f"{request.method} {request.url.path[:200]}"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return error_response(NotFoundError(f"there is no route {where}", code="unknown_url"), headers)
    if error.status_code == 405:
        return error_response(MethodNotAllowedError(f"{where}: the route is not for this method"), headers)
    return error_response(BadRequestError(str(error.detail)), headers)


async def on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


EXCEPTION_HANDLERS = {ApiError: on_api_error, HTTPException: on_http_error, ClientDisconnectedError: on_disconnect}
