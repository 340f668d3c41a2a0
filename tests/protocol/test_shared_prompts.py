"""What clients say about shared prompts: salts, priorities, cached tokens, pinned prompts."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.parsing import parse_chat_request, parse_completion_request
from jaxserve.protocol.responses_api_requests import parse_responses_request
from tests.fakes import FakeEngine, FakeStream, fake_service, say

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}


async def test_salt_and_priority_reach_the_engine_from_every_route() -> None:
    engine = FakeEngine(say("x"))
    service = fake_service(engine)
    fields: dict[str, Any] = {"cache_salt": "tenant-1", "priority": -3}
    await service.chat_completion(parse_chat_request({"messages": [USER], **fields}))
    await service.completion(parse_completion_request({"prompt": ["a", "b"], **fields}))
    await service.response(parse_responses_request({"input": "hi", **fields}))
    await service.chat_completion(parse_chat_request({"messages": [USER], "cache_salt": None}))
    assert engine.salts_and_priorities == [("tenant-1", -3)] * 4 + [(None, 0)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("cache_salt", ""), ("cache_salt", 1), ("cache_salt", "x" * 257), ("priority", 1.5), ("priority", 2**31)],
)
def test_salts_and_priorities_that_cannot_be_meant(field: str, value: object) -> None:
    with pytest.raises(BadRequestError) as refusal:
        parse_chat_request({"messages": [USER], field: value})
    assert refusal.value.param == field


async def test_cached_tokens_are_those_that_the_first_choice_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other choices find what the first one computed, which nobody had before."""
    plain = FakeStream._output

    def output(stream: FakeStream, index: int, tokens: Any) -> Any:
        return plain(stream, index, tokens)._replace(num_cached_tokens=64 if index else 16)

    monkeypatch.setattr(FakeStream, "_output", output)
    service = fake_service(FakeEngine(say("x")))
    answer = await service.chat_completion(parse_chat_request({"messages": [USER], "n": 3}))
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


def test_a_pinned_prompt_is_what_conversations_with_it_begin_with() -> None:
    engine = FakeEngine(say("x"))
    service = fake_service(engine)
    service.pin_prompt("Be brief.")
    (pinned,) = engine.pinned
    text = service.tokenizer.decode(pinned, skip_special_tokens=False)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"


def test_without_a_template_the_text_itself_is_pinned() -> None:
    engine = FakeEngine(say("x"))
    fake_service(engine, template=None).pin_prompt("Once upon")
    assert engine.pinned == [list(b"Once upon")]


def test_a_template_that_refuses_a_system_prompt_refuses_to_pin_it() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
    )
    with pytest.raises(BadRequestError, match="no system"):
        fake_service(FakeEngine(say("x")), template=template).pin_prompt("Be brief.")
