"""The Python API: the calls and objects of the `openai` package, over an engine in this process."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import jaxserve
from jaxserve import AsyncEngine, BadRequestError, Engine, InternalServerError, SamplingParams
from tests.fakes import EOS, MODEL_NAME, FakeEngine, endless, fake_service, say
from tests.structured.grammars import refused_at

USER = {"role": "user", "content": "hi"}


class Fixture:
    """An `Engine` over a scripted one."""

    def __init__(self, script: Any = endless, **options: Any) -> None:
        self.fake = FakeEngine(script, **options)
        self.engine = Engine(fake_service(self.fake))

    def wait_idle(self) -> None:
        """Until the engine has nothing to do."""
        for _ in range(1000):
            if not self.fake.live:
                return
            threading.Event().wait(0.005)
        raise AssertionError(f"still running: {self.fake.live}")


@pytest.fixture
def make() -> Iterator[Callable[..., Fixture]]:
    made: list[Fixture] = []

    def build(*arguments: Any, **options: Any) -> Fixture:
        made.append(Fixture(*arguments, **options))
        return made[-1]

    yield build
    for fixture in made:
        fixture.engine.close()


class Place(BaseModel):
    name: str
    size: int


class Trip(BaseModel):
    places: list[Place]
    note: str | None = None


def test_answers_as_objects(make: Callable[..., Fixture]) -> None:
    fixture = make(say('{"places": [{"name": "Bern", "size": 3}]}'))
    answer = fixture.engine.chat.completions.create(messages=[USER], response_format=Trip)
    assert answer.choices[0].message.parsed == Trip(places=[Place(name="Bern", size=3)])
    assert "parsed" not in answer.to_json()
    constraint = fixture.fake.submitted[0][1].constraint
    assert constraint is not None
    assert refused_at(constraint, '{"places": [{"name": "x", "size": 1}], "note": null}') is None
    assert refused_at(constraint, '{"places": [{"other"') == len('{"places": [{"')
    fixture.engine.chat.completions.create(messages=[USER, answer.choices[0].message, USER])
    cut = fixture.engine.chat.completions.create(messages=[USER], response_format=Trip, max_tokens=4)
    assert (cut.choices[0].finish_reason, cut.choices[0].message.parsed) == ("length", None)


def test_exported_names() -> None:
    assert jaxserve.__all__ == [
        "ApiError", "AsyncEngine", "BadRequestError", "Engine", "EngineConfig", "GeneratedTokens",
        "InternalServerError", "NotFoundError", "RateLimitError", "SamplingParams", "ServerConfig", "UnavailableError",
    ]  # fmt: skip
    for name in jaxserve.__all__:
        assert getattr(jaxserve, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        jaxserve.nothing  # noqa: B018


def test_import_brings_no_jax() -> None:
    code = "import jaxserve, jaxserve.server.app, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_chat(make: Callable[..., Fixture]) -> None:
    engine = make(say("hello")).engine
    answer = engine.chat.completions.create(messages=[USER], max_tokens=20)
    assert answer.choices[0].message.content == "hello"
    assert answer.usage.completion_tokens == 6
    assert answer.model == engine.model_name == MODEL_NAME
    assert answer.model_dump()["choices"][0]["finish_reason"] == "stop"


def test_chat_stream(make: Callable[..., Fixture]) -> None:
    engine = make(say("hello")).engine
    chunks = list(engine.chat.completions.create(messages=[USER], stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_completion(make: Callable[..., Fixture]) -> None:
    engine = make(say("hello")).engine
    assert engine.completions.create(prompt="x").choices[0].text == "hello"
    streamed = engine.completions.create(prompt=(97, 98), stream=True, echo=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "abhello"


def test_an_answer_can_be_sent_back(make: Callable[..., Fixture]) -> None:
    fixture = make(say("hello"))
    answer = fixture.engine.chat.completions.create(messages=[USER])
    fixture.engine.chat.completions.create(messages=[USER, answer.choices[0].message, USER])
    assert bytes(token for token in fixture.fake.submitted[1][0] if token < 256).count(b"hello") == 1


def test_options_are_those_of_the_routes(make: Callable[..., Fixture]) -> None:
    fixture = make(say("hi"))
    answer = fixture.engine.chat.completions.create(
        messages=[USER], logprobs=True, top_logprobs=1, logit_bias={5: 1.5}, min_tokens=1, presence_penalty=0.5
    )
    assert answer.choices[0].logprobs is not None
    assert [entry.token for entry in answer.choices[0].logprobs.content] == ["h", "i", "<|im_end|>"]
    assert fixture.fake.submitted[0][1].logit_bias == ((5, 1.5),)
    scored = fixture.engine.completions.create(prompt="ab", echo=True, logprobs=0, max_tokens=0)
    assert scored.choices[0].logprobs is not None
    assert scored.choices[0].logprobs.tokens == ["a", "b"]


def test_generate(make: Callable[..., Fixture]) -> None:
    engine = make(say("ab", "cd")).engine
    first, second = engine.generate([1, 2], SamplingParams(n=2))
    assert (first.index, first.token_ids, first.finish_reason) == (0, (97, 98, EOS), "stop")
    assert (second.index, second.token_ids) == (1, (99, 100, EOS))
    assert (first.logprobs, first.prompt_logprobs) == (None, None)
    (told, _) = engine.generate([1, 2], SamplingParams(n=2, logprobs=1, prompt_logprobs=0))
    assert [values.token_id for values in told.logprobs or ()] == list(told.token_ids)
    assert [values and values.token_id for values in told.prompt_logprobs or ()] == [None, 2]
    (cut,) = engine.generate([1, 2], SamplingParams(max_tokens=2))
    assert (cut.token_ids, cut.finish_reason) == ((97, 98), "length")


def test_wrong_options_are_named(make: Callable[..., Fixture]) -> None:
    engine = make(say("x")).engine
    for options, param in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"colour": 1}, "colour"),
        ({"top_p": float("nan")}, "top_p"),
    ):
        with pytest.raises(BadRequestError) as refused:
            engine.chat.completions.create(messages=[USER], **options)
        assert refused.value.param == param
    with pytest.raises(BadRequestError) as refused:
        engine.completions.create(prompt="x" * 300)
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(BadRequestError, match="JSON"):
        engine.chat.completions.create(messages=[USER], user=object())
    with pytest.raises(BadRequestError):
        engine.generate([], SamplingParams())
    assert engine.completions.create(prompt="x").choices[0].text == "x"


def test_leaving_a_stream_ends_the_work(make: Callable[..., Fixture]) -> None:
    fixture = make(endless, token_delay=0.001, max_model_len=1_000_000)
    held = fixture.engine.chat.completions.create(messages=[USER], stream=True)
    for _ in held:
        break
    fixture.wait_idle()
    for _ in fixture.engine.completions.create(prompt="x", max_tokens=100_000, stream=True):
        break
    fixture.wait_idle()
    with fixture.engine.chat.completions.create(messages=[USER], stream=True) as stream:
        next(stream)
    fixture.wait_idle()
    unread = fixture.engine.chat.completions.create(messages=[USER], stream=True)
    unread.close()
    fixture.wait_idle()
    assert list(unread) == []


def test_failure_in_a_stream(make: Callable[..., Fixture]) -> None:
    engine = make(endless, fail_after=3).engine
    stream = engine.completions.create(prompt="x", stream=True)
    assert [next(stream).choices[0].text for _ in range(3)] == ["a", "b", "c"]
    with pytest.raises(InternalServerError):
        next(stream)
    with pytest.raises(jaxserve.UnavailableError):
        engine.generate([1], SamplingParams())


def test_calls_from_several_threads(make: Callable[..., Fixture]) -> None:
    engine = make(lambda prompt, sampling, index: [*prompt, EOS]).engine
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = engine.completions.create(prompt=f"echo {number}", max_tokens=50).choices[0].text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: f"echo {number}" for number in range(16)}


def test_closing(make: Callable[..., Fixture]) -> None:
    with make(say("x")).engine as engine:
        assert engine.stats().num_running == 0
        assert engine.max_model_len == 256
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.completions.create(prompt="x")


def test_async_engine() -> None:
    async def use() -> None:
        fake = FakeEngine(say("hello"))
        async with AsyncEngine(fake_service(fake)) as engine:
            answer = await engine.chat.completions.create(messages=[USER])
            assert answer.choices[0].message.content == "hello"
            stream = await engine.chat.completions.create(messages=[USER], stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello"
            assert (await engine.completions.create(prompt="x")).choices[0].text == "hello"
            (generated,) = await engine.generate([1], SamplingParams(max_tokens=2))
            assert generated.token_ids == tuple(b"he")
            assert not fake.aborted

    asyncio.run(use())


def test_leaving_an_async_stream_ends_the_work() -> None:
    async def use() -> None:
        fake = FakeEngine(endless, max_model_len=1_000_000)
        engine = AsyncEngine(fake_service(fake))
        held = await engine.chat.completions.create(messages=[USER], stream=True)
        async for _ in held:
            break
        while fake.live:
            await asyncio.sleep(0)
        async with await engine.completions.create(prompt="x", stream=True, max_tokens=1000) as stream:
            await anext(aiter(stream))
        assert not fake.live
        await engine.close()

    asyncio.run(asyncio.wait_for(use(), 30))


REAL_USE = """
import sys
from jaxserve import Engine, EngineConfig, SamplingParams

config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=32, max_model_len=128)
engine = Engine(sys.argv[1], config, progress=True)
(whole,) = engine.generate([1, 2, 3], SamplingParams(max_tokens=8, temperature=0))
stream = engine.completions.create(prompt=[1, 2, 3], max_tokens=8, temperature=0, stream=True)
text = "".join(chunk.choices[0].text for chunk in stream)
assert text == engine.completions.create(prompt=[1, 2, 3], max_tokens=8, temperature=0).choices[0].text
left_open = engine.completions.create(prompt=[1], max_tokens=100, ignore_eos=True, stream=True)
next(left_open)
print("tokens", len(whole.token_ids))
"""


def test_a_real_engine_that_is_never_closed(tiny_model_dir: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "JAXSERVE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", REAL_USE, str(tiny_model_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "tokens 8\n"), done.stderr
    assert "Loading weights …" in done.stderr and "compiling: done in" in done.stderr
