"""The `openai` package drives a real server process with a tiny random model: the whole path, as a client sees it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.processes import ServerProcess, server_process

KEY = "sk-test"
MODEL = "tiny"
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story."}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
LAUNCH = "from jaxserve.cli.main import main; main()"


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    options = {
        "--port": "0", "--api-key": KEY, "--served-model-name": MODEL, "--max-num-seqs": "4",
        "--max-num-batched-tokens": "64", "--num-pages": "128", "--max-num-queued-requests": "60",
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
    with openai.OpenAI(base_url=f"{server.url()}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def stats(server: ServerProcess) -> dict[str, Any]:
    return httpx.get(f"{server.url()}/stats", headers={"authorization": f"Bearer {KEY}"}).json()


@pytest.fixture(autouse=True)
def nothing_stays_behind(server: ServerProcess) -> Iterator[None]:
    """After every test, within a moment, nothing runs and every page is free."""
    yield
    for _ in range(200):
        now = stats(server)
        if now["num_running"] == now["num_waiting"] == 0 and now["num_free_pages"] == now["num_pages"]:
            return
    raise AssertionError(f"something stayed behind: {now}")


def text_of(client: openai.OpenAI, **fields: Any) -> str:
    return client.chat.completions.create(**{**GREEDY, **fields}).choices[0].message.content or ""


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "jaxserve"


def test_the_device_is_told(server: ServerProcess) -> None:
    """Whoever takes a slow CPU for a GPU finds out, by health as by the log; metrics are looked at below."""
    assert httpx.get(f"{server.url()}/health").json()["device"] == "cpu"
    assert "memory of each device (cpu)" in server.log


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 40
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 40


def test_streamed_chat_equals_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY, n=2)
    chunks = list(client.chat.completions.create(**GREEDY, n=2, stream=True, stream_options={"include_usage": True}))
    for index in range(2):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[index].message.content
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["Once", "upon"], max_tokens=5, temperature=0, echo=True)
    assert [choice.text[:4] for choice in answer.choices] == ["Once", "upon"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 10)
    by_ids = client.completions.create(model=MODEL, prompt=list(b"Once"), max_tokens=5, temperature=0, echo=True)
    assert by_ids.choices[0].text == answer.choices[0].text
    stream = client.completions.create(model=MODEL, prompt="Once", max_tokens=5, temperature=0, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def test_stop(client: openai.OpenAI) -> None:
    text = text_of(client)
    stop = text[10:13]
    for given in (stop, [stop], ["never to be seen", stop]):
        assert text_of(client, stop=given) == text[: text.index(stop)]
    answer = client.chat.completions.create(**GREEDY, stop=stop)
    assert answer.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(**GREEDY, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text[: text.index(stop)]


def test_stop_token_and_ignore_eos(client: openai.OpenAI) -> None:
    prompt = list(b"Once")
    options: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "temperature": 0}
    # Byte tokens that stand alone as text, so that text tells them.
    text = client.completions.create(**options).choices[0].text
    letter = next(character for character in text if character.isascii())
    stopped = client.completions.create(**options, extra_body={"stop_token_ids": [ord(letter)], "ignore_eos": True})
    assert stopped.choices[0].text == text[: text.index(letter)]
    assert stopped.choices[0].finish_reason == "stop"


def test_seeds(client: openai.OpenAI) -> None:
    options = {**GREEDY, "temperature": 1, "max_tokens": 16}

    def texts(**fields: Any) -> list[str | None]:
        answer = client.chat.completions.create(**options, **fields)
        return [choice.message.content for choice in answer.choices]

    four = texts(n=4, seed=7)
    assert len(set(four)) > 1
    assert texts(n=4, seed=7) == four
    assert texts(n=1, seed=7) == four[:1]
    for seed in (0, -1, 2**63 - 1):
        assert texts(seed=seed) == texts(seed=seed)
    assert len({texts(seed=None)[0] for _ in range(5)}) > 1


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-9}, {"temperature": 1e-5}, {"temperature": 1e-3}, {"temperature": 1, "top_p": 0},
        {"temperature": 1, "top_p": 1e-9}, {"temperature": 1, "extra_body": {"top_k": 1}},
        {"temperature": 1, "extra_body": {"min_p": 1}}, {"top_p": 0},
        {"extra_body": {"top_k": 259 + 5}},
    ],
)  # fmt: skip
def test_edge_values_that_mean_greedy(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    assert text_of(client, **fields) == text_of(client)


def test_top_k_off_is_not_top_k_one(client: openai.OpenAI) -> None:
    for top_k in (0, -1):
        fields = {"temperature": 1, "max_tokens": 8, "extra_body": {"top_k": top_k}}
        assert len({text_of(client, **fields) for _ in range(5)}) > 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"), ({"temperature": 3.0}, "temperature"), ({"stop": ""}, "stop"),
        ({"extra_body": {"max_token": 5}}, "max_token"),
        ({"extra_body": {"stop_token_ids": [259]}}, "stop_token_ids[0]"),
        ({"top_logprobs": 2}, "top_logprobs"), ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"seed": 2**64}, "seed"), ({"n": 0, "stream": True}, "n"),
    ],
)  # fmt: skip
def test_wrong_requests(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**GREEDY, **fields})
    assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")
    assert refused.value.request_id


def test_prompt_longer_than_the_context(client: openai.OpenAI) -> None:
    for length in (600, 5_000_000):
        with pytest.raises(openai.BadRequestError) as refused:
            text_of(client, messages=[{"role": "user", "content": "x" * length}])
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")


def test_output_ends_where_the_context_does(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="x" * 500, max_tokens=10**12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512


def test_unknown_model_and_wrong_key(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        text_of(client, model="gpt-5")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-wrong").models.list()


def test_client_timeout_ends_the_request(client: openai.OpenAI, server: ServerProcess) -> None:
    slow = client.with_options(timeout=httpx.Timeout(60, read=0.02))
    for _ in range(5):  # one more than there are slots
        with pytest.raises(openai.APITimeoutError):
            slow.completions.create(model=MODEL, prompt="x", n=4, max_tokens=500, extra_body={"ignore_eos": True})
    # `nothing_stays_behind` is the rest of this test.


def test_leaving_a_stream_ends_the_request(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="x", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()


def test_many_at_once_get_what_each_gets_alone(client: openai.OpenAI, server: ServerProcess) -> None:
    prompts = ["a" * (7 * number + 1) for number in range(8)]

    def request(prompt: str) -> dict[str, Any]:
        return {"model": MODEL, "prompt": prompt, "max_tokens": 24, "seed": len(prompt), "temperature": 0.8}

    alone = [client.completions.create(**request(prompt)).choices[0].text for prompt in prompts]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url()}/v1", api_key=KEY, max_retries=0) as client:
            answers = await asyncio.gather(*(client.completions.create(**request(prompt)) for prompt in prompts * 2))
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(together()) == alone * 2


def test_metrics_tell_what_was_done(server: ServerProcess, client: openai.OpenAI) -> None:
    text_of(client)
    metrics = httpx.get(f"{server.url()}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    values = dict(line.rsplit(" ", 1) for line in metrics.split("\n") if line and not line.startswith("#"))
    assert float(values["jaxserve:generation_tokens_total"]) >= 40
    assert float(values['jaxserve:request_success_total{finished_reason="length"}']) >= 1
    assert f'jaxserve:device_info{{device="cpu",model="{MODEL}"}}' in values
