"""The responses route in its text form: the objects and events of the `openai` package, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jaxserve.protocol.errors import BadRequestError, InternalServerError
from jaxserve.protocol.responses_api_objects import ResponseEvent, ResponseObject
from jaxserve.protocol.responses_api_requests import parse_responses_request
from jaxserve.protocol.service import OpenAIService
from tests.fakes import MODEL_NAME, FakeEngine, endless, fake_service, say
from tests.protocol.test_tools import TEMPLATE

pytestmark = pytest.mark.anyio

EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
TIME: dict[str, Any] = {"type": "function", "name": "time", "description": "What time it is."}
WEATHER: dict[str, Any] = {
    "type": "function", "name": "weather", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call> So'
)
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


async def respond(service: OpenAIService, given: Any = "hi", **fields: Any) -> ResponseObject:
    return await service.response(parse_responses_request({"input": given, **fields}))


async def events(service: OpenAIService, **fields: Any) -> list[ResponseEvent]:
    request = parse_responses_request({"input": "hi", "stream": True, **fields})
    return [event async for event in await service.response_stream(request)]


async def test_response() -> None:
    answer = await respond(fake_service(FakeEngine(say("hello"))), metadata={"a": "b"}, temperature=0.5, user="me")
    parsed = Response.model_validate_json(answer.to_json())
    assert parsed.output_text == "hello"
    assert (parsed.status, parsed.model, parsed.temperature) == ("completed", MODEL_NAME, 0.5)
    assert (parsed.metadata, parsed.user, parsed.incomplete_details) == ({"a": "b"}, "me", None)
    assert parsed.usage is not None
    assert parsed.usage.output_tokens == 6
    assert parsed.usage.total_tokens == parsed.usage.input_tokens + 6


async def test_response_that_reached_its_limit() -> None:
    answer = await respond(fake_service(FakeEngine(say("hello"))), max_output_tokens=2)
    parsed = Response.model_validate_json(answer.to_json())
    assert (parsed.output_text, parsed.status, parsed.max_output_tokens) == ("he", "incomplete", 2)
    assert parsed.incomplete_details is not None
    assert parsed.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("tokens_per_output", [1, 3])
@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({}, "completed"),
        ({"stop": "lo"}, "completed"),
        ({"max_output_tokens": 4}, "incomplete"),
        (LOGPROBS, "completed"),
    ],
)
async def test_events_build_the_response_up(fields: dict[str, Any], last: str, tokens_per_output: int) -> None:
    service = fake_service(FakeEngine(say("hello é"), tokens_per_output=tokens_per_output))
    whole = await respond(service, **fields)
    streamed = await events(service, **fields)
    parsed = [EVENTS.validate_json(event.to_json()) for event in streamed]
    kinds = [event.type.removeprefix("response.") for event in parsed]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", last]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in parsed] == list(range(len(parsed)))
    bodies = [event.model_dump() for event in streamed]
    text = "".join(body["delta"] for body in bodies[4:-4])
    part = whole.output[0].content[0]
    assert text == part.text == bodies[-4]["text"]
    assert [entry for body in bodies[4:-4] for entry in body["logprobs"]] == part.model_dump()["logprobs"]
    assert bodies[-3]["part"] == bodies[-2]["item"]["content"][0] == part.model_dump()
    final = bodies[-1]["response"]
    assert final["usage"] == whole.model_dump()["usage"]
    assert bodies[0]["response"]["output"] == []
    assert len({body["item_id"] for body in bodies[3:-2]} | {final["output"][0]["id"], bodies[2]["item"]["id"]}) == 1
    assert len({bodies[0]["response"]["id"], bodies[1]["response"]["id"], final["id"]}) == 1


def tool_service(*texts: str, tokens_per_output: int = 1) -> OpenAIService:
    engine = FakeEngine(say(*texts), max_model_len=2000, tokens_per_output=tokens_per_output)
    return fake_service(engine, template=TEMPLATE)


def told(response: Response) -> list[tuple[str, ...]]:
    """What the items of a response say."""
    items: list[tuple[str, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            items.append((item.name, item.arguments))
        elif item.type == "message":
            items.append(("".join(part.text for part in item.content if part.type == "output_text"),))
    return items


@pytest.mark.parametrize("tokens_per_output", [1, 7, 1000])
async def test_calls_are_items(tokens_per_output: int) -> None:
    service = tool_service(CALLS, tokens_per_output=tokens_per_output)
    tools = {"tools": [WEATHER, TIME], "tool_choice": "auto", "parallel_tool_calls": True}
    whole = Response.model_validate_json((await respond(service, **tools)).to_json())
    assert told(whole) == [("Let me see.",), ("weather", '{"city": "Bern"}'), ("time", "{}"), ("So",)]
    assert len({item.call_id for item in whole.output if item.type == "function_call"}) == 2
    assert [tool.name for tool in whole.tools if tool.type == "function"] == ["weather", "time"]
    assert [item.status for item in whole.output if item.type == "function_call"] == ["completed"] * 2


@pytest.mark.parametrize("tokens_per_output", [1, 7, 1000])
async def test_events_of_calls(tokens_per_output: int) -> None:
    service = tool_service(CALLS, tokens_per_output=tokens_per_output)
    streamed = [EVENTS.validate_json(event.to_json()) for event in await events(service, tools=[WEATHER, TIME])]
    assert [event.sequence_number for event in streamed] == list(range(len(streamed)))
    items: dict[int, Any] = {}
    arguments: dict[str, str] = {}
    for event in streamed:
        if event.type == "response.output_item.added":
            assert event.output_index == len(items)
            items[event.output_index] = event.item
        elif event.type == "response.function_call_arguments.delta":
            arguments[event.item_id] = arguments.get(event.item_id, "") + event.delta
        elif event.type == "response.function_call_arguments.done":
            assert (items[event.output_index].id, event.arguments) == (event.item_id, arguments[event.item_id])
        elif event.type == "response.output_item.done":
            assert event.item.id == items[event.output_index].id
            items[event.output_index] = event.item
    last = streamed[-1]
    assert last.type == "response.completed"
    assert list(items.values()) == last.response.output
    assert told(last.response) == [("Let me see.",), ("weather", '{"city": "Bern"}'), ("time", "{}"), ("So",)]


async def test_one_call_and_no_call() -> None:
    service = tool_service(CALLS)
    response = Response.model_validate_json(
        (await respond(service, tools=[WEATHER, TIME], parallel_tool_calls=False)).to_json()
    )
    assert [one for one in told(response) if len(one) == 2] == [("weather", '{"city": "Bern"}')]
    response = Response.model_validate_json((await respond(service, tools=[TIME], tool_choice="none")).to_json())
    assert told(response) == [(CALLS,)]


async def test_calls_and_their_results_come_back_as_input() -> None:
    service = tool_service("Rain.")
    given = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Well."},
        {"type": "function_call", "call_id": "a1", "name": "weather", "arguments": '{"city": "Bern"}', "id": "fc_1"},
        {"type": "function_call", "call_id": "a2", "name": "time", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "a1", "output": "wet"},
        {"type": "function_call_output", "call_id": "a2", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    await respond(service, given, tools=[WEATHER, TIME])
    prompt = bytes(token for token in service.engine.submitted[0][0] if token < 256).decode()  # type: ignore[attr-defined]
    turns = 'user\nWeather?assistant\nWell.weather{"city": "Bern"}time{}tool\nweta1tool\nnoona2assistant'
    assert prompt.endswith(turns)


async def test_formats_become_constraints() -> None:
    engine = FakeEngine(say("{}"))
    service = fake_service(engine)
    schema = {"type": "object", "properties": {"é": {"type": "null"}}}
    formats: list[dict[str, Any]] = [
        {"type": "json_object"}, {"type": "json_schema", "name": "x", "schema": schema, "strict": True}, {"type": "text"},
    ]  # fmt: skip
    for wanted in formats:
        answer = await respond(service, text={"format": wanted})
        assert (
            Response.model_validate_json(answer.to_json()).text.format.model_dump(  # type: ignore[union-attr]
                by_alias=True, exclude_none=True
            )
            == wanted
        )
    assert [sampling.constraint is not None for _, sampling in engine.submitted] == [True, True, False]


async def test_log_probabilities() -> None:
    answer = await respond(fake_service(FakeEngine(say("z"))), **LOGPROBS)
    assert [entry.token for entry in answer.output[0].content[0].logprobs] == ["z", "<|im_end|>"]
    assert len(answer.output[0].content[0].logprobs[0].top_logprobs) == 2
    assert (await respond(fake_service(FakeEngine(say("z"))))).output[0].content[0].logprobs == []


async def test_input_is_a_conversation() -> None:
    engine = FakeEngine(say("yes"))
    service = fake_service(engine)
    first = await respond(service, "hi", instructions="Be brief.")
    conversation = [
        {"role": "user", "content": "hi"},
        *(item.model_dump() for item in first.output),
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "more"}]},
    ]
    await respond(service, conversation, instructions="Be brief.")
    await respond(service, [{"role": "developer", "content": "Be brief."}, *conversation])
    opened = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    prompts = [service.tokenizer.decode(prompt, skip_special_tokens=False) for prompt, _ in engine.submitted]
    assert prompts[0] == opened
    assert prompts[1] == prompts[2]
    assert prompts[1] == opened + "yes<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


async def test_fields_take_effect() -> None:
    engine = FakeEngine(say("x"))
    fields = {
        "top_p": 0.5,
        "seed": 7,
        "logit_bias": {"5": 1},
        "presence_penalty": 1,
        "max_output_tokens": 9,
        "top_k": 3,
    }
    await respond(fake_service(engine), **fields, store=True, service_tier="auto")
    sampling = engine.submitted[0][1]
    assert (sampling.top_p, sampling.seed, sampling.logit_bias) == (0.5, 7, ((5, 1.0),))
    assert (sampling.presence_penalty, sampling.max_tokens, sampling.top_k) == (1.0, 9, 3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"), ({"input": []}, "input"), ({"input": 5}, "input"), ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"role": "user", "content": "x", "colour": "red"}]}, "input[0].colour"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"background": True}, "background"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"), ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"), ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"), ({"messages": []}, "messages"), ({"n": 2}, "n"),
        ({"temperature": 3}, "temperature"), ({"metadata": {"a": 5}}, "metadata.a"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"min_tokens": 5, "max_output_tokens": 4}, "min_tokens"), ({"input": "x" * 300}, "input"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"), ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format.schema.not"),
        ({"tools": [TIME]}, "tools"), ({"tools": [{**TIME, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TIME, TIME]}, "tools[1].name"), ({"tools": [{**TIME, "function": {}}]}, "tools[0].function"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tools": [TIME], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tools": [TIME], **LOGPROBS}, "include"),
        ({"input": "x" * 10_000_000}, "input"), ({"stop_token_ids": [259]}, "stop_token_ids[0]"),
    ],
)  # fmt: skip
async def test_wrong_requests_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine(say("x"))
    with pytest.raises(BadRequestError) as refused:
        await respond(fake_service(engine), **{"given": fields.pop("input", "hi"), **fields})
    assert refused.value.param == param
    assert not engine.submitted


async def test_fields_that_ask_for_nothing_are_fine() -> None:
    fields: dict[str, Any] = {
        "text": {"format": {"type": "text"}}, "reasoning": {}, "tools": [], "tool_choice": "auto", "include": [],
        "parallel_tool_calls": True, "truncation": "disabled", "background": False, "previous_response_id": None,
    }  # fmt: skip
    assert (await respond(fake_service(FakeEngine(say("x"))), **fields)).status == "completed"


async def test_failure_breaks_the_events_off() -> None:
    service = fake_service(FakeEngine(endless, fail_after=2))
    stream = await service.response_stream(parse_responses_request({"input": "hi", "stream": True}))
    kinds = [(await anext(stream)).type for _ in range(6)]
    assert kinds[-1] == "response.output_text.delta"
    with pytest.raises(InternalServerError):
        await anext(stream)


async def test_closed_stream_ends_in_the_engine() -> None:
    engine = FakeEngine(endless)
    stream = await fake_service(engine).response_stream(parse_responses_request({"input": "hi", "stream": True}))
    await anext(stream)
    await stream.aclose()
    assert not engine.live
