"""What a connection answers in the app's place: an error object with the request's id, and a line in the access log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app
from jaxserve.server.connection import MAX_PIPELINED
from tests.fakes import FakeEngine, endless, fake_service
from tests.server.harness import listening, raw_request, until

pytestmark = pytest.mark.anyio

CONFIG = ServerConfig(access_log="json")
IMPATIENT = ServerConfig(access_log="json", stalled_client_timeout=0.2)
HEAD = b"POST /v1/completions?key=hidden HTTP/1.1\r\nhost: x\r\nx-request-id: q1\r\ncontent-type: application/json\r\n"
AHEAD = b"GET /health HTTP/1.1\r\nx-request-id: ahead\r\n\r\n" * (MAX_PIPELINED + 1)


@asynccontextmanager
async def connection(
    config: ServerConfig = CONFIG,
) -> AsyncIterator[tuple[FakeEngine, asyncio.StreamReader, asyncio.StreamWriter]]:
    """To a server whose engine says nothing yet."""
    engine = FakeEngine(endless, max_model_len=1_000_000)
    engine.gate.clear()
    async with listening(create_app(fake_service(engine), config), config) as port, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        yield engine, reader, writer
        writer.close()
        await writer.wait_closed()


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Of the access log."""
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "jaxserve.access"]


async def refusal(reader: asyncio.StreamReader) -> tuple[int, str, dict[str, Any]]:
    """The only answer that comes: its status, id and error object."""
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    first, *fields = head.decode().split("\r\n")
    headers = dict(field.split(": ", 1) for field in fields)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert headers["connection"] == "close"
    return int(first.split()[1]), headers["x-request-id"], error


@pytest.mark.parametrize(
    ("sent", "status", "method", "path", "request_id"),
    [
        (b"GARBAGE\r\n\r\n", 400, None, None, None),
        (b"\x16\x03\x01 no HTTP\r\n\r\n", 400, None, None, None),
        (b"GET /a b HTTP/1.1\r\n\r\n", 400, "GET", "/a", None),
        (b"GET http://host HTTP/1.1\r\nx-request-id: q1\r\n\r\n", 400, "GET", None, "q1"),
        (b"CONNECT host:80 HTTP/1.1\r\nx-request-id: q1\r\n\r\n", 400, "CONNECT", None, "q1"),
        (HEAD + b"content-length: 5\r\nno header\r\n\r\n", 400, "POST", "/v1/completions", "q1"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{\"pro\r\nZZ\r\n", 400, "POST", "/v1/completions", "q1"),
        (b"GET /he%61lth HTTP/1.1\r\nx-request-id: q1\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
         400, "GET", "/health", "q1"),
        (b"GET /he", 408, "GET", "/he", None),
        (HEAD, 408, "POST", "/v1/completions", "q1"),
        (HEAD + b"content-length: 50\r\n\r\n{\"prompt\"", 408, "POST", "/v1/completions", "q1"),
    ],
    ids=[
        "a word", "TLS", "a URL", "no path", "a proxy's", "a header", "a chunk", "a chunk of no use", "a bit",
        "half a head", "half a body",
    ],
)  # fmt: skip
async def test_refusals_are_told_and_logged_once_under_one_id(
    sent: bytes, status: int, method: str | None, path: str | None, request_id: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "jaxserve.access")
    async with connection(IMPATIENT) as (_, reader, writer):
        writer.write(sent)
        told, told_id, error = await refusal(reader)
        await until(lambda: bool(lines(caplog)))
    (line,) = lines(caplog)
    assert (told, error["code"]) == (status, "invalid_http" if status == 400 else "request_timeout")
    assert (line["status"], line["complete"], line["method"], line["path"]) == (status, True, method, path)
    assert line["request_id"] == told_id
    assert told_id == request_id if request_id else len(told_id) == 32
    assert line["client"].startswith("127.0.0.1:")
    assert line["duration_ms"] >= (150 if status == 408 else 0)


async def test_a_refusal_as_text_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.access")
    async with connection(ServerConfig(access_log="text")) as (_, reader, writer):
        writer.write(b"GARBAGE\r\n\r\n")
        _, request_id, _ = await refusal(reader)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "jaxserve.access"]
    assert f" {request_id} - - 400 " in line


async def test_refusals_are_not_logged_where_answers_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.access")
    async with connection(ServerConfig(access_log="none")) as (_, reader, writer):
        writer.write(b"GARBAGE\r\n\r\n")
        assert (await refusal(reader))[0] == 400
    assert not [record for record in caplog.records if record.name == "jaxserve.access"]


@pytest.mark.parametrize("stream", [False, True])
async def test_too_much_ahead_refuses_the_request_before_it(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.access")
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    async with connection() as (engine, reader, writer):
        writer.write(HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        await until(lambda: bool(engine.live))
        writer.write(AHEAD)
        status, request_id, error = await refusal(reader)
        await until(lambda: bool(lines(caplog)))
    assert (status, request_id) == (400, "q1")
    assert error["message"] == f"more than {MAX_PIPELINED} requests were sent ahead of their answers"
    assert [(line["request_id"], line["status"], line["complete"]) for line in lines(caplog)] == [("q1", 400, True)]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning == f"a connection is closed: {error['message']}, request id q1"


async def test_an_answer_that_is_cut_for_too_much_ahead_has_its_cause_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "jaxserve.access")
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 500_000}).encode()
    async with connection() as (engine, reader, writer):
        engine.gate.set()
        writer.write(HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        await reader.readuntil(b"data: ")
        writer.write(AHEAD)
        assert b"HTTP/1.1" not in await reader.read()
        await until(lambda: bool(lines(caplog)))
    assert [(line["request_id"], line["status"], line["complete"]) for line in lines(caplog)] == [("q1", 200, False)]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.endswith("requests were sent ahead of their answers, request id q1")


async def test_what_comes_behind_an_answer_gets_no_second_one(caplog: pytest.LogCaptureFixture) -> None:
    """The body of a request that was answered without it is broken."""
    caplog.set_level(logging.INFO, "jaxserve.access")
    async with connection() as (_, reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        answer = await reader.readuntil(b"}")
        writer.write(b"ZZ\r\n")
        answer += await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1") == 1
    assert [line["status"] for line in lines(caplog)] == [200]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_its_answer_is_logged_as_gone(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jaxserve.access")
    engine = FakeEngine(endless)
    engine.gate.clear()
    async with listening(create_app(fake_service(engine), CONFIG), CONFIG) as port:
        writer = await raw_request(port, "/v1/completions", {"prompt": "x", "stream": stream})
        await until(lambda: bool(engine.live))
        writer.close()
        await writer.wait_closed()
        await until(lambda: bool(lines(caplog)))
    assert [line["status"] for line in lines(caplog)] == [499]
