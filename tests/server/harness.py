"""A real HTTP server around an app, in the test's own event loop, and raw access to it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from jaxserve.config import ServerConfig
from jaxserve.protocol.service import OpenAIService
from jaxserve.server.app import create_app
from jaxserve.server.connection import uvicorn_config
from jaxserve.server.lifecycle import QuietServer
from jaxserve.server.listener import bind
from jaxserve.server.slot import ServiceSlot
from tests.fakes import FakeEngine, fake_service

USER = {"role": "user", "content": "hi"}


@asynccontextmanager
async def listening(
    app: Starlette, config: ServerConfig | None = None, *, send_buffer: int | None = None
) -> AsyncIterator[int]:
    """Serves the app on a free port of this machine, which is what is yielded.

    Args:
        send_buffer: bytes that the kernel holds for each client, about; None: as it likes.
    """
    listener = bind("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections have it from the listener
    uvicorn_settings = uvicorn_config(app, config or ServerConfig())
    uvicorn_settings.timeout_graceful_shutdown = 1
    server = uvicorn.Server(uvicorn_settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


@contextmanager
def serving(service: OpenAIService) -> Iterator[str]:
    """Serves from a thread, for clients that block; yields the URL. The service stays open."""
    listener = bind("127.0.0.1", 0)
    settings = uvicorn_config(create_app(service, ServerConfig()), ServerConfig())
    settings.timeout_graceful_shutdown = 1
    server = QuietServer(settings)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@asynccontextmanager
async def client_of(
    service: FakeEngine | ServiceSlot, config: ServerConfig | None = None, headers: dict[str, str] | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of a server for this engine, or for what a slot holds."""
    served = service if isinstance(service, ServiceSlot) else fake_service(service)
    async with (
        listening(create_app(served, config or ServerConfig())) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=10) as client,
    ):
        yield client


def events(body: str) -> list[Any]:
    """The payloads of an event stream, `[DONE]` as it is."""
    lines = [line.removeprefix("data: ") for line in body.split("\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def assert_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """The response is an error object; returns it."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param
    assert isinstance(body["error"]["message"], str)
    return body["error"]


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Waits for something that another task brings about."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


async def raw_request(port: int, path: str, body: dict[str, Any]) -> asyncio.StreamWriter:
    """Sends a POST and leaves the connection open, unread."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    writer.write(head.encode() + payload)
    await writer.drain()
    return writer
