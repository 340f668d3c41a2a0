"""Pages of other origins: which may call the server, and what the others are told."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from jaxserve.protocol.errors import BadRequestError
from jaxserve.server.errors import error_response


class CrossOriginMiddleware(CORSMiddleware):
    """Starlette's, with error objects for what it refuses.

    Never with credentials: keys travel in a header that pages set themselves, and with "*" any page could use what a
    browser sends by itself.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_credentials=False,
            expose_headers=["x-request-id", "retry-after"],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        message = (
            f"{bytes(response.body).decode('utf-8')}: pages of the origins that --allowed-origins lists may call this "
            f"server, with {' and '.join(self.allow_methods)}"
        )
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return error_response(BadRequestError(message, code="cors_disallowed"), kept)
