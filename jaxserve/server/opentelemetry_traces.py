"""Traces kept by OpenTelemetry, with its conventions' names for what generative models do.

Names under `gen_ai.latency.` are vLLM's, for what the conventions have no name of: times within the server. Nothing that was
said is ever in a span: no prompt, no answer, no stop string.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.types import Scope

from jaxserve.protocol.observer import RequestCourse
from jaxserve.protocol.requests import ChatCompletionRequest, CompletionRequest
from jaxserve.protocol.responses_api_requests import ResponsesRequest
from jaxserve.server.middleware import route_path

_SERVICE = "jaxserve"
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/responses": "chat"}
_TRACES_PATH = "/v1/traces"  # where OTLP over HTTP takes spans, unless the URL says otherwise


class OpenTelemetryTracer:
    """A `Tracer`. Of OpenTelemetry's own settings those in the environment hold: sampling, resource, headers, batches.

    Args:
        processor: what spans go to when they end.
    """

    def __init__(self, processor: SpanProcessor, version: str) -> None:
        resource = Resource.create({SERVICE_VERSION: version})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # the environment names none
            resource = resource.merge(Resource({SERVICE_NAME: _SERVICE}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `close` does, and within its time
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(_SERVICE, version)
        self._propagator = TraceContextTextMapPropagator()

    def start(self, scope: Scope) -> OpenTelemetrySpan:
        path = route_path(scope)
        operation = _OPERATIONS[path]
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _SERVICE,
            "gen_ai.request.id": scope["state"]["request_id"],
            "http.request.method": scope["method"],
            "http.route": path,
        }
        parent = self._propagator.extract(_trace_headers(scope))
        return OpenTelemetrySpan(
            self._tracer.start_span(operation, context=parent, kind=SpanKind.SERVER, attributes=attributes), operation
        )

    def close(self) -> None:
        self._provider.shutdown()


class OpenTelemetrySpan:
    """A `RequestSpan`."""

    def __init__(self, span: Span, operation: str) -> None:
        self._span = span
        self._operation = operation
        self._courses: list[RequestCourse] = []

    def set_request(self, request: ChatCompletionRequest | CompletionRequest | ResponsesRequest, model: str) -> None:
        is_response = isinstance(request, ResponsesRequest)
        attributes: dict[str, AttributeValue | None] = {
            "gen_ai.request.model": request.model or model,
            "gen_ai.response.model": model,
            "gen_ai.request.max_tokens": request.max_output_tokens if is_response else request.output_limit,
            "gen_ai.request.choice.count": None if is_response or request.n == 1 else request.n,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.top_p": request.top_p,
            "gen_ai.request.top_k": request.top_k or None,
            "gen_ai.request.seed": request.seed,
            "gen_ai.request.presence_penalty": request.presence_penalty or None,
            "gen_ai.request.frequency_penalty": request.frequency_penalty or None,
            "gen_ai.request.stream": request.stream,
        }
        self._span.update_name(f"{self._operation} {model}")
        self._span.set_attributes(_present(attributes))

    def add_course(self, course: RequestCourse) -> None:
        self._courses.append(course)

    def end(self, status: int) -> None:
        outcomes = [outcome for course in self._courses for outcome in course.outcomes]
        if self._courses:
            self._span.set_attributes(_course_attributes(self._courses))
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500 or "error" in outcomes:
            self._span.set_attribute("error.type", str(status) if status >= 500 else "engine_error")
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def otlp_tracer(endpoint: str, version: str) -> OpenTelemetryTracer:
    """A tracer that sends spans in batches to `endpoint`, from a thread of its own.

    Args:
        endpoint: URL; one without a path gets OTLP's.
    """
    url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _TRACES_PATH
    return OpenTelemetryTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)), version)


def _course_attributes(courses: list[RequestCourse]) -> Mapping[str, AttributeValue]:
    """Sums over the prompts; of times those of the prompt that had its first token first, and the end of the last."""
    started = [course for course in courses if course.queued is not None and course.prefill is not None]
    first = min(started, key=lambda course: (course.queued or 0.0) + (course.prefill or 0.0), default=None)
    return _present({
        "gen_ai.response.finish_reasons": [outcome for course in courses for outcome in course.outcomes],
        "gen_ai.usage.input_tokens": sum(course.prompt_tokens for course in courses),
        "gen_ai.usage.output_tokens": sum(course.completion_tokens for course in courses),
        "gen_ai.usage.cache_read.input_tokens": sum(course.cached_tokens for course in courses),
        "gen_ai.latency.e2e": max(course.total for course in courses),
        "gen_ai.latency.time_in_queue": first and first.queued,
        "gen_ai.latency.time_to_first_token": first and (first.queued or 0.0) + (first.prefill or 0.0),
        "gen_ai.latency.time_in_model_prefill": first and first.prefill,
        "gen_ai.latency.time_in_model_decode": first and first.decode,
    })  # fmt: skip


def _present(attributes: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    return {name: value for name, value in attributes.items() if value is not None}


def _trace_headers(scope: Scope) -> dict[str, str]:
    """`traceparent` and `tracestate`; none where there are two parents."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name in (b"traceparent", b"tracestate"):
            key, text = name.decode("ascii"), value.decode("latin-1")
            headers[key] = f"{headers[key]},{text}" if key in headers else text
    return headers
