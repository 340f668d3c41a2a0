"""Structured output through a real server with a random model, at a temperature at which it says anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import openai
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from tests.server.processes import server_process
from tests.server.test_openai_client import LAUNCH, MESSAGES, MODEL

HOT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 1.5, "max_tokens": 150}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["é", 'a"b', 3, None]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 40}, "maxItems": 3},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
TAG: dict[str, Any] = {"begin": "<b>", "schema": {"type": "boolean"}, "end": "</b>"}


@pytest.fixture(scope="module")
def client(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("server")
    flags = [  # sizes of test_openai_client: the programs are the same, and need not be compiled twice
        "--port", "0", "--served-model-name", MODEL, "--max-num-seqs", "4", "--max-num-batched-tokens", "64",
        "--num-pages", "128",
    ]  # fmt: skip
    with server_process(["-c", LAUNCH, "serve", str(tiny_model_dir), *flags], folder / "log") as process:
        process.wait_ready()
        with openai.OpenAI(base_url=f"{process.url()}/v1", api_key="x", max_retries=0, timeout=60) as client:
            yield client
        process.process.terminate()
        assert process.exit_code() == 0
        assert "Traceback" not in process.log


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def text_of(client: openai.OpenAI, **fields: Any) -> tuple[str, str]:
    choice = client.chat.completions.create(**{**HOT, **fields}).choices[0]
    return choice.message.content or "", choice.finish_reason


def test_answers_satisfy_their_schema(client: openai.OpenAI) -> None:
    def check(seed: int) -> None:
        text, reason = text_of(client, seed=seed, response_format=schema_format(SCHEMA))
        assert reason == "stop"
        Draft202012Validator(SCHEMA).validate(json.loads(text))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, range(12)))


def test_streams_say_the_same(client: openai.OpenAI) -> None:
    fields = {"seed": 3, "response_format": schema_format(SCHEMA)}
    stream = client.chat.completions.create(**{**HOT, **fields}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text_of(client, **fields)[0]


def test_several_choices_and_penalties(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **HOT, n=3, seed=1, response_format=schema_format(SCHEMA), frequency_penalty=1.0, logprobs=True, top_logprobs=3,
        logit_bias={str(ord(" ")): 50, str(ord("\n")): 50},
    )  # fmt: skip
    assert answer.choices[0].logprobs is not None
    for choice in answer.choices:
        Draft202012Validator(SCHEMA).validate(json.loads(choice.message.content or ""))


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_where_one_token_is_allowed(client: openai.OpenAI, stream: bool) -> None:
    """Of the raw logits: the mask makes no minus infinity of what it forbids."""

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is no JSON")

    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 20, "stream": stream}
    answer = client.chat.completions.with_raw_response.create(
        **{**HOT, **fields}, seed=1, response_format=schema_format({"const": True})
    )
    body = answer.http_response.read().decode()
    texts = [line.removeprefix("data: ") for line in body.split("\n") if line.startswith("data: {")]
    parts = [json.loads(text, parse_constant=refuse) for text in (texts if stream else [body])]
    told = [part["choices"][0]["logprobs"] for part in parts]
    entries = [entry for logprobs in told if logprobs for entry in logprobs["content"]]
    assert "".join(entry["token"] for entry in entries)[:4] == "true"
    for entry in entries:
        assert len(entry["top_logprobs"]) == 20
        assert -100 < entry["logprob"] < 0


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "[ab]{5}-[0-9]{2}"}, "[ab]{5}-[0-9]{2}"),
        ({"choice": ["yes", "no", "maybe so"]}, "yes|no|maybe so"),
        ({"grammar": 'root ::= "<" [a-c]+ ">"'}, "<[a-c]+>"),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"json": '{"type": "integer", "minimum": 0, "maximum": 9}'}, "[0-9]"),
    ],
)
def test_structured_outputs(client: openai.OpenAI, structured: dict[str, Any], pattern: str) -> None:
    text, _ = text_of(client, seed=5, extra_body={"structured_outputs": structured})
    assert re.fullmatch(pattern, text)
    body = {"structured_outputs": structured}
    completion = client.completions.create(model=MODEL, prompt="x", max_tokens=100, seed=5, extra_body=body)
    assert re.fullmatch(pattern, completion.choices[0].text)


@pytest.mark.parametrize("place", ["response_format", "structured_outputs", "text"])
def test_structural_tags(client: openai.OpenAI, place: str) -> None:
    tags: Any = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<b>", "schema": {"type": "boolean"}, "end": "</b>"},
            {"begin": "<n>", "schema": {"enum": [1, 22]}, "end": ";"},
        ],
        "triggers": ["<"],
    }
    if place == "response_format":
        fields = {"response_format": tags}
    else:
        fields = {
            "extra_body": {"structured_outputs": {"structural_tag": json.dumps(tags) if place == "text" else tags}}
        }
    text, reason = text_of(client, seed=2, logit_bias={str(ord("<")): 4}, **fields)
    marked = re.compile(r"<(b>(true|false)</b>|n>(1|22);)")
    rest = marked.sub("", text)
    assert marked.search(text) and (rest.count("<") == 0 or (reason == "length" and rest.count("<") == 1))


def test_a_cut_answer_is_the_beginning_of_one(client: openai.OpenAI) -> None:
    biases = {str(ord(" ")): 50, str(ord("\n")): 50}
    text, reason = text_of(client, max_tokens=5, seed=0, logit_bias=biases, response_format={"type": "json_object"})
    assert (text[:1], reason) == ("{", "length")


CLOSED = {"type": "object", "properties": {"a": {"enum": [True, 10]}}, "required": ["a"], "additionalProperties": False}
STRING = re.compile(r'"(?:[^"\\]|\\.)*("|$)', re.DOTALL)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("max_tokens", [5, 200])
@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_a_model_that_wants_white_space_gets_little_of_it(
    client: openai.OpenAI, kind: str, max_tokens: int, temperature: float, stream: bool
) -> None:
    """However much it wants it: between the tokens of JSON one space, or a new line with up to 16 spaces."""
    fields: dict[str, Any] = {
        **HOT, "seed": 4, "temperature": temperature, "max_tokens": max_tokens, "stream": stream,
        "logit_bias": {str(ord(" ")): 50, str(ord("\n")): 50},
        "response_format": {"type": "json_object"} if kind == "json_object" else schema_format(CLOSED),
    }  # fmt: skip
    if stream:
        parts = [chunk.choices[0] for chunk in client.chat.completions.create(**fields)]
        text = "".join(part.delta.content or "" for part in parts)
        reasons = [part.finish_reason for part in parts if part.finish_reason]
    else:
        choice = client.chat.completions.create(**fields).choices[0]
        text, reasons = choice.message.content or "", [choice.finish_reason]
    assert text.startswith("{")
    assert max(map(len, re.findall(r"\s+", STRING.sub('""', text)))) <= 17
    if kind == "json_schema" and max_tokens == 200:
        assert reasons == ["stop"]
        Draft202012Validator(CLOSED).validate(json.loads(text))
    else:
        assert (len(text.encode()), reasons) == (max_tokens, ["length"])


def test_a_schema_that_nests_too_deep_is_refused_and_ends_nothing(client: openai.OpenAI) -> None:
    deep = {f"d{place}": {"$ref": f"#/$defs/d{place + 1}"} for place in range(3000)}
    schema = {"$defs": {**deep, "d3000": {"type": "integer"}}, "$ref": "#/$defs/d0"}
    with pytest.raises(openai.BadRequestError) as refused:
        text_of(client, response_format=schema_format(schema))
    assert (refused.value.code, refused.value.param) == ("invalid_grammar", "response_format.json_schema.schema")
    assert text_of(client, response_format=schema_format({"const": 1}))[0] == "1"


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_too_complex_for_its_first_token_is_the_client_s_mistake(client: openai.OpenAI, stream: bool) -> None:
    extra = {"structured_outputs": {"regex": "(?:a?){1000}(?:a){1000}[^q]*"}}
    with pytest.raises(openai.BadRequestError, match="simpler") as refused:
        client.chat.completions.create(**HOT, stream=stream, extra_body=extra)
    assert refused.value.code == "invalid_grammar"


def test_a_grammar_that_becomes_too_complex_on_the_way_is_told_in_an_event(client: openai.OpenAI) -> None:
    extra = {"structured_outputs": {"regex": "[xyz]{40}(?:a?){1000}(?:a){1000}[^q]*"}}
    stream = client.chat.completions.create(**HOT, stream=True, extra_body=extra)
    parts: list[str] = []
    texts = (chunk.choices[0].delta.content or "" for chunk in stream)
    with pytest.raises(openai.APIError, match="simpler") as failed:
        parts.extend(texts)  # keeps what came before
    assert failed.value.code == "invalid_grammar"
    assert re.fullmatch("[xyz]{1,40}", "".join(parts))


def test_stop_ids_end_only_what_is_complete(client: openai.OpenAI) -> None:
    fields = {
        "response_format": schema_format({"type": "array", "items": {"enum": ["x"]}, "minItems": 3, "maxItems": 3})
    }
    stops = {"stop_token_ids": [ord("x"), ord('"'), ord("]")]}
    text, reason = text_of(client, seed=2, extra_body=stops, **fields)
    assert (json.loads(text), reason) == (["x"] * 3, "stop")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": schema_format({"properties": {"a": {"not": {}}}})},
         "response_format.json_schema.schema.properties.a.not"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": True}}},
         "response_format.json_schema.name"),
        ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "structural_tag", "structures": [TAG]}}, "response_format.triggers"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format"),
        ({"response_format": {"type": "text", "triggers": ["<"]}}, "response_format.triggers"),
        ({"response_format": {"type": "structural_tag", "structures": [TAG], "triggers": ["["]}},
         "response_format.triggers[0]"),
        ({"response_format": {"type": "structural_tag", "structures": [{**TAG, "schema": {"enum": []}}],
                              "triggers": ["<"]}}, "response_format.structures[0].schema"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": {"type": "structural_tag", "structures": [{**TAG, "schema": {"not": {}}}],
                                                    "triggers": ["<"]}}},
         "structured_outputs.structural_tag.structures[0].schema.not"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(client: openai.OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=body)
    assert refused.value.param == param
    assert text_of(client, seed=1, extra_body={"structured_outputs": {"choice": ["fine"]}}) == ("fine", "stop")


def test_the_responses_route(client: openai.OpenAI) -> None:
    class Answer(BaseModel):
        level: int = Field(ge=-9, le=99)
        sure: bool

    fields: dict[str, Any] = {"model": MODEL, "input": "Say.", "temperature": 1.5, "extra_body": {"seed": 1}}
    parsed = client.responses.parse(**fields, max_output_tokens=100, text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer)
    cut = client.responses.create(**fields, max_output_tokens=5, text={"format": {"type": "json_object"}})
    assert (cut.output_text[:1], cut.status) == ("{", "incomplete")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(
            **fields,
            text={"format": {"type": "json_schema", "name": "x", "schema": {"properties": {"a": {"not": {}}}}}},
        )
    assert refused.value.param == "text.format.schema.properties.a.not"


def test_the_client_parses_into_a_class(client: openai.OpenAI) -> None:
    class Inner(BaseModel):
        level: int = Field(ge=-9, le=99)
        tags: list[Annotated[str, Field(max_length=4)]] = Field(max_length=2)

    class Event(BaseModel):
        name: str = Field(max_length=6)
        inner: Inner | None

    for seed in range(3):
        answer = client.beta.chat.completions.parse(**HOT, seed=seed, response_format=Event)
        assert isinstance(answer.choices[0].message.parsed, Event)


def test_a_class_without_bounds_may_be_cut(client: openai.OpenAI) -> None:
    class Event(BaseModel):
        name: str

    with pytest.raises(openai.LengthFinishReasonError):
        client.beta.chat.completions.parse(**{**HOT, "max_tokens": 4}, seed=0, response_format=Event)
