"""Traces: one span for each request for an answer. What keeps them is behind `Tracer`, and is loaded only when asked for."""

from __future__ import annotations

from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.protocol.observer import RequestCourse
from jaxserve.protocol.requests import ChatCompletionRequest, CompletionRequest
from jaxserve.protocol.responses_api_requests import ResponsesRequest
from jaxserve.server.middleware import route_path

TRACED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})


class RequestSpan(Protocol):
    """One request's part of a trace."""

    def set_request(self, request: ChatCompletionRequest | CompletionRequest | ResponsesRequest, model: str) -> None:
        """What was asked for, once it is known to be valid, and the name of the model that is served."""
        ...

    def add_course(self, course: RequestCourse) -> None:
        """One of its prompts is done."""
        ...

    def end(self, status: int) -> None:
        """The response is out, or nobody waits for it any more."""
        ...


class Tracer(Protocol):
    """Keeps spans."""

    def start(self, scope: Scope) -> RequestSpan:
        """The span of a request that has come in; its parent is the one that the request's `traceparent` names."""
        ...

    def close(self) -> None:
        """Sends what is still here, for as long as the one it goes to takes it; may block for a while."""
        ...


class TraceMiddleware:
    """Opens a span for each request for an answer, and ends it with its response."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or route_path(scope) not in TRACED_PATHS:
            await self._app(scope, receive, send)
            return
        span = self._tracer.start(scope)
        scope["state"]["span"] = span
        status = 500  # what an exception that nobody foresaw becomes

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            span.end(status)


def tracer_for(endpoint: str | None, version: str) -> Tracer | None:
    """What sends spans to `endpoint`; None: they are not wanted.

    Args:
        endpoint: URL that takes OTLP over HTTP.

    Raises:
        RuntimeError: the packages that this needs are not installed.
    """
    if endpoint is None:
        return None
    try:
        # Here and not at the top: an extra that few need, and half a second of every start.
        from jaxserve.server.opentelemetry_traces import otlp_tracer
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise RuntimeError(
            f"traces need OpenTelemetry's packages ({error.name} is missing): scripts/setup otel in the "
            "checkout, or leave --otlp-traces-endpoint out"
        ) from error
    return otlp_tracer(endpoint, version)
