"""Clients that do not read, or never stop sending: what they may hold, and for how long."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app
from jaxserve.server.connection import MAX_HEAD_BYTES
from tests.fakes import FakeEngine, endless, fake_service, say
from tests.server.harness import listening, until

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


async def test_what_is_no_http_gets_an_error_object(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "uvicorn.error")
    config = ServerConfig()
    async with listening(create_app(fake_service(FakeEngine(say("x"))), config), config) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        answer = await reader.read()
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
