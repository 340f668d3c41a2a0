"""OpenTelemetry spans: what a request's span tells, whose child it is, and that it reaches a collector."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app
from jaxserve.server.opentelemetry_traces import OpenTelemetryTracer
from jaxserve.server.traces import tracer_for
from tests.fakes import EOS, MODEL_NAME, FakeEngine, endless, fake_service, say
from tests.server.harness import USER, listening, until
from tests.server.processes import ROOT, server_process

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
SECRET = "a word that nobody else may read"


@asynccontextmanager
async def traced(
    engine: FakeEngine, config: ServerConfig | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, InMemorySpanExporter]]:
    """A client of a server for this engine, and what its spans go to."""
    config = config or ServerConfig()
    exporter = InMemorySpanExporter()
    tracer = OpenTelemetryTracer(SimpleSpanProcessor(exporter), "1.2.3")
    async with (
        listening(create_app(fake_service(engine), config, tracer)) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client,
    ):
        yield client, exporter
    tracer.close()


async def only_span(exporter: InMemorySpanExporter) -> ReadableSpan:
    await until(lambda: bool(exporter.get_finished_spans()))  # it ends a moment after its response
    (span,) = exporter.get_finished_spans()
    return span


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_s_span(stream: bool) -> None:
    async with traced(FakeEngine(say("Hello"), token_delay=0.01)) as (client, exporter):
        answer = await client.post(
            "/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": SECRET}], "max_tokens": 50, "temperature": 0.5, "top_p": 0.9,
                "seed": 3, "stop": SECRET, "stream": stream,
            },
            headers={"traceparent": TRACEPARENT, "x-request-id": "mine"},
        )  # fmt: skip
        assert answer.status_code == 200
        span = await only_span(exporter)
    assert span.name == f"chat {MODEL_NAME}"
    assert span.kind is SpanKind.SERVER
    assert span.status.status_code is StatusCode.UNSET
    found = attributes(span)
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": MODEL_NAME, "gen_ai.response.model": MODEL_NAME,
        "gen_ai.request.max_tokens": 50, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3, "gen_ai.request.stream": stream, "gen_ai.request.id": "mine",
        "gen_ai.response.finish_reasons": ("stop",), "gen_ai.usage.output_tokens": len("Hello") + 1,
        "http.route": "/v1/chat/completions", "http.response.status_code": 200,
    }  # fmt: skip
    assert found.items() >= expected.items()
    assert found["gen_ai.usage.input_tokens"] > len(SECRET)
    assert 0 < found["gen_ai.latency.time_to_first_token"] < found["gen_ai.latency.e2e"]
    assert found["gen_ai.latency.time_in_queue"] <= found["gen_ai.latency.time_to_first_token"]
    assert SECRET not in span.to_json()
    assert span.resource.attributes["service.name"] == "jaxserve"


@pytest.mark.anyio
async def test_parents_come_from_the_request() -> None:
    async with traced(FakeEngine(say("x"))) as (client, exporter):
        for headers in ({"traceparent": TRACEPARENT}, {"traceparent": "nonsense"}, {}):
            await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        unsampled = TRACEPARENT.removesuffix("01") + "00"
        await client.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": unsampled})
        await until(lambda: len(exporter.get_finished_spans()) >= 3)
        child, *roots = exporter.get_finished_spans()
    assert child.parent is not None
    assert f"{child.parent.trace_id:032x}-{child.parent.span_id:016x}" == f"{TRACE_ID}-{PARENT_ID}"
    assert [root.parent for root in roots] == [None, None]  # and the one that asked not to be sampled is not there


@pytest.mark.anyio
async def test_several_prompts_and_choices_are_one_span() -> None:
    async with traced(FakeEngine(lambda prompt, sampling, index: [*b"abc"[: index + 1], EOS])) as (client, exporter):
        await client.post("/v1/completions", json={"prompt": ["x", "yz"], "n": 2})
        found = attributes(await only_span(exporter))
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.request.max_tokens"] == 16
    assert found["gen_ai.request.choice.count"] == 2
    assert found["gen_ai.response.finish_reasons"] == ("stop",) * 4
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (3, 2 * (2 + 3))


@pytest.mark.anyio
async def test_responses_route() -> None:
    async with traced(FakeEngine(say("Hello"))) as (client, exporter):
        await client.post("/v1/responses", json={"input": "x", "max_output_tokens": 3})
        found = attributes(await only_span(exporter))
    assert found["gen_ai.request.max_tokens"] == 3
    assert found["gen_ai.response.finish_reasons"] == ("length",)


@pytest.mark.anyio
async def test_refused_requests_have_a_span_and_are_no_fault_of_the_server() -> None:
    async with traced(FakeEngine(say("x"))) as (client, exporter):
        await client.post("/v1/completions", json={"prompt": SECRET, "top_p": 7})
        span = await only_span(exporter)
    assert attributes(span)["http.response.status_code"] == 400
    assert span.status.status_code is StatusCode.UNSET
    assert SECRET not in span.to_json()


@pytest.mark.anyio
@pytest.mark.parametrize(("stream", "status"), [(False, 500), (True, 200)])
async def test_failures_are_errors(stream: bool, status: int) -> None:
    async with traced(FakeEngine(endless, fail_after=3)) as (client, exporter):
        answer = await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert answer.status_code == status
        span = await only_span(exporter)
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == ("engine_error" if stream else "500")
    assert attributes(span)["gen_ai.response.finish_reasons"] == ("error",)


@pytest.mark.anyio
async def test_a_client_that_leaves_ends_its_span() -> None:
    async with traced(FakeEngine(endless, token_delay=0.01, max_model_len=10**6)) as (client, exporter):
        async with client.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 10**5, "stream": True}):
            pass
        span = await only_span(exporter)
    assert attributes(span)["gen_ai.response.finish_reasons"] == ("abort",)


@pytest.mark.anyio
async def test_only_requests_for_answers_that_may_come_in_have_spans() -> None:
    async with traced(FakeEngine(say("x")), ServerConfig(api_keys=("secret",))) as (client, exporter):
        await client.get("/health")
        await client.post("/v1/completions", json={"prompt": "x"})
        await client.post("/tokenize", json={"prompt": "x"}, headers={"authorization": "Bearer secret"})
        await client.post("/v1/completions", json={"prompt": "x"}, headers={"authorization": "Bearer secret"})
        assert attributes(await only_span(exporter))["http.response.status_code"] == 200


def test_without_an_endpoint_nothing_is_loaded() -> None:
    code = (
        "import sys; import jaxserve.server.lifecycle as l; from jaxserve.server.traces import tracer_for\n"
        "assert tracer_for(None, '1') is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_packages_that_are_missing_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jaxserve.server.opentelemetry_traces")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(RuntimeError, match=r"opentelemetry\.sdk\.trace is missing.*scripts/setup otel") as error:
        tracer_for("http://localhost:4318", "1")
    assert "\n" not in str(error.value)


class Collector(ThreadingHTTPServer):
    """Takes spans as OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CollectorHandler)
        self.paths: list[str] = []
        self.spans: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _CollectorHandler(BaseHTTPRequestHandler):
    server: Collector  # type: ignore[assignment]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.paths.append(self.path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def fake_server(endpoint: str) -> list[str]:
    options = {"server": {"otlp_traces_endpoint": endpoint}, "token_delay": 0}
    return ["-m", "tests.server.fake_server", json.dumps(options)]


def ask(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={"messages": [USER], "max_tokens": 2})


@pytest.mark.parametrize("path", ["", "/otlp/v1/traces"])
def test_spans_reach_a_collector_before_the_process_ends(tmp_path: Path, path: str) -> None:
    with collector() as received, server_process(fake_server(received.url + path), tmp_path / "log") as server:
        assert ask(server.wait_ready()).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert received.paths == [path or "/v1/traces"]
        assert [span.name for span in received.spans] == [f"chat {MODEL_NAME}"]


def test_a_collector_that_is_not_there_does_no_harm(tmp_path: Path) -> None:
    with server_process(fake_server("http://127.0.0.1:9"), tmp_path / "log") as server:
        url = server.wait_ready()
        assert ask(url).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert "Traceback" not in server.log
