"""The `openai` package and a server with a random model: calls that are forced, and an agent of three turns; both
on the routes of chat completions and of responses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator

from jaxserve import EngineConfig
from jaxserve.progress import NoProgress
from jaxserve.protocol.launch import launch, load_chat_template
from jaxserve.protocol.service import OpenAIService
from tests.server.harness import serving
from tests.tiny_model import write_tiny_llama

MODEL = "tiny"
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    "<|im_start|>assistant\n"
)
UNITS = {"enum": ["C", "F"]}
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}, "unit": UNITS}, "required": ["city"]}
SUM = {"type": "object", "properties": {"terms": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}}}
SCHEMAS: dict[str, Any] = {
    "weather": {**WEATHER, "additionalProperties": False},
    "sum": {**SUM, "additionalProperties": False, "required": ["terms"]},
}  # fmt: skip
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
HOT: dict[str, Any] = {
    "model": MODEL,
    "temperature": 1.5,
    "max_tokens": 200,
    "tools": TOOLS,
    "parallel_tool_calls": False,
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIService]:
    """One engine for every form of calls."""
    model = write_tiny_llama(
        tmp_path_factory.mktemp("model") / "model", chat_template=TEMPLATE, max_position_embeddings=2048
    )
    config = EngineConfig(device="cpu", max_num_seqs=1, max_num_batched_tokens=32)
    service = launch(str(model), config, NoProgress(), MODEL)
    yield service
    service.close()


@pytest.fixture(scope="module", params=["hermes", "llama3_json", "mistral", "pythonic"])
def client(request: pytest.FixtureRequest, launched: OpenAIService) -> Iterator[openai.OpenAI]:
    template = load_chat_template(launched.tokenizer, MODEL)
    service = OpenAIService(launched.engine, launched.tokenizer, template, MODEL, tool_call_parser=request.param)
    with (
        serving(service) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=60) as client,
    ):
        yield client


def call_in(message: Any) -> Any:
    """The only call of a message; its arguments satisfy the schema of its tool."""
    (call,) = message.tool_calls
    Draft202012Validator(SCHEMAS[call.function.name]).validate(json.loads(call.function.arguments))
    return call


def test_an_agent_of_three_turns(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather?"}]
    for turn in range(3):
        answer = client.chat.completions.create(**HOT, messages=messages, tool_choice="required", seed=turn)
        assert answer.choices[0].finish_reason == "tool_calls"
        call = call_in(answer.choices[0].message)
        messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": f"result {turn}"}]
    last = client.chat.completions.create(**{**HOT, "max_tokens": 10}, messages=messages, tool_choice="none")
    assert last.choices[0].message.tool_calls is None


def test_a_named_function(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "sum"}}
    question: Any = [{"role": "user", "content": "Add."}]
    for seed in range(3):
        answer = client.chat.completions.create(**HOT, messages=question, tool_choice=choice, seed=seed).choices[0]
        assert call_in(answer.message).function.name == "sum" and answer.finish_reason == "stop"


def test_a_stream_of_calls(client: openai.OpenAI) -> None:
    question: Any = [{"role": "user", "content": "Add."}]
    fields = {**HOT, "messages": question, "tool_choice": "required", "seed": 7}
    with client.beta.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    whole = client.chat.completions.create(**fields).choices[0]
    assert call_in(streamed.message).function.arguments == call_in(whole.message).function.arguments
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"


FUNCTIONS: list[Any] = [
    {"type": "function", "name": name, **TOOLS[place]["function"]} for place, name in enumerate(SCHEMAS)
]
HOT_RESPONSE: dict[str, Any] = {
    "model": MODEL,
    "temperature": 1.5,
    "max_output_tokens": 200,
    "tools": FUNCTIONS,
    "parallel_tool_calls": False,
}


def function_call_in(output: Any) -> Any:
    """The only item of an output, which is a call; its arguments satisfy the schema of its function."""
    (call,) = output
    assert call.type == "function_call"
    Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))
    return call


def test_an_agent_on_the_responses_route(client: openai.OpenAI) -> None:
    given: list[Any] = [{"role": "user", "content": "What is the weather?"}]
    for turn in range(3):
        fields: dict[str, Any] = {**HOT_RESPONSE, "input": given, "extra_body": {"seed": turn}}
        answer = client.responses.create(**fields, tool_choice="required")
        call = function_call_in(answer.output)
        given += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": f"result {turn}"}]
    last = client.responses.create(**{**HOT_RESPONSE, "max_output_tokens": 10}, input=given, tool_choice="none")
    assert [item.type for item in last.output] == ["message"]


def test_a_stream_of_calls_on_the_responses_route(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "name": "sum"}
    fields: dict[str, Any] = {**HOT_RESPONSE, "input": "Add.", "extra_body": {"seed": 7}, "tool_choice": choice}
    with client.responses.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        streamed = function_call_in(stream.get_final_response().output)
    whole = function_call_in(client.responses.create(**fields).output)
    assert (streamed.name, streamed.arguments) == (whole.name, whole.arguments)
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
