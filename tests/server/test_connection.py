"""Clients that do not read, never stop sending, or do not go on: what they may hold, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app
from jaxserve.server.connection import (
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    MAX_PIPELINED_BYTES,
    SPARE_CONNECTIONS,
    uvicorn_config,
)
from jaxserve.server.slot import ServiceSlot
from tests.fakes import FakeEngine, endless, fake_service, say
from tests.server.harness import assert_error, listening, until
from tests.server.processes import ROOT

pytestmark = pytest.mark.anyio

ENDLESS: dict[str, Any] = {"prompt": "x", "max_tokens": 50_000_000, "stream": True}


class FastEngine(FakeEngine):
    """Does not wait before each token: fills any buffer in no time."""

    async def before_token(self, count: int) -> None:
        if count % 1000 == 0:
            await asyncio.sleep(0)


def fast_engine() -> FakeEngine:
    return FastEngine(endless, tokens_per_output=1000, max_model_len=100_000_000)


async def open_small(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that holds next to nothing of what is not read, with a request for an endless stream sent on it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=client, limit=1024)
    body = json.dumps(ENDLESS).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    return reader, writer


async def test_a_client_that_never_reads_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    engine = fast_engine()
    config = ServerConfig(stalled_client_timeout=0.3)
    async with listening(create_app(fake_service(engine), config), config, send_buffer=4096) as port:
        _, writer = await open_small(port)
        await until(lambda: bool(engine.live))
        await until(lambda: not engine.live, seconds=20)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        writer.close()
    assert "took nothing of its answer" in caplog.text


async def test_a_client_that_reads_slowly_is_not(caplog: pytest.LogCaptureFixture) -> None:
    engine = fast_engine()
    config = ServerConfig(stalled_client_timeout=0.5)
    async with listening(create_app(fake_service(engine), config), config, send_buffer=4096) as port:
        reader, writer = await open_small(port)
        for _ in range(20):
            await reader.readexactly(20_000)
            await asyncio.sleep(0.1)
        assert engine.live
        writer.close()
        await until(lambda: not engine.live)
    assert "cut off" not in caplog.text


@pytest.mark.parametrize("line", [b"x-more: yyyyy\r\n", b"y" * 16])
async def test_headers_without_end_are_refused(line: bytes) -> None:
    config = ServerConfig()
    async with listening(create_app(fake_service(FakeEngine(say("x"))), config), config) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        start = b"GET /health HTTP/1.1\r\nx-long: "
        # Not a byte more than it takes: what the server leaves unread would reset the connection before we read why.
        writer.write((start + line * MAX_HEAD_BYTES)[: MAX_HEAD_BYTES + 1])
        async with asyncio.timeout(10):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"head is longer" in answer
        writer.close()


@pytest.mark.parametrize(
    "head", [b"GET /health?%b HTTP/1.1\r\nx-one: y\r\n\r\n", b"GET /health HTTP/1.1\r\n%b\r\n\r\n"]
)
async def test_a_long_head_that_comes_at_once_is_refused_too(head: bytes) -> None:
    config = ServerConfig()
    async with listening(create_app(fake_service(FakeEngine(say("x"))), config), config) as port:
        for size, status in ((MAX_HEAD_BYTES - 2000, b"200"), (MAX_HEAD_BYTES + 2000, b"400")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                head % (b"a: bcd\r\n" * (size // 8) if b"?" not in head else b"a" * size).removesuffix(b"\r\n")
            )
            async with asyncio.timeout(10):
                assert (await reader.readline()).split()[1] == status
            writer.close()
            await writer.wait_closed()


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.0\r\nconnection: keep-alive", b"HTTP/1.1"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_who_knows_no_chunks_gets_none(version: bytes, path: str) -> None:
    config = ServerConfig(access_log="none")
    async with listening(create_app(fake_service(FakeEngine(say("hello"))), config), config) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"prompt" if path == "/v1/completions" else "input": "x", "stream": True}).encode()
        head = b"POST %b %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % (path.encode(), version, len(body)) + body)
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            is_chunked = b"transfer-encoding: chunked" in head
            assert is_chunked == (version == b"HTTP/1.1")
            if is_chunked:
                assert int((await reader.readline()).strip(), 16) > 0
            else:
                (length,) = [int(line.split()[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")]
                text = await reader.readexactly(length)
                assert text.startswith((b"data: {", b"event: response.created\ndata: {")) and text.endswith(b"\n\n")
        writer.close()
        await writer.wait_closed()


async def test_a_key_of_a_megabyte_is_refused() -> None:
    config = ServerConfig(api_keys=("sk",))
    async with listening(create_app(fake_service(FakeEngine(say("x"))), config), config) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + b"x" * 2**20 + b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # what was not read may reset the connection
            async with asyncio.timeout(10):
                assert (await reader.read())[:13] in (b"HTTP/1.1 400 ", b"")
        writer.close()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert_error(await client.get("/v1/models"), 401)


async def test_what_is_no_http_gets_an_error_object() -> None:
    config = ServerConfig()
    async with listening(create_app(fake_service(FakeEngine(say("x"))), config), config) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        answer = await reader.read()
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def request_and_more(ending: str, is_late: bool) -> bytes:
    """What comes back for a request with something bad behind it, at once or once the answer has begun."""
    config = ServerConfig(access_log="none")
    engine = FakeEngine(endless, max_model_len=100_000_000)
    body = json.dumps(ENDLESS).encode()
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    request = head % len(body) + body
    async with listening(create_app(fake_service(engine), config), config) as port, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await reader.readuntil(b"data: ") if is_late else b""
        if ending == "garbage":
            writer.write(b"\0 this is no HTTP\r\n\r\n")
        else:
            writer.write_eof()
        answer += await reader.read()
        writer.close()
        await writer.wait_closed()
        await until(lambda: not engine.live)
    return answer


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("ending", ["garbage", "end of file"])
def test_what_ends_a_connection_ends_its_answer(ending: str, is_late: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Two answers at once would be none; and the one that is cut short is no fault of the server's."""
    settings = uvicorn_config(create_app(ServiceSlot(), ServerConfig()), ServerConfig())
    for _ in range(3):  # times of both sides differ
        with asyncio.Runner(
            loop_factory=settings.get_loop_factory()
        ) as runner:  # the server's: its sockets are stricter
            answer = runner.run(request_and_more(ending, is_late))
        assert answer.count(b"HTTP/1.1") <= 1
        assert answer.startswith(b"HTTP/1.1 200 ") or (not is_late and answer[:13] in (b"", b"HTTP/1.1 400 "))
        assert b"[DONE]" not in answer and not answer.endswith(b"0\r\n\r\n")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@asynccontextmanager
async def endless_request(
    *, stream: bool
) -> AsyncIterator[tuple[FakeEngine, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection with a request on it that is being answered."""
    config = ServerConfig(access_log="none")
    engine = FakeEngine(endless, token_delay=0.001, max_model_len=100_000_000)
    body = json.dumps({**ENDLESS, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    async with listening(create_app(fake_service(engine), config), config) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head % len(body) + body)
        await until(lambda: bool(engine.live))
        try:
            yield engine, reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_ahead", [1, 3, MAX_PIPELINED])
async def test_a_client_that_goes_away_behind_further_requests_ends_the_first(num_ahead: int, stream: bool) -> None:
    async with endless_request(stream=stream) as (engine, _, writer):
        for _ in range(num_ahead):  # one by one: they come so too
            writer.write(b"GET /health HTTP/1.1\r\n\r\n")
            await asyncio.sleep(0.01)
        assert engine.live
        writer.transport.abort()
        await until(lambda: not engine.live)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_ahead", [1, 2])
async def test_a_client_that_goes_away_behind_large_bodies_ends_the_first(num_ahead: int, stream: bool) -> None:
    async with endless_request(stream=stream) as (engine, _, writer):
        for _ in range(num_ahead):
            writer.write(post("x" * 100_000, length=100_000))
            await asyncio.sleep(0.05)  # it comes in parts, and has come before its sender leaves
        assert engine.live
        writer.write_eof()
        await until(lambda: not engine.live)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "ahead",
    [
        b"GET /health HTTP/1.1\r\n\r\n" * (MAX_PIPELINED + 1),
        b"GET /health HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (MAX_PIPELINED_BYTES + 1, bytes(MAX_PIPELINED_BYTES + 1)),
        (b"GET /health HTTP/1.1\r\ncontent-length: 99999\r\n\r\n" + bytes(99_999)) * (MAX_PIPELINED_BYTES // 99_999 + 1),
    ],
    ids=["requests", "a body", "bodies"],
)  # fmt: skip
async def test_a_client_that_asks_too_much_ahead_is_cut_off(ahead: bytes, stream: bool) -> None:
    async with endless_request(stream=stream) as (engine, reader, writer):
        answer = await reader.readuntil(b"data: ") if stream else b""
        writer.write(ahead)
        async with asyncio.timeout(10):
            # A connection that is closed while more arrives is reset, and what was on its way to the client may be lost.
            with contextlib.suppress(ConnectionResetError):
                answer += await reader.read()
                assert answer.startswith(b"HTTP/1.1 200 " if stream else b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") <= 1
        await until(lambda: not engine.live)


async def test_requests_that_were_sent_ahead_are_answered_in_turn() -> None:
    config = ServerConfig(access_log="none")
    async with listening(create_app(fake_service(FakeEngine(say("x"))), config), config) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        asked = [b"GET /v1/models/%d HTTP/1.1\r\n\r\n" % number for number in range(MAX_PIPELINED + 1)]
        writer.write(b"".join(asked))
        for number in range(MAX_PIPELINED + 1):
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = [int(line.split()[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")]
            assert f"model '{number}'" in json.loads(await reader.readexactly(length))["error"]["message"]
        writer.close()
        await writer.wait_closed()


async def test_bodies_that_were_sent_ahead_are_answered_in_turn() -> None:
    """Larger than what uvicorn takes ahead of whoever reads it, and together as large as may be."""
    engine = FakeEngine(endless, token_delay=0.001, max_model_len=1_000_000)
    engine.gate.clear()
    body = json.dumps({"prompt": "x" * 80_000, "max_tokens": 2})
    request = post(body, length=len(body))
    num_ahead = MAX_PIPELINED_BYTES // len(body)
    async with listening(create_app(fake_service(engine), ServerConfig())) as port:
        reader, writer = await connect(port, request)
        await until(lambda: bool(engine.live))
        writer.write(request * num_ahead)
        await writer.drain()
        engine.gate.set()
        for _ in range(1 + num_ahead):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            (length,) = [int(line.split()[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")]
            await reader.readexactly(length)
        writer.close()
        await writer.wait_closed()


async def test_other_protocols_are_not_offered(caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig()
    async with listening(create_app(fake_service(FakeEngine(say("x"))), config), config) as port:
        for protocol in ("websocket", "h2c"):
            headers = {"connection": "upgrade", "upgrade": protocol}
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers) as client:
                assert (await client.get("/health")).status_code == 200
                assert_error(await client.get("/v1/realtime"), 404)
    assert not caplog.records


IMPATIENT = ServerConfig(stalled_client_timeout=0.2, timeout_keep_alive=3600)


async def connect(port: int, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    return reader, writer


def post(sent: str, *, length: int) -> bytes:
    return (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n{sent}"
    ).encode()


@pytest.mark.parametrize(
    ("sent", "part"),
    [(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", "head"), (post('{"prompt": "', length=100), "body")],
)
async def test_a_request_that_does_not_go_on_is_refused(sent: bytes, part: str) -> None:
    async with listening(create_app(fake_service(FakeEngine(say("x"))), IMPATIENT), IMPATIENT) as port:
        reader, writer = await connect(port, sent)
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["message"] == f"the {part} of the request did not come within 0.2 s"


async def test_a_head_that_comes_a_letter_at_a_time_is_refused() -> None:
    async with listening(create_app(fake_service(FakeEngine(say("x"))), IMPATIENT), IMPATIENT) as port:
        reader, writer = await connect(port, b"GET /health HTTP/1.1\r\nx-slow: ")
        answered = asyncio.create_task(reader.readline())  # the rest may be lost to what is still written
        async with asyncio.timeout(10):
            while not answered.done():
                writer.write(b"y")
                await asyncio.wait({answered}, timeout=0.05)
        writer.close()
    assert (await answered).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
async def test_connections_that_ask_nothing_are_closed(sent: bytes) -> None:
    async with listening(create_app(fake_service(FakeEngine(say("x"))), IMPATIENT), IMPATIENT) as port:
        reader, writer = await connect(port, sent)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


async def test_an_empty_line_after_an_answer_keeps_no_connection_open() -> None:
    async with listening(create_app(fake_service(FakeEngine(say("x"))), IMPATIENT), IMPATIENT) as port:
        reader, writer = await connect(port, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
            writer.write(b"\r\n")
            assert await reader.read() == b""
        writer.close()


async def test_a_body_that_comes_slowly_is_taken() -> None:
    body = json.dumps({"prompt": "x", "user": "u" * 40})
    async with listening(create_app(fake_service(FakeEngine(say("x"))), IMPATIENT), IMPATIENT) as port:
        reader, writer = await connect(port, post("", length=len(body)))
        for letter in body:  # about three times as long as a client may be silent
            writer.write(letter.encode())
            await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_request_behind_a_long_answer_waits_for_it() -> None:
    """Pipelined: its body is not taken before, so its client is not the one that stalls."""
    engine = FakeEngine(endless, token_delay=0.02)
    engine.gate.clear()
    first = json.dumps({"prompt": "x", "max_tokens": 3})
    async with listening(create_app(fake_service(engine), IMPATIENT), IMPATIENT) as port:
        begun = post(first, length=len(first)) + post('{"prompt"', length=len(first))
        reader, writer = await connect(port, begun)
        await until(lambda: bool(engine.live))
        await asyncio.sleep(3 * IMPATIENT.stalled_client_timeout)
        engine.gate.set()
        writer.write(first.removeprefix('{"prompt"').encode())
        async with asyncio.timeout(10):
            answers = b""
            while answers.count(b"HTTP/1.1 200 ") < 2:
                received = await reader.read(1000)
                assert received, answers
                answers += received
        writer.close()


def test_connections_are_kept_as_long_as_is_asked() -> None:
    config = ServerConfig(timeout_keep_alive=123.0)
    assert uvicorn_config(create_app(ServiceSlot(), config), config).timeout_keep_alive == 123.0


async def test_one_connection_too_many_is_told_so_and_health_still_answers() -> None:
    config = ServerConfig(max_connections=2)
    async with listening(create_app(fake_service(FakeEngine(say("x"))), config), config) as port:
        held = [await connect(port, b"") for _ in range(2)]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            refused = await client.post("/v1/completions", json={"prompt": "x"})
            assert assert_error(refused, 503)["code"] == "too_many_connections"
            assert refused.headers["retry-after"]
            assert refused.headers["connection"] == "close"
            assert (await client.get("/health")).status_code == 200
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_far_too_many_connections_are_closed() -> None:
    config = ServerConfig(max_connections=1)
    async with listening(create_app(fake_service(FakeEngine(say("x"))), config), config) as port:
        held = [await connect(port, b"") for _ in range(1 + SPARE_CONNECTIONS)]
        reader, writer = await connect(port, b"")
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        for _, other in [*held, (reader, writer)]:
            other.close()


def test_the_process_may_have_as_many_files_open_as_it_is_allowed() -> None:
    code = (
        "import resource; soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "hard = 2000 if hard == resource.RLIM_INFINITY else min(hard, 2000)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "from jaxserve.server.connection import RESERVED_FILES, default_max_connections, raise_file_limit\n"
        "before = default_max_connections(); raise_file_limit()\n"
        "assert (before, default_max_connections()) == (256 - RESERVED_FILES, hard - RESERVED_FILES)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
