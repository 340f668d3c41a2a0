"""Measuring an endpoint: against the real server around a scripted engine, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.bench.client_processes import ProcessTarget, make_client
from jaxserve.bench.endpoint import EndpointOptions, first_model, request_of
from jaxserve.bench.endpoint_run import measure_endpoint
from jaxserve.bench.http_streams import StreamPool
from jaxserve.bench.http_target import HttpTarget
from jaxserve.bench.load import LoadRun
from jaxserve.bench.records import Load, RequestRecord, RunResult, summarize
from jaxserve.bench.run import BenchOptions
from jaxserve.bench.workload import Prompts, Workload, load_workload
from jaxserve.bench.workload_files import Task
from jaxserve.config import ServerConfig
from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.server.app import create_app
from jaxserve.version import version
from tests.fakes import MODEL_NAME, FakeEngine, FakeStats, endless, fake_service
from tests.server.harness import listening

pytestmark = pytest.mark.anyio
FIXED = load_workload("fixed:6/20")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def endpoint_of(engine: FakeEngine, config: ServerConfig | None = None) -> AsyncIterator[str]:
    async with listening(create_app(fake_service(engine), config or ServerConfig())) as port:
        yield f"http://127.0.0.1:{port}"


def measure(
    options: EndpointOptions,
    load: Load,
    count: int,
    client: str = "own",
    processes: int | None = None,
    workload: Workload = FIXED,
) -> RunResult:
    prompts = Prompts(200)
    target: HttpTarget | ProcessTarget
    if processes is None:
        target = HttpTarget(options, options.model or first_model(options), prompts, make_client(client, options))
    else:
        target = ProcessTarget(options, prompts, client=client, processes=processes, warms_up=True)
    try:
        return LoadRun(target, workload, load, count).run(20.0)
    finally:
        target.close()


@pytest.mark.parametrize("form", ["token-ids", "text", "chat"])
async def test_every_form_of_request_is_measured(form: str) -> None:
    engine = FakeEngine(endless, token_delay=0.002)
    async with endpoint_of(engine) as url:
        options = EndpointOptions(url, form=form)  # type: ignore[arg-type]
        result = await asyncio.to_thread(measure, options, Load("concurrency", 2), 4)
    assert [record.output_tokens for record in result.records] == [20] * 4
    assert all(record.error is None for record in result.records)
    assert all(record.submitted < record.first_token < record.last_token for record in result.records)
    prompt, asked = min(engine.submitted, key=lambda request: request[1].seed or 0)[:2]  # whichever arrived first
    assert (asked.max_tokens, asked.temperature, asked.ignore_eos, asked.seed) == (20, 0.0, True, 0)
    if form == "token-ids":
        assert prompt == Prompts(200).token_ids(Task(6, 20), 0)
        assert result.records[0].prompt_tokens == 6


async def test_tokens_are_counted_where_a_chunk_holds_several() -> None:
    async with endpoint_of(FakeEngine(endless, tokens_per_output=7)) as url:
        result = await asyncio.to_thread(measure, EndpointOptions(f"{url}/v1"), Load("concurrency", 2), 6)
    assert [record.output_tokens for record in result.records] == [20] * 6
    assert result.output_tokens >= 6 * 20


async def test_what_an_endpoint_drafted_is_read_where_it_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(endless)
    stats = engine.stats()

    def drafting() -> FakeStats:
        count = len(engine.submitted)
        return replace(stats, speculative=SpeculativeStats("ngram", count, (count, count), (count, 0)))

    async with endpoint_of(engine) as url:
        options = EndpointOptions(url, model=MODEL_NAME)
        assert (await asyncio.to_thread(measure, options, Load("concurrency", 1), 1)).speculation is None
        monkeypatch.setattr(engine, "stats", drafting)
        result = await asyncio.to_thread(measure, options, Load("concurrency", 1), 1)
    assert result.speculation == SpeculativeStats("ngram", 1, (1, 1), (1, 0))


async def test_what_still_runs_is_ended_with_the_run() -> None:
    engine = FakeEngine(endless, token_delay=0.005)
    async with endpoint_of(engine) as url:
        # The fourth answer is long: it still runs when the measured ones have ended.
        workload = Workload("mixed", (*FIXED.tasks * 3, Task(6, 240)))
        await asyncio.to_thread(measure, EndpointOptions(url), Load("concurrency", 4), 3, workload=workload)
        async with asyncio.timeout(5):
            while engine.live:
                await asyncio.sleep(0.01)
    assert engine.aborted


async def test_refusals_are_records_with_their_status() -> None:
    async with endpoint_of(FakeEngine(endless, max_live=1, token_delay=0.01)) as url:
        result = await asyncio.to_thread(measure, EndpointOptions(url), Load("rate", 500.0), 5)
    errors = [record.error for record in result.records if record.error is not None]
    assert errors and all(error.startswith("status 429") for error in errors)
    assert len(errors) < 5


@pytest.mark.parametrize("client", ["own", "openai"])
async def test_a_refusal_is_told_with_its_remedy_alone(client: str) -> None:
    """Not with the JSON around it, for which the remedy at its end would be cut."""
    if client == "openai":
        pytest.importorskip("openai")
    async with endpoint_of(FakeEngine(endless, max_live=1, token_delay=0.01)) as url:
        load = Load("rate", 500.0)
        result = await asyncio.to_thread(measure, EndpointOptions(url), load, 5, client)
    reason = summarize(load, [result]).reason
    assert reason.startswith("status 429: ") and "{" not in reason and reason.endswith("too many requests wait"), reason


async def test_an_engine_that_fails_on_the_way_is_a_record_with_its_error() -> None:
    async with endpoint_of(FakeEngine(endless, fail_after=5)) as url:
        result = await asyncio.to_thread(measure, EndpointOptions(url, model=MODEL_NAME), Load("rate", 100.0), 1)
    assert result.records[0].error is not None


async def test_the_key_is_sent() -> None:
    async with endpoint_of(FakeEngine(endless), ServerConfig(api_keys=("secret",))) as url:
        result = await asyncio.to_thread(measure, EndpointOptions(url, api_key="secret"), Load("concurrency", 1), 1)
        assert result.records[0].error is None
        with pytest.raises(RuntimeError, match="cannot learn which model"):
            await asyncio.to_thread(first_model, EndpointOptions(url))


async def test_the_engines_own_numbers_are_read_where_the_endpoint_has_them() -> None:
    async with endpoint_of(FakeEngine(endless, token_delay=0.03)) as url:
        result = await asyncio.to_thread(measure, EndpointOptions(url), Load("concurrency", 3), 3)
    assert result.host_gap == 0.0
    # Which moment a sample catches is up to the machine: on a busy one the first comes before the requests do.
    assert max(snapshot.num_running for snapshot in result.timeline) == 3
    assert all(snapshot.used_pages == snapshot.num_running for snapshot in result.timeline)


@pytest.mark.parametrize("client", ["own", "openai"])
async def test_client_processes_share_the_load(client: str) -> None:
    engine = FakeEngine(endless)
    async with endpoint_of(engine) as url:
        result = await asyncio.to_thread(measure, EndpointOptions(url), Load("concurrency", 4), 8, client, 2)
    assert sorted(record.index for record in result.records) == list(range(8))
    assert [record.output_tokens for record in result.records] == [20] * 8
    assert all(record.error is None for record in result.records)
    lengths = [sampling.max_tokens for _, sampling in engine.submitted]
    assert lengths[:2] == [1, 1] and set(lengths[2:]) == {20}  # each client had an answer before any was measured


@pytest.mark.parametrize("name", ["run.json", "run"])
async def test_what_an_endpoint_gave_is_written_to_a_file_or_a_folder(tmp_path: Path, name: str) -> None:
    options = BenchOptions(workload=FIXED, loads=(Load("concurrency", 2),), num_requests=3)
    async with endpoint_of(FakeEngine(endless)) as url:
        table, [summary] = await asyncio.to_thread(
            measure_endpoint, EndpointOptions(url), options, name="peer", vocab_size=256, client="own",
            client_processes=1, num_devices=2, on_summary=lambda summary: None, output=tmp_path / name,
            command=["jaxserve"],
        )  # fmt: skip
    assert MODEL_NAME in table and (summary.num_requests, summary.num_failed) == (3, 0)
    if name == "run.json":
        data = json.loads((tmp_path / name).read_text())
        assert [record["output_tokens"] for record in data["requests"]["2"]] == [20] * 3
        known = data
    else:
        known = json.loads((tmp_path / name / "environment.json").read_text())
        assert (tmp_path / name / "concurrency-2.summary.json").is_file()
    assert known["jaxserve"] == version()
    assert known["num_devices"] == 2 and known["traffic"]["num_requests"] == 3


@asynccontextmanager
async def scripted(respond: Callable[[asyncio.StreamWriter, int], None]) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that reads requests and has `respond` write what it likes; closes the connection when that closes it."""
    requests: list[bytes] = []

    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.current_task())  # type: ignore[arg-type]
        while not writer.is_closing():
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionResetError):
                break
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                continue
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            requests.append(head + await reader.readexactly(length))
            respond(writer, len(requests))
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests
    finally:
        server.close()
        await server.wait_closed()
        await asyncio.wait_for(asyncio.gather(*handlers), 5)


def chunked(*events: bytes, end: bool = True) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + (b"0\r\n\r\n" if end else b"")


TEXT = b'data: {"choices": [{"index": 0, "text": "word", "finish_reason": null}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 6, "completion_tokens": 20}}\n\n'
DONE = b"data: [DONE]\n\n"


async def ask(pool: StreamPool) -> tuple[int, bytes, list[bytes]]:
    read: list[bytes] = []
    response = await pool.post("/v1/completions", {}, b"{}", lambda now, data: read.append(data))
    return response.status, response.body, read


async def test_a_connection_is_used_again() -> None:
    ports = set()

    def respond(writer: asyncio.StreamWriter, count: int) -> None:
        ports.add(writer.get_extra_info("peername")[1])
        writer.write(chunked(TEXT, DONE))

    async with scripted(respond) as (url, requests):
        pool = StreamPool(url)
        for _ in range(3):
            assert await ask(pool) == (200, b"", [TEXT, DONE])
        pool.close()
    assert len(requests) == 3 and len(ports) == 1


async def test_an_idle_connection_that_the_endpoint_closed_is_replaced() -> None:
    def respond(writer: asyncio.StreamWriter, count: int) -> None:
        if count == 2:
            writer.close()  # just as the second request arrives, before a byte of its answer
        else:
            writer.write(chunked(TEXT, DONE))

    async with scripted(respond) as (url, requests):
        pool = StreamPool(url)
        assert (await ask(pool))[0] == 200
        assert (await ask(pool))[0] == 200
        pool.close()
    assert len(requests) == 3


def record_of(url: str) -> RequestRecord:
    return measure(EndpointOptions(url, model="m"), Load("rate", 1.0), 1).records[0]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (chunked(TEXT, end=False), "closed the connection"),
        (chunked(TEXT, USAGE), r"ended without \[DONE\]"),
        (chunked(TEXT, DONE), "neither usage nor tokens"),
        (chunked(USAGE, DONE), "holds no token"),
        (chunked(b'data: {"error": {"message": "boom"}}\n\n'), "^boom$"),
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\nboom", "status 500: boom"),
        (b'HTTP/1.1 500 Oops\r\ncontent-length: 17\r\n\r\n{"error": "boom"}', "status 500: boom$"),
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 5\r\n\r\n[500]", r"status 500: \[500\]$"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP"),
    ],
)
async def test_what_is_wrong_with_an_answer_is_told(answer: bytes, error: str) -> None:
    def respond(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(answer)
        if b"transfer-encoding" not in answer or not answer.endswith(b"0\r\n\r\n"):
            writer.close()

    async with scripted(respond) as (url, _):
        record = await asyncio.to_thread(record_of, url)
    assert record.error is not None
    assert re.search(error, record.error), record.error


async def test_a_whole_answer_of_any_endpoint_is_measured_without_its_own_numbers() -> None:
    def respond(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(chunked(TEXT, TEXT, USAGE, DONE))

    async with scripted(respond) as (url, requests):
        record = await asyncio.to_thread(record_of, url)
    assert (record.error, record.output_tokens) == (None, 20)
    body = json.loads(requests[-1].partition(b"\r\n\r\n")[2])
    assert body["stream_options"] == {"include_usage": True}


ENDLESS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (ENDLESS + TEXT + USAGE + DONE, None),
        (ENDLESS + TEXT, r"ended without \[DONE\]"),
        (b"HTTP/1.0 503 Busy\r\n\r\ncome again", "status 503: come again"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n" + TEXT, "closed the connection"),
        (b"HTTP/1.1 200 OK\r\ncontent-type", "closed the connection"),
    ],
)
async def test_an_answer_without_a_length_ends_with_the_connection(answer: bytes, error: str | None) -> None:
    def respond(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(answer)
        writer.close()

    async with scripted(respond) as (url, requests):
        record = await asyncio.to_thread(record_of, url)
    assert len(requests) == 1
    if error is None:
        assert (record.error, record.output_tokens) == (None, 20)
    else:
        assert record.error is not None and re.search(error, record.error), record.error


async def test_nobody_listening_is_an_error_of_the_request() -> None:
    async with scripted(lambda writer, count: None) as (url, _):
        pass
    assert (await asyncio.to_thread(record_of, url)).error


def test_a_request_with_a_schema_is_a_chat_request_with_a_response_format() -> None:
    workload = load_workload("json-schema")
    path, body = request_of(EndpointOptions("http://x"), "m", Prompts(100), workload.tasks[0], 0)
    assert path == "/v1/chat/completions"
    assert body["response_format"]["json_schema"]["schema"]["type"] == "object"
    assert "ignore_eos" not in body
    assert body["messages"][0]["content"] == workload.tasks[0].text


def test_further_fields_are_sent_as_they_are() -> None:
    options = EndpointOptions("http://x", extra_body={"return_token_ids": True, "temperature": 0.5}, ignore_eos=False)
    _, body = request_of(options, "m", Prompts(100), Task(2, 3), 0)
    assert body["return_token_ids"] is True and body["temperature"] == 0.5 and "ignore_eos" not in body


@pytest.mark.parametrize(
    "url", ["ftp://x", "127.0.0.1:8000", "http://", "http://x:99999", "http://x:port", "http://[::1"]
)
def test_an_endpoint_that_is_no_url_is_refused(url: str) -> None:
    for make in (StreamPool, EndpointOptions):
        with pytest.raises(ValueError, match="must look like"):
            make(url)
