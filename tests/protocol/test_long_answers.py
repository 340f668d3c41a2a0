"""Long answers are written in pieces, item by item as they are needed, and say the same as if written at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic_core import PydanticSerializationError

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.long_answers import ITEMS_AT_ONCE, PIECE_BYTES, LazyList, is_long, json_pieces
from jaxserve.protocol.parsing import parse_chat_request, parse_completion_request
from jaxserve.protocol.responses import (
    ChatLogprobs,
    Completion,
    CompletionChoice,
    ResponseModel,
    TokenLogprob,
    Tokens,
)
from jaxserve.protocol.responses_api_objects import ResponseObject, TextSettings
from jaxserve.protocol.responses_api_requests import parse_responses_request
from jaxserve.protocol.service import OpenAIService
from tests.fakes import FakeEngine, endless, fake_service

USER = {"role": "user", "content": "hi " * 200}
LONG = 600  # tokens
CHAT: dict[str, Any] = {
    "messages": [USER], "max_tokens": LONG, "logprobs": True, "top_logprobs": 5, "prompt_logprobs": 3, "n": 2,
}  # fmt: skip
COMPLETION: dict[str, Any] = {
    "prompt": ["é" * 300, "b"], "max_tokens": LONG, "logprobs": 5, "echo": True, "prompt_logprobs": 0, "n": 2,
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "input": "hi", "max_output_tokens": LONG, "include": ["message.output_text.logprobs"], "top_logprobs": 5,
}  # fmt: skip
BODIES = {"chat": CHAT, "completion": COMPLETION, "response": RESPONSE}


def service() -> OpenAIService:
    return fake_service(FakeEngine(endless, max_model_len=10_000, tokens_per_output=100))


async def answers(kind: str, *, lazy: bool, stream: bool) -> list[ResponseModel]:
    """The chunks of a streamed answer, or the one that is whole."""
    asked = service()
    body = {**BODIES[kind], "stream": stream}
    if stream:
        body.pop("prompt_logprobs", None)
    if kind == "chat":
        request = parse_chat_request(body)
        whole, streamed = asked.chat_completion, asked.chat_completion_stream
    elif kind == "completion":
        request = parse_completion_request(body)
        whole, streamed = asked.completion, asked.completion_stream
    else:
        request = parse_responses_request(body)
        whole, streamed = asked.response, asked.response_stream
    if stream:
        return [chunk async for chunk in await streamed(request, lazy=lazy)]  # type: ignore[arg-type]
    return [await whole(request, lazy=lazy)]  # type: ignore[arg-type]


def without_names(value: Any) -> Any:
    """All but what is another for each answer."""
    if isinstance(value, dict):
        names = ("id", "item_id", "created", "created_at")
        return {name: without_names(part) for name, part in value.items() if name not in names}
    return [without_names(item) for item in value] if isinstance(value, list) else value


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", list(BODIES))
async def test_pieces_say_what_the_whole_says(kind: str, stream: bool) -> None:
    lazy = await answers(kind, lazy=True, stream=stream)
    eager = await answers(kind, lazy=False, stream=stream)
    written = [json.loads(b"".join(json_pieces(answer))) for answer in lazy]
    expected = [json.loads(answer.to_json()) for answer in eager]
    if stream and kind != "response":  # choices run side by side: only within each is there an order
        for chunks in (written, expected):
            chunks.sort(key=lambda chunk: chunk["choices"][0]["index"])
    assert without_names(written) == without_names(expected)
    assert any(is_long(answer) for answer in lazy)


@pytest.mark.anyio
async def test_no_piece_is_the_whole() -> None:
    (answer,) = await answers("chat", lazy=True, stream=False)
    pieces = list(json_pieces(answer))
    assert len(pieces) > 4
    assert max(map(len, pieces)) < 4 * PIECE_BYTES


def test_items_are_made_when_their_piece_is() -> None:
    made: list[int] = []

    def token(number: int) -> TokenLogprob:
        made.append(number)
        return TokenLogprob(token="x" * 1000, logprob=-1.0, bytes=[], top_logprobs=[])

    content = LazyList(range(10_000), token)
    pieces = json_pieces(ChatLogprobs(content=content, refusal=None))
    assert made == []
    next(pieces)
    assert 0 < len(made) <= 2 * ITEMS_AT_ONCE
    assert len(json.loads(b"".join([b'{"content":[', next(pieces)[1:], b"]}"]))["content"]) > 0
    assert content[3] == content[3:4][0]


def test_what_takes_no_place_in_json_is_not_forgotten() -> None:
    """Only `json_pieces` can write such a list: anything else says so."""
    logprobs = ChatLogprobs(content=LazyList(range(3), str), refusal=None)  # type: ignore[arg-type]
    with pytest.raises(PydanticSerializationError):
        logprobs.to_json()


LONG_TEXT = 'é"\\\n\U0001f336 ' * 30_000


def completion_of(*texts: str) -> Completion:
    choices = [
        CompletionChoice(index=index, text=text, logprobs=None, finish_reason="stop")
        for index, text in enumerate(texts)
    ]
    fields: dict[str, Any] = {"id": "x", "object": "text_completion", "created": 0, "model": "m"}
    return Completion(**fields, choices=choices, system_fingerprint=None)


def told_of(**fields: Any) -> ResponseObject:
    """The answer of the responses route, which says what it was asked for."""
    settings = TextSettings(format=fields.pop("format", {"type": "text"}))
    given: dict[str, Any] = {
        "instructions": None, "max_output_tokens": None, "metadata": {}, "output": [], "parallel_tool_calls": True,
        "temperature": 1.0, "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": 1.0, "user": None, **fields,
    }  # fmt: skip
    return ResponseObject(id="x", created_at=0, status="completed", model="m", text=settings, **given)


@pytest.mark.parametrize(
    "answer",
    [
        completion_of(LONG_TEXT, "", "short"),
        completion_of(*["x" * 1000] * 100),
        told_of(instructions=LONG_TEXT, metadata={"é": "x"}),
        told_of(
            tools=[{"parameters": {"enum": list(range(50_000)), "é": [{"a": [LONG_TEXT, None, 1.5]}, {}, []]}}] * 2
        ),
        told_of(format={"schema": {"x" * 100_000: True}}),
    ],
    ids=["long text", "many texts", "instructions", "tools", "format"],
)
def test_whatever_is_long_is_written_in_pieces(answer: ResponseModel) -> None:
    assert is_long(answer)
    pieces = list(json_pieces(answer))
    assert b"".join(pieces) == answer.to_json().encode()
    assert len(pieces) > 1
    assert max(map(len, pieces)) < 8 * PIECE_BYTES


def test_what_is_short_is_not() -> None:
    assert not is_long(completion_of(*["x" * 100] * 100))
    assert not is_long(told_of(instructions="x" * 10_000, metadata={"a": "b"}, tools=[{"a": [1, 2, {"b": None}]}]))


@pytest.mark.parametrize("count", [0, 1, 4096, 4097, 10_000])
def test_many_token_ids(count: int) -> None:
    tokens = Tokens(count=count, max_model_len=1, tokens=list(range(count)), token_strs=['"é'] * count)
    assert json.loads(b"".join(json_pieces(tokens))) == tokens.model_dump()


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_responses_hold_all_log_probabilities_to_their_end(stream: bool) -> None:
    asked = fake_service(FakeEngine(endless, max_model_len=10_000_000))
    request = parse_responses_request({**RESPONSE, "max_output_tokens": 800_000, "stream": stream})
    with pytest.raises(BadRequestError, match="log probabilities"):
        await (asked.response_stream(request) if stream else asked.response(request))
