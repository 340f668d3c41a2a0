"""The `openai` package asks a real server for log probabilities, biases, penalties, responses and token ids."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.processes import ServerProcess, server_process

MODEL = "tiny"
EOS = 258
VOCAB_SIZE = 259
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story."}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
NO_END = {"ignore_eos": True}
LAUNCH = "from jaxserve.cli.main import main; main()"
CLOSE = 1e-4


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    options = {
        "--port": "0", "--served-model-name": MODEL, "--max-num-seqs": "4", "--max-num-batched-tokens": "64",
        "--num-pages": "128",
    }  # fmt: skip
    flags = [part for pair in options.items() for part in pair]
    with server_process(["-c", LAUNCH, "serve", str(tiny_model_dir), *flags], folder / "log") as process:
        process.wait_ready()
        yield process
        process.process.terminate()
        assert process.exit_code() == 0
        assert "Traceback" not in process.log


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url()}{path}", json=body, timeout=120)


def first_token(client: openai.OpenAI, **fields: Any) -> tuple[str, float, list[tuple[str, float]]]:
    """Of an answer: its first token, the log probability, and the likeliest tokens there."""
    answer = client.chat.completions.create(**{**CHAT, "max_tokens": 1, "logprobs": True, "top_logprobs": 20, **fields})
    assert answer.choices[0].logprobs is not None
    entry = (answer.choices[0].logprobs.content or [])[0]
    return entry.token, entry.logprob, [(top.token, top.logprob) for top in entry.top_logprobs]


def close(first: Sequence[float | None], second: Sequence[float | None]) -> bool:
    return len(first) == len(second) and all(
        a is b is None or (a is not None and b is not None and math.isclose(a, b, abs_tol=CLOSE))
        for a, b in zip(first, second, strict=True)
    )


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=5)
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert answer.usage is not None
    assert len(entries) == answer.usage.completion_tokens == 12
    shown = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert shown.decode("utf-8", "replace") == answer.choices[0].message.content
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert sum(math.exp(value) for value in values) <= 1 + 1e-6
        assert entry.logprob == values[0]  # it is greedy


def test_streamed_chat_equals_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, n=2)
    chunks = list(client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, n=2, stream=True))
    for index, choice in enumerate(whole.choices):
        parts = [part for chunk in chunks for part in chunk.choices if part.index == index and part.logprobs]
        entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content or []]
        assert choice.logprobs is not None
        assert [entry.token for entry in entries] == [entry.token for entry in choice.logprobs.content or []]
        expected = [entry.logprob for entry in choice.logprobs.content or []]
        assert close([entry.logprob for entry in entries], expected)


def test_scoring_agrees_with_generating(client: openai.OpenAI) -> None:
    made = client.completions.create(**PROMPT, logprobs=1, extra_body=NO_END).choices[0].logprobs
    assert made is not None
    spelt = client.completions.create(**PROMPT, logprobs=1, echo=True, extra_body=NO_END)
    echoed = spelt.choices[0].logprobs
    assert echoed is not None
    length = len(PROMPT["prompt"])
    assert echoed.tokens is not None
    assert "".join(echoed.tokens[:length]) == PROMPT["prompt"]
    assert echoed.text_offset is not None
    assert echoed.text_offset[:length] == list(range(length))
    assert echoed.token_logprobs is not None
    assert echoed.token_logprobs[0] is None
    assert close(echoed.token_logprobs[length:], made.token_logprobs or [])
    # The same tokens as a prompt: each has, where it stands, the log probability that it was generated with.
    by_text = {bytes([byte]).decode("utf-8", "ignore") or f"bytes:\\x{byte:02x}": byte for byte in range(256)}
    by_text |= {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": EOS}
    token_ids = [by_text[token] for token in echoed.tokens]
    scored = client.completions.create(model=MODEL, prompt=token_ids, max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].logprobs is not None
    assert close(scored.choices[0].logprobs.token_logprobs or [], echoed.token_logprobs)
    assert scored.usage is not None
    assert (scored.usage.completion_tokens, scored.choices[0].finish_reason) == (0, "length")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5}, {"temperature": 2}, {"temperature": 1, "top_p": 0.1}, {"frequency_penalty": 2},
        {"presence_penalty": -2}, {"extra_body": {"repetition_penalty": 2}}, {"extra_body": {"top_k": 1}},
    ],
)  # fmt: skip
def test_values_are_the_models_whatever_the_sampling(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    forced = {"logit_bias": {str(ord("q")): 100}}
    token, logprob, top = first_token(client, **forced, **fields)
    assert token == "q"
    expected = first_token(client)
    assert [name for name, _ in top] == [name for name, _ in expected[2]]
    assert close([value for _, value in top], [value for _, value in expected[2]])
    assert close([logprob], [first_token(client, **forced)[1]])


@pytest.mark.parametrize("stream", [False, True])
def test_strict_json(server: ServerProcess, stream: bool) -> None:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is no JSON")

    for path, body in (
        ("/v1/completions", {**PROMPT, "echo": True, "logprobs": 1, "temperature": 1, "top_k": 1, "stream": stream}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 20, "stream": stream,
                                  "logit_bias": {str(token): -100 for token in range(250)}}),
    ):  # fmt: skip
        response = post(server, path, body)
        assert response.status_code == 200
        texts = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: {")]
        for text in texts if stream else [response.text]:
            json.loads(text, parse_constant=refuse)


def test_prompt_logprobs(server: ServerProcess) -> None:
    body = post(server, "/v1/completions", {**PROMPT, "prompt_logprobs": 3, "n": 2}).json()
    first, second = (choice["prompt_logprobs"] for choice in body["choices"])
    assert first == second
    assert first[0] is None
    assert len(first) == len(PROMPT["prompt"])
    scored = post(server, "/v1/completions", {**PROMPT, "echo": True, "logprobs": 0, "max_tokens": 0}).json()
    expected = scored["choices"][0]["logprobs"]["token_logprobs"][1:]
    own = [values[str(ord(character))] for character, values in zip(PROMPT["prompt"][1:], first[1:], strict=True)]
    assert close([value["logprob"] for value in own], expected)


def test_bias(client: openai.OpenAI) -> None:
    text = client.completions.create(**PROMPT, logit_bias={str(ord("z")): 100}).choices[0].text
    assert text == "z" * 12
    banned = client.completions.create(**PROMPT, logit_bias={str(token): -100 for token in range(32, 127)})
    assert not any(" " <= character <= "~" for character in banned.choices[0].text)


def test_penalties_count_the_output_only(client: openai.OpenAI) -> None:
    biases = {str(ord("a")): 100, str(ord("b")): 92}
    fields = {**PROMPT, "prompt": "a" * 50, "logit_bias": biases, "max_tokens": 30}
    assert client.completions.create(**fields).choices[0].text == "a" * 30
    text = client.completions.create(**fields, frequency_penalty=2).choices[0].text
    assert text[0] == "a"
    assert set(text) == {"a", "b"}
    assert client.completions.create(**fields, presence_penalty=2).choices[0].text == "a" * 30  # 2 once, not each time


def test_min_tokens(client: openai.OpenAI) -> None:
    ends = {**PROMPT, "logit_bias": {str(EOS): 100}}
    assert client.completions.create(**ends).choices[0].text == ""
    answer = client.completions.create(**ends, extra_body={"min_tokens": 5})
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (6, "stop")
    stops = {**PROMPT, "logit_bias": {str(ord("z")): 100}, "stop": "zz"}
    assert client.completions.create(**stops).choices[0].text == ""
    assert client.completions.create(**stops, extra_body={"min_tokens": 5}).choices[0].text == "zzzzz"


def test_best_of(client: openai.OpenAI) -> None:
    fields = {**PROMPT, "temperature": 1, "seed": 7, "logprobs": 0, "extra_body": NO_END}
    drawn = client.completions.create(**fields, n=4).choices

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    best = client.completions.create(**fields, n=2, best_of=4)
    ranked = sorted(drawn, key=mean, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert best.usage is not None
    assert best.usage.completion_tokens == 4 * 12


def test_ids_outside_the_vocabulary_harm_nobody(client: openai.OpenAI) -> None:
    mates = [{**PROMPT, "temperature": 1, "seed": seed, "max_tokens": 60, "extra_body": NO_END} for seed in (1, 2)]
    alone = [client.completions.create(**mate).choices[0].text for mate in mates]
    started = threading.Barrier(3)

    def run(mate: dict[str, Any]) -> str:
        started.wait(30)
        return client.completions.create(**mate).choices[0].text

    wrong: list[dict[str, Any]] = [{"logit_bias": {key: 1}} for key in (str(VOCAB_SIZE), "-1", "abc", "1.5")] + [
        {"logit_bias": {"5": value}} for value in (101, -101, None, "5")
    ]
    wrong += [{"extra_body": {"stop_token_ids": [token], "min_tokens": 5}} for token in (VOCAB_SIZE, -1)]
    with ThreadPoolExecutor(2) as threads:
        answers = threads.map(run, mates)
        started.wait(30)
        for fields in wrong:
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(**PROMPT, **fields)
            assert (refused.value.param or "").startswith(("logit_bias", "stop_token_ids[0]"))
        assert list(answers) == alone


@pytest.mark.parametrize("max_tokens", [None, 1, 10**12])
def test_output_limits(client: openai.OpenAI, max_tokens: int | None) -> None:
    for fields in ({"max_tokens": max_tokens}, {"max_tokens": None, "max_completion_tokens": max_tokens}):
        answer = client.chat.completions.create(**{**CHAT, **fields}, extra_body=NO_END)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1 if max_tokens == 1 else answer.usage.total_tokens == 512


@pytest.mark.parametrize("max_tokens", [0, -1, "5", 1.5, True])
def test_wrong_output_limits(client: openai.OpenAI, max_tokens: Any) -> None:
    for create, fields in ((client.chat.completions.create, CHAT), (client.completions.create, PROMPT)):
        with pytest.raises(openai.BadRequestError) as refused:
            create(**{**fields, "max_tokens": max_tokens})
        assert refused.value.param == "max_tokens"


def test_continued_message(client: openai.OpenAI, server: ServerProcess) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    body = {"messages": begun, "continue_final_message": True}
    token_ids = post(server, "/tokenize", body).json()["tokens"]
    assert bytes(token_ids[-9:]) == b"Once upon"
    expected = client.completions.create(**{**PROMPT, "prompt": token_ids}).choices[0].text
    answer = client.chat.completions.create(**{**CHAT, "messages": begun}, extra_body={"continue_final_message": True})
    assert answer.choices[0].message.content == expected
    again = post(server, "/detokenize", {"tokens": token_ids}).json()
    assert again["prompt"].endswith("<|im_start|>assistant\nOnce upon")


def test_conversation_with_tools(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    assert client.chat.completions.create(**{**CHAT, "messages": messages}).choices[0].finish_reason


def test_responses(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "Tell me a story.", "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**fields, include=["message.output_text.logprobs"], top_logprobs=1)
    assert whole.output_text == client.chat.completions.create(**CHAT).choices[0].message.content
    assert whole.status == "incomplete"
    events = list(client.responses.create(**fields, stream=True))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage
    stop = {"stop": whole.output_text[4:6]}
    with client.responses.stream(**fields, extra_body=stop) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert (final.status, final.output_text) == ("completed", text)
    assert text == whole.output_text[: whole.output_text.index(stop["stop"])]
    # An answer goes back as input.
    turns: list[Any] = [{"role": "user", "content": "a"}, *whole.output, {"role": "user", "content": "b"}]
    assert client.responses.create(**{**fields, "input": turns}).output[0].type == "message"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**fields, previous_response_id=whole.id)
    assert refused.value.param == "previous_response_id"
