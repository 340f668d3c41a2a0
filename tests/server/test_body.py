"""Bodies that take long to be made sense of hold nobody else up."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.protocol.service import OpenAIService
from jaxserve.server.middleware import BODIES_AT_ONCE
from jaxserve.server.slot import ServiceSlot
from jaxserve.template_sandbox import TemplateLimits
from tests.fakes import FakeEngine, fake_service, say
from tests.server.harness import USER, assert_error, client_of, until
from tests.text.vocabularies import sentencepiece_tokenizer, token_ids

pytestmark = pytest.mark.anyio

SLOW_TEMPLATE = (
    "{% if messages[0].content == 'hi' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}"
)
NESTED: Any = {"type": "string"}
for _depth in range(20):
    _deeper = {"type": "object", "properties": {f"a{_depth}": NESTED}, "required": [f"a{_depth}"]}
    NESTED = {"oneOf": [{"type": "integer"}, _deeper]}


async def status_while_health_answers(service: OpenAIService, path: str, body: dict[str, Any]) -> int:
    """How a request is answered, beside which /health is asked again and again."""
    async with client_of(ServiceSlot(service)) as client:
        work = asyncio.create_task(client.post(path, json=body, timeout=60))
        async with asyncio.timeout(60):
            while not work.done():
                assert (await client.get("/health", timeout=1)).status_code == 200
        return (await work).status_code


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


async def test_health_answers_while_a_template_renders() -> None:
    service = fake_service(FakeEngine(say("x")), template=SLOW_TEMPLATE, limits=TemplateLimits(seconds=1.5))
    assert await status_while_health_answers(service, "/v1/chat/completions", {"messages": [USER]}) == 400


@pytest.mark.parametrize("kind", ["control tokens", "byte tokens"])
async def test_health_answers_while_many_choices_go_on_from_a_long_prompt(kind: str) -> None:
    """What text comes next depends on all of such a prompt."""
    engine = FakeEngine(say("x"), max_model_len=200_000)
    service, prompt = fake_service(engine), [256] * 100_000
    if kind == "byte tokens":
        tokenizer = sentencepiece_tokenizer()
        engine.model_config = dataclasses.replace(engine.model_config, vocab_size=tokenizer.vocab_size)
        service, prompt = fake_service(engine, tokenizer=tokenizer), token_ids(tokenizer, "a", *["<0x0A>"] * 50_000)
    body = {"prompt": prompt, "n": 128, "max_tokens": 1}
    assert await status_while_health_answers(service, "/v1/completions", body) == 200


@pytest.mark.parametrize(
    "schema",
    [NESTED, {"type": "string", "pattern": "(a|a)*b{1,5000}"}, {"enum": [f"value {n}" for n in range(100_000)]}],
    ids=["nested", "pattern", "enum"],
)
async def test_health_answers_while_a_schema_is_compiled(schema: Any) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": [USER], "response_format": wanted}
    status = await status_while_health_answers(fake_service(FakeEngine(say("x"))), "/v1/chat/completions", body)
    assert status == (400 if "enum" in schema else 200)


@pytest.mark.parametrize("stream", [False, True])
async def test_bodies_of_all_requests_together_are_bounded(stream: bool) -> None:
    config = ServerConfig(max_body_bytes=100)
    body = b'{"prompt": "x", "stream": %b}' % (b"true" if stream else b"false")
    headers = {"content-type": "application/json"}
    engine = FakeEngine(say("x"))
    engine.gate.clear()
    async with client_of(engine, config, headers) as client:

        def post(size: int) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(client.post("/v1/completions", content=body.ljust(size)))

        first = [post(100) for _ in range(BODIES_AT_ONCE - 1)] + [post(60)]
        await until(lambda: len(engine.live) == BODIES_AT_ONCE)
        refused = await post(41)
        assert assert_error(refused, 503)["code"] == "too_many_bodies"
        assert int(refused.headers["retry-after"]) > 0
        assert (await client.get("/v1/models")).status_code == 200
        last = post(40)
        await until(lambda: len(engine.live) == BODIES_AT_ONCE + 1)
        engine.gate.set()
        assert {response.status_code for response in await asyncio.gather(*first, last)} == {200}
        assert (await post(100)).status_code == 200
