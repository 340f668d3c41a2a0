"""Tools through the service over a scripted engine: what the model says becomes calls, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.parsing import parse_chat_request
from jaxserve.protocol.responses import ChatChoice
from jaxserve.protocol.service import OpenAIService
from tests.fakes import FakeEngine, fake_service, say
from tests.structured.grammars import refused_at

pytestmark = pytest.mark.anyio

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id or '' }}<|im_end|>{% endfor %}<|im_start|>assistant\n"
)
USER = {"role": "user", "content": "Weather?"}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}, "required": ["city"]}},
}
TIME = {"type": "function", "function": {"name": "time", "description": "What time it is."}}
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
HALF = 'Hm <tool_call>\n{"name": "weather", "arguments": {"ci'


def long_tool(number: int, *, strict: bool) -> dict[str, Any]:
    """The schema of each would do, those of four are too long."""
    parameters = {"type": "object", "properties": {"a": {"enum": ["x" * 70_000]}}, "required": ["a"]}
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters, "strict": strict}}


def service_saying(text: str, **options: Any) -> OpenAIService:
    return fake_service(FakeEngine(say(text), max_model_len=2000, **options), template=TEMPLATE)


async def ask(service: OpenAIService, **fields: Any) -> ChatChoice:
    """The answer; streamed it is the same."""
    body = {"messages": [USER], "tools": [WEATHER, TIME], **fields}
    choice = (await service.chat_completion(parse_chat_request(body))).choices[0]
    content, reason, calls = "", None, {}
    stream = await service.chat_completion_stream(parse_chat_request({**body, "stream": True}))
    async for chunk in stream:
        (part,) = chunk.choices
        content += part.delta.content or ""
        reason = part.finish_reason or reason
        for call in part.delta.tool_calls or ():
            known = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
            assert call.id in (None, known["id"]) and call.function.name in (None, known["name"])
            known["arguments"] += call.function.arguments or ""
    told = [{"name": c.function.name, "arguments": c.function.arguments} for c in choice.message.tool_calls or ()]
    assert [{"name": c["name"], "arguments": c["arguments"]} for c in calls.values()] == told
    assert list(calls) == list(range(len(calls))) and len({c["id"] for c in calls.values()}) == len(calls)
    assert (content, reason) == (choice.message.content or "", choice.finish_reason)
    return choice


def calls_of(choice: ChatChoice) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]


@pytest.mark.parametrize("tokens_per_output", [1, 7, 1000])
async def test_two_calls(tokens_per_output: int) -> None:
    choice = await ask(service_saying(TWO_CALLS, tokens_per_output=tokens_per_output))
    assert calls_of(choice) == [("weather", {"city": "Bern"}), ("time", {})]
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")


async def test_content_is_null_beside_calls_alone() -> None:
    choice = await ask(service_saying(TWO_CALLS.removeprefix("Let me see.\n")))
    assert choice.message.content is None and len(calls_of(choice)) == 2


async def test_one_call_at_most() -> None:
    choice = await ask(service_saying(TWO_CALLS), parallel_tool_calls=False)
    assert [name for name, _ in calls_of(choice)] == ["weather"]


async def test_no_tools_wanted() -> None:
    service = service_saying(TWO_CALLS)
    choice = await ask(service, tool_choice="none")
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == (TWO_CALLS, "stop", None)
    assert b"<tool_call>" not in bytes(t for t in service.engine.submitted[0][0] if t < 256)  # type: ignore[attr-defined]


async def test_half_a_call_is_text() -> None:
    assert (await ask(service_saying(HALF))).message.content == HALF
    choice = await ask(service_saying(TWO_CALLS), stop='"city')
    assert choice.message.content == TWO_CALLS[: TWO_CALLS.index('"city')] and choice.finish_reason == "stop"
    choice = await ask(service_saying(TWO_CALLS), max_tokens=40)
    assert choice.message.content == TWO_CALLS[:40] and choice.finish_reason == "length"


async def test_a_named_function_ends_with_stop() -> None:
    choice = await ask(
        service_saying(TWO_CALLS.removeprefix("Let me see.\n")),
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    assert calls_of(choice) == [("weather", {"city": "Bern"})] and choice.finish_reason == "stop"


async def test_only_what_must_be_is_constrained() -> None:
    service = service_saying(TWO_CALLS)
    await ask(service)
    await ask(service, tool_choice="required")
    await ask(service, tools=[{"type": "function", "function": {"name": "time", "strict": True}}])
    await ask(service, response_format={"type": "json_object"})
    submitted = service.engine.submitted  # type: ignore[attr-defined]
    assert [sampling.constraint is None for _, sampling in submitted[::2]] == [True, False, False, False]


async def test_what_is_too_long_beside_the_others_is_any_object() -> None:
    service = fake_service(FakeEngine(say("x"), max_model_len=300_000), template=TEMPLATE)
    await ask(service, tools=[long_tool(number, strict=False) for number in range(4)], tool_choice="required")
    first, fourth = (f'<tool_call>\n{{"name": "{name}", "arguments": {{"b"' for name in ("f0", "f3"))
    constraint = service.engine.submitted[0][1].constraint  # type: ignore[attr-defined]
    assert refused_at(constraint, first) == len(first) - 2
    assert refused_at(constraint, fourth) == len(fourth)


async def test_turns_with_results_go_through_the_template() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    service = service_saying("Rain.")
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "rain"})
    choice = await ask(service, messages=messages)
    assert (choice.message.content, choice.finish_reason) == ("Rain.", "stop")
    prompt = bytes(token for token in service.engine.submitted[0][0] if token < 256).decode()  # type: ignore[attr-defined]
    assert 'weather{"city": "Bern"}' in prompt and "rain" in prompt and '"description": "What time it is."' in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "tool_choice.function.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "tools[0].function.x"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {"not": {}}}}]},
         "tools[0].function.parameters.not"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
         "tools[0].function.parameters.type"),
        ({"tools": [long_tool(number, strict=True) for number in range(4)], "tool_choice": "required"}, "tools"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
         "response_format.json_schema.schema.not"),
    ],
)  # fmt: skip
async def test_refusals(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        await ask(service_saying("x"), **fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("template", "remedy"),
    [("{{ messages }}", r"serve a model whose chat template knows tools\.$"),
     ("{{ tools }}{{ messages }}", r"Start the server with --tool-call-parser\.$")],
)  # fmt: skip
async def test_a_model_without_tools_says_so_and_what_to_do(template: str, remedy: str) -> None:
    with pytest.raises(BadRequestError, match=remedy) as refused:
        await ask(fake_service(FakeEngine(say("x")), template=template))
    assert (refused.value.param, refused.value.code) == ("tools", "no_tool_support")
