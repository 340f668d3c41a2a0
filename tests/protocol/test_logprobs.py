"""Log probabilities as clients read them: strict JSON, in place, the same streamed and not, whatever ends the text."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from jaxserve.engine.request import RequestOutput, TokenLogprobs
from jaxserve.protocol.choice_text import ChoiceText
from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.generation import TextGeneration
from jaxserve.protocol.logprobs import LEAST_LOGPROB, LogprobWriter, PlacedLogprobs
from jaxserve.protocol.observer import NoObserver
from jaxserve.protocol.parsing import parse_chat_request, parse_completion_request
from jaxserve.protocol.responses import ChatCompletion, Completion, CompletionLogprobs
from jaxserve.protocol.service import OpenAIService
from jaxserve.text.detokenizer import Detokenizer
from tests.fakes import EOS, FakeEngine, byte_tokenizer, fake_service, logprobs_of, say
from tests.text.vocabularies import sentencepiece_tokenizer, token_ids

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}


async def chat(service: OpenAIService, **fields: Any) -> ChatCompletion:
    return await service.chat_completion(parse_chat_request({"messages": [USER], "logprobs": True, **fields}))


async def complete(service: OpenAIService, prompt: Any, **fields: Any) -> Completion:
    return await service.completion(parse_completion_request({"prompt": prompt, **fields}))


async def streamed(service: OpenAIService, prompt: Any, **fields: Any) -> list[Completion]:
    request = parse_completion_request({"prompt": prompt, "stream": True, **fields})
    return [chunk async for chunk in await service.completion_stream(request)]


def lists(answer: Completion, index: int = 0) -> CompletionLogprobs:
    logprobs = answer.choices[index].logprobs
    assert logprobs is not None
    return logprobs


def joined(parts: list[CompletionLogprobs]) -> CompletionLogprobs:
    """Those of a stream's chunks, as one."""
    fields = CompletionLogprobs.model_fields
    return CompletionLogprobs(**{name: [item for part in parts for item in getattr(part, name)] for name in fields})


def strict_json(answer: ChatCompletion | Completion) -> Any:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(answer.to_json(), parse_constant=refuse)


async def test_chat() -> None:
    answer = await chat(fake_service(FakeEngine(say("é"))), top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [entry.token for entry in logprobs.content] == ["\\xc3", "\\xa9", "<|im_end|>"]
    assert [entry.bytes for entry in logprobs.content] == [[0xC3], [0xA9], list(b"<|im_end|>")]
    first = logprobs.content[0]
    assert first.logprob == logprobs_of(0xC3, 0).logprob
    assert [(top.token, top.bytes) for top in first.top_logprobs] == [("\\xc4", [0xC4]), ("\\xc3", [0xC3])]
    assert [top.logprob for top in first.top_logprobs] == sorted(
        (top.logprob for top in first.top_logprobs), reverse=True
    )


@pytest.mark.parametrize("fields", [{"logprobs": False}, {"logprobs": None}, {"logprobs": False, "top_logprobs": 0}])
async def test_none_unless_asked_for(fields: dict[str, Any]) -> None:
    answer = await chat(fake_service(FakeEngine(say("a"))), **fields)
    assert answer.choices[0].logprobs is None
    assert "prompt_logprobs" not in answer.to_json()


@pytest.mark.parametrize("count", [None, 0, 20])
async def test_as_many_alternatives_as_asked_for(count: int | None) -> None:
    answer = await chat(fake_service(FakeEngine(say("z"))), top_logprobs=count)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [count or 0] * 2


async def test_completions() -> None:
    logprobs = lists(await complete(fake_service(FakeEngine(say("hi"))), "x", logprobs=1))
    assert logprobs.tokens == ["h", "i", "<|im_end|>"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.token_logprobs == [logprobs_of(token, 0).logprob for token in (*b"hi", EOS)]
    # The likeliest, and the token itself.
    assert list(logprobs.top_logprobs[0] or ()) == ["i", "h"]
    assert lists(await complete(fake_service(FakeEngine(say("hi"))), "x", logprobs=0)).top_logprobs[0] == {
        "h": logprobs.token_logprobs[0]
    }


def forbids(*tokens: int) -> Any:
    """As the engine's, but these tokens are impossible."""

    def logprobs(token: int, count: int) -> TokenLogprobs:
        values = logprobs_of(token, count)
        top = tuple((other, -math.inf if other in tokens else value) for other, value in values.top)
        return TokenLogprobs(token, -math.inf if token in tokens else values.logprob, top)

    return logprobs


async def test_impossible_tokens_are_no_infinities_in_json() -> None:
    service = fake_service(FakeEngine(say("hi"), logprobs_of=forbids(*b"hg")))
    body = strict_json(await chat(service, top_logprobs=20))
    first, second, _ = body["choices"][0]["logprobs"]["content"]
    assert first["logprob"] == LEAST_LOGPROB
    assert not {"h", "g"} & {top["token"] for top in first["top_logprobs"] + second["top_logprobs"]}
    assert (len(first["top_logprobs"]), len(second["top_logprobs"])) == (18, 18)
    body = strict_json(await complete(service, "hg", logprobs=20, echo=True, prompt_logprobs=20))
    assert body["choices"][0]["logprobs"]["token_logprobs"][1] == LEAST_LOGPROB
    assert body["choices"][0]["logprobs"]["top_logprobs"][1]["g"] == LEAST_LOGPROB
    assert body["choices"][0]["prompt_logprobs"][1][str(ord("g"))]["logprob"] == LEAST_LOGPROB
    for chunk in await streamed(service, "hg", logprobs=20, echo=True):
        strict_json(chunk)


@pytest.mark.parametrize("tokens_per_output", [1, 3, 100])
@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("plain text", {}), ("one two three", {"stop": "e tw"}), ("one two three", {"stop": "three!"}),
        ("é🌶한 x", {}), ("\ufffd x", {}), ("one two", {"max_tokens": 4}), ("one two", {"stop_token_ids": [ord("w")]}),
        ("one two", {"stop_token_ids": [ord("w")], "skip_special_tokens": False}), ("", {}),
        ("one two three", {"min_tokens": 9, "stop": "e"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("echo", [False, True])
async def test_streamed_equals_whole_and_all_is_in_place(
    said: str, options: dict[str, Any], tokens_per_output: int, echo: bool
) -> None:
    service = fake_service(FakeEngine(say(said), tokens_per_output=tokens_per_output))
    fields = {"logprobs": 2, "echo": echo, "max_tokens": 100, **options}
    answer = await complete(service, "Qé:", **fields)
    chunks = await streamed(service, "Qé:", **fields)
    whole, text = lists(answer), answer.choices[0].text
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    assert joined(parts) == whole
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text
    assert answer.usage is not None
    num_prompt_tokens = answer.usage.prompt_tokens if echo else 0
    assert len(whole.tokens) == num_prompt_tokens + answer.usage.completion_tokens
    assert len(whole.text_offset) == len(whole.token_logprobs) == len(whole.top_logprobs) == len(whole.tokens)
    if echo:
        assert (whole.token_logprobs[0], whole.top_logprobs[0]) == (None, None)
        assert None not in whole.token_logprobs[1:]
    assert whole.text_offset == sorted(whole.text_offset)
    for offset, token in zip(whole.text_offset, whole.tokens, strict=True):
        if token.isascii() and len(token) == 1 and offset < len(text):
            assert text[offset] == token


@pytest.mark.parametrize("tokens_per_output", [1, 3])
async def test_streamed_chat_with_a_stop_equals_whole(tokens_per_output: int) -> None:
    service = fake_service(FakeEngine(say("one two three"), tokens_per_output=tokens_per_output))
    whole = (await chat(service, top_logprobs=2, stop="e tw")).choices[0].logprobs
    assert whole is not None
    assert "".join(entry.token for entry in whole.content) == "one tw"
    fields = {"messages": [USER], "stream": True, "logprobs": True, "top_logprobs": 2, "stop": "e tw"}
    stream = await service.chat_completion_stream(parse_chat_request(fields))
    choices = [choice async for chunk in stream for choice in chunk.choices]
    assert [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content] == whole.content
    assert "".join(choice.delta.content or "" for choice in choices) == "on"
    assert choices[-1].finish_reason == "stop"


async def test_offset_after_bytes_that_never_became_a_character() -> None:
    service = fake_service(FakeEngine(lambda *_: [0xC3, *b"ab", EOS]))
    answer = await complete(service, "x", logprobs=0)
    assert answer.choices[0].text == "\ufffdab"
    assert lists(answer).text_offset == [0, 1, 2, 3]
    assert lists(answer).tokens[0] == "bytes:\\xc3"


async def test_offsets_with_sentencepiece() -> None:
    tokenizer = sentencepiece_tokenizer()
    said = token_ids(tokenizer, "▁x", "▁le", "<0xC3>", "<0xA9>", "a", "▁x")
    engine = FakeEngine(lambda *_: said)
    engine.model_config = dataclasses.replace(engine.model_config, vocab_size=tokenizer.vocab_size)
    service = fake_service(engine, tokenizer=tokenizer)
    answer = await complete(
        service, token_ids(tokenizer, "▁leading", "▁x"), echo=True, logprobs=0, max_tokens=len(said)
    )
    text, logprobs = answer.choices[0].text, lists(answer)
    assert text == "leading x x leéa x"
    for offset, token in zip(logprobs.text_offset[1:], logprobs.tokens[1:], strict=True):
        if token.isascii() and "\\x" not in token:
            assert text[offset : offset + len(token)] == token


async def test_control_tokens_of_a_prompt_take_the_place_that_they_have_in_its_text() -> None:
    service = fake_service(FakeEngine(say("!")), bos=True)
    answer = await complete(service, "a<|im_end|>b", echo=True, logprobs=0)
    assert answer.choices[0].text == "a<|im_end|>b!"
    assert lists(answer).tokens[:4] == ["<|endoftext|>", "a", "<|im_end|>", "b"]
    assert lists(answer).text_offset == [0, 0, 1, 11, 12, 13]
    bare = await complete(service, "ab", echo=True, logprobs=0, add_special_tokens=False)
    assert lists(bare).tokens[:2] == ["a", "b"]


@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_a_prompt(stream: bool) -> None:
    engine = FakeEngine(say("never seen"))
    service = fake_service(engine)
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 0}
    if stream:
        chunks = await streamed(service, ["abc", "de"], **fields, stream_options={"include_usage": True})
        (*choices,) = (choice for chunk in chunks for choice in chunk.choices)
        texts = ["".join(choice.text for choice in choices if choice.index == index) for index in range(2)]
        tokens = [[choice.logprobs.tokens for choice in choices if choice.logprobs and choice.index == 0]]
        reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
        usage = chunks[-1].usage
        assert tokens == [[["a", "b", "c"]]]
    else:
        answer = await complete(service, ["abc", "de"], **fields)
        texts, usage = [choice.text for choice in answer.choices], answer.usage
        reasons = [choice.finish_reason for choice in answer.choices]
        assert [lists(answer, index).tokens for index in range(2)] == [["a", "b", "c"], ["d", "e"]]
        assert lists(answer).token_logprobs == [None, *(logprobs_of(token, 0).logprob for token in b"bc")]
    assert texts == ["abc", "de"]
    assert reasons == ["length", "length"]
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 0)
    assert not engine.live
    assert engine.submitted[0][1].max_tokens == 1


async def test_echo_and_log_probabilities_of_every_choice() -> None:
    answer = await complete(fake_service(FakeEngine(say("x", "yz"))), ["ab", "c"], n=2, echo=True, logprobs=0)
    assert [choice.text for choice in answer.choices] == ["abx", "abyz", "cx", "cyz"]
    tokens = [lists(answer, index).tokens[:-1] for index in range(4)]
    assert tokens == [["a", "b", "x"], ["a", "b", "y", "z"], ["c", "x"], ["c", "y", "z"]]


async def test_prompt_log_probabilities() -> None:
    service = fake_service(FakeEngine(say("x")))
    answer = await complete(service, ["ab", "c"], prompt_logprobs=2, n=2)
    of_prompt = [choice.prompt_logprobs for choice in answer.choices]
    assert of_prompt[0] == of_prompt[1]
    assert of_prompt[2] == [None]
    assert of_prompt[0] is not None
    first, second = of_prompt[0]
    assert first is None
    assert second is not None
    assert {token: (value.decoded_token, value.rank) for token, value in second.items()} == {
        str(ord("b")): ("b", 2), str(ord("c")): ("c", 1),
    }  # fmt: skip
    chatted = await chat(service, prompt_logprobs=0, logprobs=False)
    assert chatted.prompt_logprobs is not None
    assert len(chatted.prompt_logprobs) == chatted.usage.prompt_tokens
    assert [value.rank for value in (chatted.prompt_logprobs[1] or {}).values()] == [None]


async def test_best_of_returns_the_likeliest() -> None:
    # Of these letters the later are the likelier. The mean counts: the sum would favour the first, which is short.
    engine = FakeEngine(lambda prompt, sampling, index: (b"a", b"zzzz", b"cca", b"yyyy")[index])
    service = fake_service(engine)
    fields: dict[str, Any] = {"max_tokens": 4, "stop_token_ids": [ord("a")], "best_of": 4}
    answer = await complete(service, ["p", "q"], n=2, **fields)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["zzzz", "yyyy"] * 2
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * (1 + 4 + 3 + 4)
    assert lists(await complete(service, "p", logprobs=0, **fields)).tokens == ["z"] * 4


async def test_bias_outside_the_vocabulary() -> None:
    engine = FakeEngine(say("x"))
    with pytest.raises(BadRequestError) as refused:
        await chat(fake_service(engine), logit_bias={"259": 1})
    assert refused.value.param == "logit_bias"
    await chat(fake_service(engine), logit_bias={"258": -100})
    assert engine.submitted[0][1].logit_bias == ((258, -100.0),)


async def test_more_log_probabilities_than_a_response_may_hold() -> None:
    service = fake_service(FakeEngine(say("x"), max_model_len=1_000_000))
    for fields in ({"top_logprobs": 20}, {"n": 128, "max_tokens": 40_000}):
        with pytest.raises(BadRequestError, match="log probabilities in one response") as refused:
            await chat(service, **fields)
        assert refused.value.param == "logprobs"
    with pytest.raises(BadRequestError) as refused:
        await complete(service, "x" * 100_000, prompt_logprobs=20, n=2)
    assert refused.value.param == "prompt_logprobs"
    await chat(service, top_logprobs=20, max_tokens=1000)


class ReadyStream:
    """Outputs that are all there already, in this order."""

    request_id = "ready"

    def __init__(self, outputs: list[RequestOutput]) -> None:
        self._outputs = iter(outputs)

    def __aiter__(self) -> ReadyStream:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            return next(self._outputs)
        except StopIteration:
            raise StopAsyncIteration from None

    def abort(self, index: int | None = None) -> None: ...
    async def aclose(self) -> None: ...


async def test_nothing_is_told_before_the_prompts_log_probabilities() -> None:
    prompt = (None, logprobs_of(98, 0))
    outputs = [
        RequestOutput("ready", 1, (120,)),
        RequestOutput("ready", 0, (121,), prompt_logprobs=prompt),
        RequestOutput("ready", 1, (122,), finish_reason="length"),
        RequestOutput("ready", 0, (123,), finish_reason="length"),
    ]
    tokenizer = byte_tokenizer()
    choices = [ChoiceText(i, tokenizer, Detokenizer(tokenizer), stops=(), skip_special_tokens=True) for i in range(2)]
    generation = TextGeneration(
        ReadyStream(outputs), choices, prompt_tokens=2, observer=NoObserver(), awaits_prompt_logprobs=True
    )
    seen = []
    async for delta in generation.deltas():
        assert generation.prompt_logprobs == prompt
        seen.append((delta.index, delta.text))
    assert seen == [(1, "x"), (0, "y"), (1, "z"), (0, "{")]


def test_tokens_with_one_text_are_told_once() -> None:
    """Two tokens may have the same text; the likelier one speaks for it."""
    tokenizer = sentencepiece_tokenizer()
    letter, byte = token_ids(tokenizer, "a", "<0x61>")
    values = TokenLogprobs(byte, -3.0, ((letter, -1.0), (byte, -3.0)))
    logprobs = LogprobWriter(tokenizer, 2).completion([PlacedLogprobs(byte, values, 0)])
    assert logprobs.top_logprobs == [{"a": -1.0}]
    assert logprobs.token_logprobs == [-3.0]


def test_not_a_number_is_no_json() -> None:
    values = TokenLogprobs(97, math.nan, ((97, math.nan), (98, -1.0)))
    entry = LogprobWriter(byte_tokenizer(), 2).content([PlacedLogprobs(97, values, 0)])[0]
    assert entry.logprob == LEAST_LOGPROB
    assert [top.token for top in entry.top_logprobs] == ["b"]
