"""/tokenize and /detokenize: the ids of the other routes, and back."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.protocol.errors import BadRequestError, NotFoundError
from jaxserve.protocol.parsing import parse_chat_request, parse_completion_request
from jaxserve.protocol.responses import DetokenizedText, Tokens
from jaxserve.protocol.tokenize_requests import parse_detokenize_request, parse_tokenize_request
from tests.fakes import FakeEngine, fake_service, say

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "a<|im_end|>"}]
ENGINE = FakeEngine(say("x"))
SERVICE = fake_service(ENGINE, bos=True)


async def tokenize(**body: Any) -> Tokens:
    return await SERVICE.tokenize(parse_tokenize_request(body))


async def detokenize(**body: Any) -> DetokenizedText:
    return await SERVICE.detokenize(parse_detokenize_request(body))


async def test_text_has_the_ids_of_completions() -> None:
    await SERVICE.completion(parse_completion_request({"prompt": "é<|im_end|>"}))
    answer = await tokenize(prompt="é<|im_end|>", return_token_strs=True)
    assert answer.tokens == ENGINE.submitted[-1][0] == [256, 0xC3, 0xA9, 258]
    assert (answer.count, answer.max_model_len) == (4, 256)
    assert answer.token_strs == ["<|endoftext|>", "Ã", "©", "<|im_end|>"]
    assert (await tokenize(prompt="a", add_special_tokens=False)).tokens == [97]
    assert (await tokenize(prompt="", add_special_tokens=False)).tokens == []
    assert (await tokenize(prompt="a")).token_strs is None


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}])
async def test_conversation_has_the_ids_of_chat(fields: dict[str, Any]) -> None:
    await SERVICE.chat_completion(parse_chat_request({"messages": MESSAGES, **fields}))
    assert (await tokenize(messages=MESSAGES, **fields)).tokens == ENGINE.submitted[-1][0]
    begun = [*MESSAGES, {"role": "assistant", "content": "Once"}]
    assert (await tokenize(messages=begun, continue_final_message=True)).tokens[-4:] == list(b"Once")


TOOL = {"type": "function", "function": {"name": "time", "description": "What time it is.", "strict": None}}
TOOL_TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
)


async def test_conversation_with_tools_has_the_ids_of_chat() -> None:
    engine = FakeEngine(say("x"))
    service = fake_service(engine, template=TOOL_TEMPLATE)
    body = {"messages": MESSAGES, "tools": [TOOL]}
    answer = await service.chat_completion(parse_chat_request(body))
    tokens = await service.tokenize(parse_tokenize_request(body))
    assert tokens.tokens == engine.submitted[-1][0]
    assert tokens.count == answer.usage.prompt_tokens
    assert "What time it is." in service.tokenizer.decode(tokens.tokens)
    without = await service.tokenize(parse_tokenize_request({"messages": MESSAGES, "tools": []}))
    assert b"<tool_call>" not in bytes(token for token in without.tokens if token < 256)


@pytest.mark.parametrize("template", ["{{ messages }}", "{{ tools }}{{ messages }}"])
async def test_tools_are_refused_where_chat_refuses_them(template: str) -> None:
    service = fake_service(FakeEngine(say("x")), template=template)
    body = {"messages": MESSAGES, "tools": [TOOL]}
    with pytest.raises(BadRequestError) as chat:
        await service.chat_completion(parse_chat_request(body))
    with pytest.raises(BadRequestError) as tokenize:
        await service.tokenize(parse_tokenize_request(body))
    assert tokenize.value.body() == chat.value.body()
    assert tokenize.value.code == "no_tool_support"


async def test_more_tokens_than_the_context_has() -> None:
    assert (await tokenize(prompt="x" * 1000)).count == 1001
    with pytest.raises(BadRequestError) as refused:
        await tokenize(prompt="x" * 10_000_000)
    assert refused.value.code == "context_length_exceeded"


async def test_more_tokens_than_a_response_may_hold() -> None:
    service = fake_service(FakeEngine(say("x"), max_model_len=2_000_000))
    for field, value in (("prompt", "x" * 1_100_000), ("messages", [{"role": "user", "content": "x" * 1_100_000}])):
        with pytest.raises(BadRequestError, match="1048576") as refused:
            await service.tokenize(parse_tokenize_request({field: value}))
        assert (refused.value.param, refused.value.code) == (field, "context_length_exceeded")


async def test_back_to_text() -> None:
    assert (await detokenize(tokens=[256, 0xC3, 0xA9, 258])).prompt == "<|endoftext|>é<|im_end|>"
    assert (await detokenize(tokens=[])).prompt == ""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"), ({"prompt": 5}, "prompt"), ({"prompt": ["a"]}, "prompt"), ({"prompt": "a", "n": 1}, "n"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"), ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": MESSAGES, "tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"messages": MESSAGES, "tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom"),
        ({"messages": MESSAGES, "tool_choice": "auto"}, "tool_choice"),
    ],
)  # fmt: skip
async def test_wrong_texts_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        await tokenize(**body)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tokens"), ({"tokens": "a"}, "tokens"), ({"tokens": [-1]}, "tokens[0]"), ({"tokens": [1, 259]}, "tokens[1]"),
        ({"tokens": [True]}, "tokens[0]"), ({"tokens": [1.5]}, "tokens[0]"), ({"tokens": [2**70]}, "tokens[0]"),
        ({"tokens": [1] * (2**20 + 1)}, "tokens"),
    ],
)  # fmt: skip
async def test_wrong_tokens_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        await detokenize(**body)
    assert refused.value.param == param


async def test_another_model() -> None:
    with pytest.raises(NotFoundError):
        await tokenize(prompt="a", model="other")
    with pytest.raises(NotFoundError):
        await detokenize(tokens=[1], model="other")
