"""Calls of tools that a stop string cuts, over HTTP: half a call is text, all of which comes, and ends with "stop"."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app
from tests.fakes import FakeEngine, fake_service, say
from tests.server.harness import USER, events, listening

pytestmark = pytest.mark.anyio

HERMES = "Hm.\n<tool_call>\n{'name': 'weather', 'arguments': {'city': 'Bern'}}\n</tool_call>".replace("'", '"')
MISTRAL = 'Hm.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern"}}]'
LLAMA = '{"name": "weather", "parameters": {"city": "Bern"}}'
PYTHONIC = '[weather(city="Bern")]'
MARKS = {HERMES: "<tool_call>", MISTRAL: "[TOOL_CALLS]", LLAMA: '"parameters": dictionary', PYTHONIC: "func1("}
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CHAT = {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]}
RESPONSE = {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}


async def post(said: str, mark: str, path: str, body: dict[str, Any], tokens_per_output: int) -> httpx.Response:
    template = "{% if tools %}" + mark + "{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    engine = FakeEngine(say(said), tokens_per_output=tokens_per_output, max_model_len=2000)
    async with (
        listening(create_app(fake_service(engine, template=template), ServerConfig())) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client,
    ):
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response


def deltas_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The choices of a chat's chunks, which end as they should."""
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    return [chunk["choices"][0] for chunk in chunks]


@pytest.mark.parametrize("tokens_per_output", [1, 1000])
@pytest.mark.parametrize("stop", ["Bern", "tool_", "[", "{", "never", '"}'])
@pytest.mark.parametrize("said", list(MARKS))
async def test_a_stop_string(said: str, stop: str, tokens_per_output: int) -> None:
    shown, found, _ = said.partition(stop)
    is_whole = not found
    body = {**CHAT, "stop": stop}
    whole = (await post(said, MARKS[said], "/v1/chat/completions", body, tokens_per_output)).json()["choices"][0]
    response = await post(said, MARKS[said], "/v1/chat/completions", {**body, "stream": True}, tokens_per_output)
    deltas = deltas_of(response)
    streamed = "".join(delta["delta"].get("content") or "" for delta in deltas)
    reasons = [delta["finish_reason"] for delta in deltas if delta["finish_reason"]]
    parts = [part for delta in deltas for part in delta["delta"].get("tool_calls") or ()]
    assert (streamed, reasons) == (whole["message"]["content"] or "", [whole["finish_reason"]])
    assert deltas[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": reasons[0]}
    if is_whole:
        assert reasons == ["tool_calls"]
        assert json.loads("".join(part["function"].get("arguments", "") for part in parts)) == {"city": "Bern"}
        assert len(whole["message"]["tool_calls"]) == 1
    else:
        assert (streamed, reasons, parts) == (shown, ["stop"], [])
        assert "tool_calls" not in whole["message"]


@pytest.mark.parametrize("tokens_per_output", [1, 1000])
@pytest.mark.parametrize("ending", ["stop", "end", "length"])
async def test_a_second_call_that_is_cut(ending: str, tokens_per_output: int) -> None:
    """The first one stays a call; what was cut comes behind it, as text."""
    call = HERMES.removeprefix("Hm.\n")
    second = call.replace("Bern", "Rome")
    half = second[: second.index("Rome")]
    said, body = f"{call}\n{half if ending == 'end' else second}", dict(CHAT)
    if ending == "stop":
        body["stop"] = ["Rome"]
    elif ending == "length":
        body["max_tokens"] = len(f"{call}\n{half}")
    response = await post(said, "<tool_call>", "/v1/chat/completions", {**body, "stream": True}, tokens_per_output)
    deltas = deltas_of(response)
    parts = [part for delta in deltas for part in delta["delta"].get("tool_calls") or ()]
    assert {part["index"] for part in parts} == {0}
    assert [part["function"]["name"] for part in parts if "name" in part["function"]] == ["weather"]
    streamed = "".join(delta["delta"].get("content") or "" for delta in deltas)
    assert streamed.strip() == half
    whole = (await post(said, "<tool_call>", "/v1/chat/completions", body, tokens_per_output)).json()["choices"][0]
    assert (whole["message"]["content"], len(whole["message"]["tool_calls"])) == (streamed, 1)
    assert whole["finish_reason"] == deltas[-1]["finish_reason"] == ("length" if ending == "length" else "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
async def test_half_a_call_on_the_responses_route(stream: bool) -> None:
    """There are no stop strings there; the answer ends within the call."""
    half = HERMES[:50]
    response = await post(half, "<tool_call>", "/v1/responses", {**RESPONSE, "stream": stream}, 3)
    if not stream:
        final = response.json()
    else:
        lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
        told = [json.loads(line.removeprefix("data: ")) for line in lines]
        final = told[-1]["response"]
        assert "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta") == half
    (item,) = final["output"]
    assert (item["content"][0]["text"], final["status"]) == (half, "completed")
