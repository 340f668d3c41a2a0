"""A long answer is written off the event loop, at its reader's pace, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.protocol.long_answers import LazyList, json_pieces
from jaxserve.protocol.responses import ResponseModel
from jaxserve.server import app, long_json
from jaxserve.server.app import create_app
from tests.fakes import FakeEngine, endless, fake_service
from tests.server.harness import listening, raw_request, until

pytestmark = pytest.mark.anyio

PROMPT = "x" * 1000
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "prompt_logprobs": 20, "max_tokens": 1}),
    ("/v1/completions", {"prompt": PROMPT, "echo": True, "logprobs": 20, "max_tokens": 1}),
    ("/v1/completions", {"prompt": PROMPT, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True}),
    ("/v1/responses", {
        "input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 1000,
    }),
    ("/v1/responses", {
        "input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 1000,
        "stream": True,
    }),
]  # fmt: skip


class Watched:
    """What is made of lazy lists: by which threads, how much, and not before it may."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.num_items = 0
        self.begun = threading.Event()
        self.may_go_on = threading.Event()

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        make = LazyList.__getitem__

        def watched(items: LazyList[Any], index: Any) -> Any:
            self.begun.set()
            self.threads.add(threading.get_ident())
            assert self.may_go_on.wait(20)
            made = make(items, index)
            self.num_items += len(made)
            return made

        monkeypatch.setattr(LazyList, "__getitem__", watched)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched()
    watched.watch(monkeypatch)
    return watched


@asynccontextmanager
async def served(send_buffer: int | None = None) -> AsyncIterator[tuple[int, httpx.AsyncClient]]:
    engine = FakeEngine(endless, max_model_len=10_000, tokens_per_output=100)
    async with (
        listening(create_app(fake_service(engine), ServerConfig()), send_buffer=send_buffer) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        yield port, client


@pytest.mark.parametrize(("path", "body"), CASES)
async def test_others_are_answered_while_it_is_written(watched: Watched, path: str, body: dict[str, Any]) -> None:
    async with served() as (_, client):
        long = asyncio.create_task(client.post(path, json=body))
        await until(watched.begun.is_set, 20)
        short = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "logprobs": 1})
        assert short.status_code == 200
        assert not long.done()
        watched.may_go_on.set()
        answer = await long
    assert answer.status_code == 200
    assert watched.num_items >= 1000
    assert threading.get_ident() not in watched.threads
    if not body.get("stream"):
        json.loads(answer.content)


async def test_it_is_written_at_the_readers_pace_and_ends_when_the_reader_goes(watched: Watched) -> None:
    watched.may_go_on.set()
    path, body = CASES[0]
    body = {**body, "messages": [{"role": "user", "content": "x" * 9000}], "n": 20}
    async with served(send_buffer=16 * 1024) as (port, client):
        writer = await raw_request(port, path, body)
        await until(watched.begun.is_set, 20)
        await until_still(watched)
        assert 0 < watched.num_items < 20 * 9000
        before = watched.num_items
        writer.transport.abort()

        async def load() -> int:
            return (await client.get("/load")).json()["server_load"]

        async with asyncio.timeout(5):
            while await load():
                await asyncio.sleep(0.01)
        assert watched.num_items < before + 2000


async def until_still(watched: Watched) -> None:
    """Waits until nothing more is written."""
    before = -1
    async with asyncio.timeout(20):
        while watched.num_items != before:
            before = watched.num_items
            await asyncio.sleep(0.2)


LONG_TEXT = "x" * 200_000
TOOL = {"type": "function", "name": "f", "description": LONG_TEXT}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG_TEXT, "echo": True, "n": 3}),
        ("/v1/completions", {"prompt": LONG_TEXT, "echo": True, "stream": True}),
        ("/v1/responses", {"input": "x", "instructions": LONG_TEXT, "stream": True, "max_output_tokens": 3}),
        ("/v1/responses", {"input": "x", "tools": [TOOL], "tool_choice": "none", "max_output_tokens": 3}),
        ("/tokenize", {"prompt": LONG_TEXT}),
    ],
)
async def test_others_are_answered_while_long_text_is_written(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def held(answer: ResponseModel) -> Iterator[bytes]:
        begun.set()
        assert may_go_on.wait(20)
        yield from json_pieces(answer)

    monkeypatch.setattr(long_json, "json_pieces", held)
    engine = FakeEngine(endless, max_model_len=1_000_000)
    async with (
        listening(create_app(fake_service(engine), ServerConfig())) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        long = asyncio.create_task(client.post(path, json=body))
        await until(begun.is_set, 20)
        assert (await client.get("/health")).status_code == 200
        assert not long.done()
        may_go_on.set()
        answer = await long
    assert answer.status_code == 200, answer.text[:1000]
    assert len(answer.content) > 200_000


async def test_the_description_is_made_once_and_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    describe = app.openapi_document

    def watched(*arguments: Any) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return describe(*arguments)

    monkeypatch.setattr(app, "openapi_document", watched)
    async with served() as (_, client):
        first, second = [await client.get("/openapi.json") for _ in range(2)]
    assert first.json() == second.json()
    assert len(threads) == 1
    assert threading.get_ident() not in threads
