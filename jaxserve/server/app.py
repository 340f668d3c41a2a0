"""The HTTP application: routes and what stands before them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.config import ServerConfig
from jaxserve.protocol.chunk_stream import ChunkStream
from jaxserve.protocol.observer import RequestObserver
from jaxserve.protocol.parsing import parse_chat_request, parse_completion_request
from jaxserve.protocol.requests import ChatCompletionRequest, CompletionRequest
from jaxserve.protocol.responses import ResponseModel
from jaxserve.protocol.responses_api_requests import ResponsesRequest, parse_responses_request
from jaxserve.protocol.service import OpenAIService
from jaxserve.protocol.tokenize_requests import parse_detokenize_request, parse_tokenize_request
from jaxserve.server.access_log import AccessLogMiddleware
from jaxserve.server.body import parse_body, read_body
from jaxserve.server.cors import CrossOriginMiddleware
from jaxserve.server.disconnect import until_disconnected
from jaxserve.server.errors import EXCEPTION_HANDLERS, json_response
from jaxserve.server.long_json import answer_response
from jaxserve.server.metrics import Metrics
from jaxserve.server.middleware import (
    BODIES_AT_ONCE,
    ApiKeyMiddleware,
    BodyMemoryMiddleware,
    ConnectionLimitMiddleware,
    LastResortMiddleware,
    LoadMiddleware,
    OldHttpMiddleware,
    RequestContextMiddleware,
    RootPathMiddleware,
    ServerLoad,
)
from jaxserve.server.observed_request import ObservedRequest
from jaxserve.server.openapi import openapi_document
from jaxserve.server.request_log import RequestLog
from jaxserve.server.slot import ServiceSlot
from jaxserve.server.streaming import EventStreamResponse
from jaxserve.server.traces import RequestSpan, TraceMiddleware, Tracer
from jaxserve.server.web_page import web_routes
from jaxserve.version import version

RequestT = TypeVar("RequestT", ChatCompletionRequest, CompletionRequest, ResponsesRequest)


def create_app(service: OpenAIService | ServiceSlot, config: ServerConfig, tracer: Tracer | None = None) -> Starlette:
    """The application that serves `service`, or whatever comes to be in the slot.

    It answers OpenAI's routes, and beside them /tokenize, /detokenize, /health, /metrics, /stats, /load, /version and
    /openapi.json. The tracer, if there is one, stays the caller's to close.
    """
    slot = service if isinstance(service, ServiceSlot) else ServiceSlot(service)
    load = ServerLoad()
    routes = _Routes(slot, config, Metrics(slot), load)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/responses", routes.responses, methods=["POST"]),
            Route("/v1/models", routes.models, methods=["GET"]),
            Route("/v1/models/{name:path}", routes.model, methods=["GET"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/health", routes.health, methods=["GET"]),
            Route("/metrics", routes.metrics, methods=["GET"]),
            Route("/flush_cache", routes.flush_cache, methods=["POST"]),
            Route("/stats", routes.stats, methods=["GET"]),
            Route("/version", routes.version, methods=["GET"]),
            Route("/load", routes.load, methods=["GET"]),
            Route("/openapi.json", routes.openapi, methods=["GET"]),
            *web_routes(),
        ],
        middleware=_middleware(config, load, tracer),
        exception_handlers=EXCEPTION_HANDLERS,  # type: ignore[arg-type]
    )
    app.router.redirect_slashes = False  # a redirect is no error object, and clients drop the body of a redirected POST
    return app


def _middleware(config: ServerConfig, load: ServerLoad, tracer: Tracer | None) -> list[Middleware]:
    """What a request passes, outermost first."""
    layers = [Middleware(OldHttpMiddleware)]
    if config.root_path:
        layers.append(Middleware(RootPathMiddleware, root_path=config.root_path))
    if config.access_log != "none":
        layers.append(Middleware(AccessLogMiddleware, form=config.access_log))
    layers.append(Middleware(RequestContextMiddleware))
    if config.allowed_origins:
        layers.append(Middleware(CrossOriginMiddleware, allowed_origins=config.allowed_origins))
    layers.append(Middleware(LastResortMiddleware))  # inside: pages are to read its answers too
    layers.append(Middleware(ConnectionLimitMiddleware))
    layers.append(Middleware(ApiKeyMiddleware, api_keys=config.api_keys, admin_api_keys=config.admin_api_keys))
    layers.append(Middleware(LoadMiddleware, load=load))
    layers.append(Middleware(BodyMemoryMiddleware, max_bytes=BODIES_AT_ONCE * config.max_body_bytes))
    if tracer is not None:
        layers.append(Middleware(TraceMiddleware, tracer=tracer))
    return layers


class _Routes:
    """The endpoints, over what they share."""

    def __init__(self, slot: ServiceSlot, config: ServerConfig, metrics: Metrics, load: ServerLoad) -> None:
        self._slot = slot
        self._config = config
        self._metrics = metrics
        self._load = load
        self._openapi: dict[str, Any] | None = None
        self._log = RequestLog(content=config.log_requests_content) if config.log_requests else None

    async def chat_completions(self, request: Request) -> Response:
        service = self._slot.for_work()
        whole, streamed = (
            partial(service.chat_completion, lazy=True),
            partial(service.chat_completion_stream, lazy=True),
        )
        return await self._answer(request, service, parse_chat_request, whole, streamed)

    async def completions(self, request: Request) -> Response:
        service = self._slot.for_work()
        whole, streamed = partial(service.completion, lazy=True), partial(service.completion_stream, lazy=True)
        return await self._answer(request, service, parse_completion_request, whole, streamed)

    async def responses(self, request: Request) -> Response:
        service = self._slot.for_work()
        whole, streamed = partial(service.response, lazy=True), partial(service.response_stream, lazy=True)
        return await self._answer(request, service, parse_responses_request, whole, streamed)

    async def tokenize(self, request: Request) -> Response:
        service = self._slot.loaded()
        _, parsed = await parse_body(await self._read(request), parse_tokenize_request)
        result = await until_disconnected(request.receive, service.tokenize(parsed))
        return answer_response(result)

    async def detokenize(self, request: Request) -> Response:
        service = self._slot.loaded()
        _, parsed = await parse_body(await self._read(request), parse_detokenize_request)
        result = await until_disconnected(request.receive, service.detokenize(parsed))
        return answer_response(result)

    async def models(self, request: Request) -> Response:
        return json_response(self._slot.loaded().models().model_dump())

    async def model(self, request: Request) -> Response:
        return json_response(self._slot.loaded().model(request.path_params["name"]).model_dump())

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok", "device": self._slot.for_work().engine.device_kind})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def stats(self, request: Request) -> Response:
        return json_response(dataclasses.asdict(self._slot.loaded().engine.stats()))  # type: ignore[call-overload]

    async def flush_cache(self, request: Request) -> Response:
        return json_response({"freed_pages": await self._slot.loaded().flush_cache()})

    async def version(self, request: Request) -> Response:
        return json_response({"version": version()})

    async def load(self, request: Request) -> Response:
        return json_response({"server_load": self._load.requests})

    async def openapi(self, request: Request) -> Response:
        if self._openapi is None:  # a tenth of a second's work, and always the same
            self._openapi = await asyncio.to_thread(openapi_document, self._config, version())
        return json_response(self._openapi)

    async def _read(self, request: Request) -> bytes:
        return await self._slot.before_draining(read_body(request, self._config.max_body_bytes))

    async def _answer(
        self,
        request: Request,
        service: OpenAIService,
        parse: Callable[[Mapping[str, Any]], RequestT],
        whole: Callable[[RequestT, RequestObserver], Coroutine[Any, Any, ResponseModel]],
        streamed: Callable[[RequestT, RequestObserver], Coroutine[Any, Any, ChunkStream[Any]]],
    ) -> Response:
        raw = await self._read(request)
        span: RequestSpan | None = request.scope["state"].get("span")
        request_id: str = request.scope["state"]["request_id"]
        observer = ObservedRequest(self._metrics, request_id, span)
        body, parsed = await parse_body(raw, parse)
        if span is not None:
            span.set_request(parsed, service.model_name)
        if self._log is not None:
            self._log.log(request_id, request.url.path, body)
        if parsed.stream:
            return EventStreamResponse(await until_disconnected(request.receive, streamed(parsed, observer)))
        result = await until_disconnected(request.receive, whole(parsed, observer))
        return answer_response(result)
