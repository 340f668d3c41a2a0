"""Bodies that take long to be made sense of hold nobody else up."""

from __future__ import annotations

import asyncio

import pytest

from jaxserve.config import ServerConfig
from tests.fakes import FakeEngine, say
from tests.server.harness import client_of

pytestmark = pytest.mark.anyio


async def test_health_answers_while_a_long_prompt_is_encoded() -> None:
    engine = FakeEngine(say("x"), max_model_len=2_000_000)
    async with client_of(engine, ServerConfig(max_body_bytes=10**8)) as client:
        work = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a" * 1_500_000}, timeout=60))
        probes = 0
        async with asyncio.timeout(60):
            while not work.done():
                assert (await client.get("/health", timeout=1)).status_code == 200
                probes += 1
        assert (await work).status_code == 200
    assert probes > 3


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"prompt":[%b1]}' % (b"1," * 1_000_000), "context_length_exceeded"),
        (b'{"prompt":[%b1]}' % (b"[1]," * 3_000_000), "too_many_values"),
        (b'{"prompt":"x","metadata":{%b"y":"z"}}' % (b'"y":"z",' * 140_000), None),
    ],
    ids=["token ids", "lists", "strings"],
)
async def test_health_answers_while_a_body_of_many_values_is_parsed(body: bytes, code: str | None) -> None:
    async with client_of(FakeEngine(say("x"))) as client:
        headers = {"content-type": "application/json"}
        work = asyncio.create_task(client.post("/v1/completions", content=body, headers=headers, timeout=60))
        async with asyncio.timeout(60):
            while not work.done():
                assert (await client.get("/health", timeout=1)).status_code == 200
        if code is None:
            assert (await work).status_code == 200  # the name is one, however often it comes
        else:
            assert (await work).json()["error"]["code"] == code
