"""Text from tokens: characters cut into bytes, spaces at the start, stop strings that wait for their time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.parsing import parse_chat_request, parse_completion_request
from jaxserve.protocol.service import OpenAIService
from tests.fakes import EOS, FakeEngine, endless, fake_service, say
from tests.text.vocabularies import sentencepiece_tokenizer, token_ids

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}


async def whole_and_streamed(service: OpenAIService, **fields: Any) -> tuple[str, str]:
    answer = await service.chat_completion(parse_chat_request({"messages": [USER], **fields}))
    request = parse_chat_request({"messages": [USER], "stream": True, **fields})
    chunks = [chunk async for chunk in await service.chat_completion_stream(request)]
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    return answer.choices[0].message.content, "".join(deltas)


async def complete(service: OpenAIService, prompt: Any, **fields: Any) -> str:
    answer = await service.completion(parse_completion_request({"prompt": prompt, **fields}))
    return answer.choices[0].text


@pytest.mark.parametrize("tokens_per_output", [1, 2])
@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("é🌶한".encode(), "é🌶한"),
        (b"\xc3abc", "\ufffdabc"),
        (b"\xf0\x9f\x8c", "\ufffd"),
        (b"\xa9\xa9 \xc3\xa9", "\ufffd\ufffd é"),
        (b"\xff\xfe x", "\ufffd\ufffd x"),
    ],
)
async def test_bytes_that_are_no_characters(said: bytes, shown: str, tokens_per_output: int) -> None:
    service = fake_service(FakeEngine(lambda *_: [*said, EOS], tokens_per_output=tokens_per_output))
    assert await whole_and_streamed(service) == (shown, shown)
    assert shown == service.tokenizer.decode([*said])


@pytest.mark.parametrize(
    ("prompt", "said", "shown"),
    [(["▁x"], ["▁le"], " le"), ([], ["▁", "▁leading", "▁x"], " leading x"), ([], ["▁▁", "▁x"], "  x")],
)
async def test_spaces_at_the_start_with_sentencepiece(prompt: list[str], said: list[str], shown: str) -> None:
    """Decoding prompt and output together says which space is shown; the decoder drops one at the start of all text."""
    tokenizer = sentencepiece_tokenizer()
    before, after = token_ids(tokenizer, "<s>", *prompt), token_ids(tokenizer, *said)
    engine = FakeEngine(lambda *_: after)
    engine.model_config = dataclasses.replace(engine.model_config, vocab_size=tokenizer.vocab_size)
    service = fake_service(engine, tokenizer=tokenizer)
    assert await complete(service, before, max_tokens=len(after)) == shown
    assert tokenizer.decode([*before, *after]) == tokenizer.decode(before) + shown
    request = parse_completion_request({"prompt": before, "max_tokens": len(after), "stream": True})
    chunks = [chunk async for chunk in await service.completion_stream(request)]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == shown


async def test_byte_level_output_keeps_its_space() -> None:
    assert await complete(fake_service(FakeEngine(say(" yes"))), "The answer is", echo=True) == "The answer is yes"


@pytest.mark.parametrize("tokens_per_output", [1, 3, 100])
@pytest.mark.parametrize(
    ("min_tokens", "shown"), [(0, ""), (1, "ab"), (2, "ab"), (3, "abab"), (8, "abababab")]
)  # the text of that many tokens stands, and a stop string must lie behind it whole
async def test_stop_strings_wait_for_min_tokens(min_tokens: int, shown: str, tokens_per_output: int) -> None:
    service = fake_service(FakeEngine(say("ab" * 5), tokens_per_output=tokens_per_output))
    assert await whole_and_streamed(service, stop="ab", min_tokens=min_tokens) == (shown, shown)


async def test_more_tokens_than_there_is_room_for() -> None:
    engine = FakeEngine(endless)
    with pytest.raises(BadRequestError, match="leaves room for 254") as refused:
        await complete(fake_service(engine), "ab", max_tokens=1000, min_tokens=255)
    assert refused.value.param == "min_tokens"
    assert not engine.submitted


@pytest.mark.parametrize("tokens_per_output", [1, 2, 100])
@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("ing x le", " lead"),  # begins within a token and ends two tokens later
        (["le xx", "ing x le"], " lead"),
        ([" x l", "ing x le x"], " lead"),  # one inside the other: what begins first counts
        (["ing x lee", " x l"], " leading"),
        ("e x z", " leading x le x x"),
    ],
)
async def test_stop_strings_across_tokens(stop: str | list[str], shown: str, tokens_per_output: int) -> None:
    tokenizer = sentencepiece_tokenizer()
    before = token_ids(tokenizer, "<s>", "▁x")
    said = token_ids(tokenizer, "▁leading", "▁x", "▁le", "▁x", "▁x")
    engine = FakeEngine(lambda *_: said, tokens_per_output=tokens_per_output)
    engine.model_config = dataclasses.replace(engine.model_config, vocab_size=tokenizer.vocab_size)
    service = fake_service(engine, tokenizer=tokenizer)
    fields = {"prompt": before, "max_tokens": len(said), "stop": stop}
    whole = (await service.completion(parse_completion_request(fields))).choices[0]
    request = parse_completion_request({**fields, "stream": True})
    choices = [choice async for chunk in await service.completion_stream(request) for choice in chunk.choices]
    assert whole.text == "".join(choice.text for choice in choices) == shown
    ended = "length" if stop == "e x z" else "stop"
    assert whole.finish_reason == ended
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [ended]
    for end in range(len(choices)):  # at no time is more shown than the answer has
        assert shown.startswith("".join(choice.text for choice in choices[:end]))
