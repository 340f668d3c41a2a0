"""The description at /openapi.json is true: schemathesis finds no 5xx and no response that breaks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from starlette.routing import Route

from jaxserve.config import ServerConfig
from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.parsing import parse_chat_request, parse_completion_request
from jaxserve.protocol.responses_api_requests import parse_responses_request
from jaxserve.protocol.tokenize_requests import parse_detokenize_request, parse_tokenize_request
from jaxserve.server.app import create_app
from jaxserve.server.openapi import openapi_document
from jaxserve.server.slot import ServiceSlot
from tests.fakes import FakeEngine, say
from tests.server.harness import USER, client_of
from tests.server.processes import server_process

CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
ROOT = "#/components/schemas/"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[schemathesis.BaseSchema]:
    options = {"token_delay": 0, "max_model_len": 256}
    log = tmp_path_factory.mktemp("server") / "log"
    with server_process(["-m", "tests.server.fake_server", json.dumps(options)], log) as server:
        yield schemathesis.openapi.from_url(f"{server.wait_ready()}/openapi.json")
        assert "Traceback" not in server.log


HEALTH_CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def call_every_operation(api: schemathesis.BaseSchema, max_examples: int) -> None:
    """Bodies that fit the description, and bodies that do not, to every operation."""
    for found in api.get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and not len(operation.body):
                continue  # nothing in such a request is described, so nothing can be wrong

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(max_examples=max_examples, suppress_health_check=HEALTH_CHECKS)
            def call(case: schemathesis.Case) -> None:
                case.call_and_validate(checks=CHECKS, timeout=30)

            call()


def test_no_response_breaks_the_description(api: schemathesis.BaseSchema) -> None:
    call_every_operation(api, max_examples=10)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER], "stream": True}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/responses", {"input": "x", "stream": True}),
    ],
)
def test_streams_are_as_described(api: schemathesis.BaseSchema, path: str, body: dict[str, Any]) -> None:
    case = api[path]["POST"].Case(body=body, media_type="application/json")
    response = case.call_and_validate(checks=CHECKS, timeout=30)
    assert response.headers["content-type"] == ["text/event-stream; charset=utf-8"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_response_breaks_the_description_in_the_long_run(api: schemathesis.BaseSchema) -> None:
    call_every_operation(api, max_examples=1000)


def test_every_route_is_described() -> None:
    app = create_app(ServiceSlot(), ServerConfig())
    document = openapi_document(ServerConfig(), "1")
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        if isinstance(route, Route) and route.include_in_schema
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert routes == {(path, method) for path, methods in document["paths"].items() for method in methods}


def test_every_reference_leads_somewhere() -> None:
    text = json.dumps(openapi_document(ServerConfig(), "1"))
    schemas = json.loads(text)["components"]["schemas"]
    named = {piece.split('"')[0] for piece in text.split(f'"$ref": "{ROOT}')[1:]}
    assert named
    assert named <= set(schemas)
    for one in schemas.values():
        Draft202012Validator.check_schema(one)


def test_keys_are_described_where_they_are_asked_for() -> None:
    document = openapi_document(ServerConfig(api_keys=("sk",), root_path="/llm"), "1")
    assert document["servers"] == [{"url": "/llm"}]
    assert document["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/health"]["get"]


def test_served_document_is_the_one_described() -> None:
    async def fetch() -> dict[str, Any]:
        async with client_of(FakeEngine(say("x"))) as client:
            return (await client.get("/openapi.json")).json()

    served = asyncio.run(fetch())
    assert served["paths"] == openapi_document(ServerConfig(), "1")["paths"]


MESSAGES = [{"role": "user", "content": "hi"}]
TAG = {"begin": "<a>", "schema": True, "end": ""}
CHAT_BODIES: list[dict[str, Any]] = [
    {"messages": MESSAGES},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "stop": "x"},
    {
        "messages": MESSAGES,
        "stop": ["x", "y"],
        "temperature": None,
        "tools": [],
        "tool_choice": "none",
        "nothing": None,
    },
    {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    {"messages": MESSAGES, "logit_bias": {"5": -1.5}, "metadata": {"a": "b"}, "service_tier": "flex"},
    {"messages": MESSAGES, "verbosity": "medium", "service_tier": None, "metadata": {"k" * 64: "v" * 512}},
    {"messages": MESSAGES, "verbosity": "high"},
    {"messages": MESSAGES, "service_tier": "gold"},
    {"messages": MESSAGES, "metadata": {"k" * 65: "v"}},
    {"messages": MESSAGES, "metadata": {"k": "v" * 513}},
    {"messages": MESSAGES, "response_format": {"type": "structural_tag", "structures": [TAG], "triggers": ["<"]}},
    {"messages": MESSAGES, "structured_outputs": {"structural_tag": {"type": "structural_tag", "structures": [TAG]}}},
    {"messages": []},
    {"messages": [{"role": "nobody", "content": "hi"}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": MESSAGES, "tools": [{}]},
    {"messages": MESSAGES, "unknown": 1},
    {"messages": MESSAGES, "temperature": 2.5},
    {"messages": MESSAGES, "stop": list("12345")},
    {"messages": MESSAGES, "logit_bias": {"x": 1}},
    {"messages": MESSAGES, "logit_bias": {"5": 101}},
    {"messages": MESSAGES, "n": True},
]
COMPLETION_BODIES: list[dict[str, Any]] = [
    {"prompt": "x"}, {"prompt": ["x", "y"]}, {"prompt": [1, 2]}, {"prompt": [[1], [2, 3]]}, {"prompt": "x", "suffix": ""},
    {"prompt": []}, {"prompt": [[]]}, {"prompt": [1, "x"]}, {"prompt": [-1]}, {"prompt": None}, {},
    {"prompt": "x", "suffix": "y"}, {"prompt": "x", "max_tokens": -1}, {"prompt": "x", "seed": 2**64},
]  # fmt: skip


FUNCTION = {"type": "function", "name": "f", "parameters": {}}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
RESPONSES_BODIES: list[dict[str, Any]] = [
    {"input": "hi"}, {"input": [{"role": "user", "content": "hi"}]}, {"input": "hi", "tools": [], "truncation": "disabled"},
    {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}], "id": "x"}]},
    {"input": [{"type": "reasoning"}]}, {"input": [{"role": "tool", "content": "x"}]}, {"input": 5}, {},
    {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}, "tool_choice": "none"},
    {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x"}}},
    {"input": "hi", "text": {"verbosity": "medium"}},
    {"input": "hi", "text": {"format": {"type": "json_object", "name": "x"}}}, {"input": "hi", "text": {"format": {}}},
    {"input": "hi", "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}},
    {"input": "hi", "tools": [{"type": "web_search"}]}, {"input": "hi", "tools": [{**FUNCTION, "defer_loading": False}]},
    {"input": [{"role": "user", "content": "hi"}, CALL, {"type": "function_call_output", "call_id": "a", "output": "b"}]},
    {"input": [{**CALL, "arguments": {}}]}, {"input": [{**CALL, "role": None, "id": "x"}]},
    {"input": [{**CALL, "role": "user"}]},
    {"input": "hi", "truncation": "auto"}, {"input": [{"role": "user", "content": [{"type": "image", "text": "hi"}]}]},
]  # fmt: skip
TOKENIZE_BODIES: list[dict[str, Any]] = [
    {"prompt": "x"}, {"messages": MESSAGES}, {"prompt": "x", "messages": None}, {"prompt": "x", "messages": MESSAGES}, {},
    {"messages": []}, {"prompt": ["x"]}, {"messages": MESSAGES, "add_special_tokens": True},
    {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f", "strict": None}}]},
    {"messages": MESSAGES, "tools": [{"type": "function"}]},
]  # fmt: skip
CASES = [
    (("ChatCompletionRequest",), parse_chat_request, CHAT_BODIES),
    (("CompletionRequest",), parse_completion_request, COMPLETION_BODIES),
    (("ResponsesRequest",), parse_responses_request, RESPONSES_BODIES),
    (("TokenizeTextRequest", "TokenizeChatRequest"), parse_tokenize_request, TOKENIZE_BODIES),
    (("DetokenizeRequest",), parse_detokenize_request, [{"tokens": [1]}, {"tokens": []}, {"tokens": [-1]}, {}]),
]


@pytest.mark.parametrize(
    ("names", "parse", "body"),
    [pytest.param(names, parse, body, id=json.dumps(body)) for names, parse, bodies in CASES for body in bodies],
)
def test_schema_and_validation_agree(names: tuple[str, ...], parse: Any, body: dict[str, Any]) -> None:
    assert any(fits(name, body) for name in names) == parses(parse, body)


def fits(name: str, body: dict[str, Any]) -> bool:
    document = openapi_document(ServerConfig(), "1")
    return Draft202012Validator({"$ref": f"{ROOT}{name}", "components": document["components"]}).is_valid(body)


def parses(parse: Any, body: dict[str, Any]) -> bool:
    try:
        parse(body)
    except BadRequestError:
        return False
    return True
