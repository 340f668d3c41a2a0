"""The whole engine on a real, tiny model: same tokens whatever else runs, nothing compiled after warm-up."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.client import EngineClient
from jaxserve.engine.request import RequestError, RequestOutput
from jaxserve.sampling_params import SamplingParams
from tests.tiny_engine import EOS, TIMEOUT, VOCAB_SIZE, Answer, ask, tiny_engine


@pytest.fixture
def engine(small_engine: EngineClient) -> EngineClient:
    return small_engine


def is_idle(engine: EngineClient) -> bool:
    stats = engine.stats()
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_pages == stats.num_pages


def until_idle(engine: EngineClient) -> None:
    """The step that was launched past the last request's end is not announced."""
    deadline = time.monotonic() + TIMEOUT
    while not is_idle(engine):
        assert time.monotonic() < deadline, engine.stats()
        time.sleep(0.001)


def abort_after_a_token(engine: EngineClient, prompt: list[int], sampling: SamplingParams) -> list[str]:
    """Aborts a request in the engine's own thread, where it cannot have gone on meanwhile; its choices' finish reasons."""
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()

    def take(output: RequestOutput) -> None:
        if output.finish_reason is None:
            engine.abort(output.request_id)
        else:
            reasons.put(output.finish_reason)

    engine.submit_with_callback(prompt, sampling, take)
    return [reasons.get(timeout=TIMEOUT) for _ in range(sampling.n)]


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects what jax traces, lowers or compiles, in any thread."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs
        if event.startswith("/jax/core/compile/"):
            events.append(f"{event} {kwargs}")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def mixed_requests(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"temperature": 0.0},
        lambda: {"temperature": rng.uniform(0.3, 1.5), "seed": rng.getrandbits(63)},
        lambda: {"temperature": 1.0, "seed": -rng.getrandbits(63), "top_p": 0.9, "top_k": 20, "min_p": 0.02},
        lambda: {"temperature": 0.9, "seed": 3, "frequency_penalty": 1.0, "presence_penalty": 0.5, "logprobs": 3},
        lambda: {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 1, "logit_bias": ((3, 2.0),)},
        lambda: {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    return [
        (
            [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, 32))],
            SamplingParams(
                max_tokens=rng.choice([1, 12, 24, 32]), ignore_eos=rng.random() < 0.5, **kinds[i % len(kinds)]()
            ),
        )
        for i in range(count)
    ]


def test_thirty_two_requests_give_what_each_gives_alone(engine: EngineClient) -> None:
    requests = mixed_requests(32, seed=1)
    joins = random.Random(2)
    before = engine.stats().num_preemptions
    answers: list[Answer] = []
    for prompt, sampling in requests:
        answers.append(Answer(engine, prompt, sampling))
        # The next one joins after a random number of tokens of those before.
        for _ in range(joins.choice([0, 0, 0, 1, 4])):
            unfinished = [answer for answer in answers if not all(answer.reasons)]
            if unfinished:
                joins.choice(unfinished).next()
    together = [answer.wait()[0] for answer in answers]
    until_idle(engine)
    assert engine.stats().num_preemptions - before >= 5

    for (prompt, sampling), tokens, answer in zip(requests, together, answers, strict=True):
        assert tokens == ask(engine, prompt, sampling)
        assert answer.reasons == ["stop" if tokens[-1] == EOS and not sampling.ignore_eos else "length"]
    until_idle(engine)


def test_nothing_is_compiled_while_serving(engine: EngineClient) -> None:
    with compilations() as control:
        jax.jit(lambda x: x + jnp.float32(time.monotonic()))(jnp.float32(1)).block_until_ready()
    assert control, "the listener hears nothing"

    lengths = [1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 60, 63]
    with compilations() as events:
        for prompt, sampling in mixed_requests(6, seed=3):  # alone
            ask(engine, prompt, sampling)
        answers = [Answer(engine, [2] * length, SamplingParams(max_tokens=5, seed=length)) for length in lengths]
        answers += [Answer(engine, *request) for request in mixed_requests(12, seed=4)]
        answers.append(Answer(engine, [3, 4], SamplingParams(n=4, seed=1, max_tokens=9, top_k=VOCAB_SIZE + 5)))
        assert abort_after_a_token(engine, [5] * 20, SamplingParams(ignore_eos=True)) == ["abort"]
        for answer in answers:
            answer.wait()
        with pytest.raises(RequestError):
            engine.submit_with_callback([2] * 64, SamplingParams(), lambda output: None)
        until_idle(engine)
    assert not events


def test_choices_are_reproducible_and_differ(engine: EngineClient) -> None:
    def run(seed: int | None, n: int) -> list[list[int]]:
        sampling = SamplingParams(n=n, seed=seed, max_tokens=16, temperature=1.0, ignore_eos=True)
        return Answer(engine, [9, 8, 7], sampling).wait()

    four = run(7, 4)
    assert len({tuple(tokens) for tokens in four}) == 4
    assert run(7, 4) == four
    assert run(7, 1) == four[:1]
    edges = [run(seed, 1)[0] for seed in (0, 1, -1, 2**32, 2**63 - 1, -(2**63))]
    assert len({tuple(tokens) for tokens in edges}) == len(edges), "bits of the seed were lost"
    assert run(None, 1) != run(None, 1)


def test_a_greedy_request_is_the_same_every_time(engine: EngineClient) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    assert len({tuple(ask(engine, [11, 12, 13], sampling)) for _ in range(5)}) == 1


GREEDY_IN_EFFECT: list[dict[str, Any]] = [
    {"temperature": 1e-9},
    {"temperature": 1e-5},
    {"temperature": 1e-4},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"top_k": 1},
    {"min_p": 1.0},
    {"temperature": 0.0, "top_p": 0.0},
]


@pytest.mark.parametrize("params", GREEDY_IN_EFFECT, ids=str)
def test_edge_values_that_leave_the_top_token(engine: EngineClient, params: dict[str, Any]) -> None:
    common: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    greedy = ask(engine, [21, 22], SamplingParams(temperature=0.0, **common))
    assert ask(engine, [21, 22], SamplingParams(seed=5, **{"temperature": 1.0, **params}, **common)) == greedy


@pytest.mark.parametrize(
    "params", [{"top_k": 0}, {"top_k": -1}, {"top_k": VOCAB_SIZE + 5}, {"top_p": 1.0}, {"min_p": 0.0}], ids=str
)
def test_filters_that_are_off_change_nothing(engine: EngineClient, params: dict[str, Any]) -> None:
    common: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0}
    draws = [ask(engine, [31, 32], SamplingParams(seed=seed, **params, **common)) for seed in range(5)]
    assert draws == [ask(engine, [31, 32], SamplingParams(seed=seed, **common)) for seed in range(5)]
    assert len({tuple(tokens) for tokens in draws}) == 5


def test_aborted_requests_free_their_pages_at_once(engine: EngineClient) -> None:
    until_idle(engine)
    for _ in range(2 * 4 + 1):  # more than there are slots
        reasons = abort_after_a_token(engine, [41] * 30, SamplingParams(ignore_eos=True, n=2))
        assert reasons == ["abort", "abort"]
    until_idle(engine)
    assert len(ask(engine, [41] * 30, SamplingParams(ignore_eos=True))) == 34


ODD_SIZES = [
    pytest.param(
        EngineConfig(max_model_len=33, max_num_seqs=2, max_num_batched_tokens=2, page_size=1), marks=pytest.mark.long
    ),
    pytest.param(
        EngineConfig(max_model_len=7, max_num_seqs=1, max_num_batched_tokens=1, page_size=3), marks=pytest.mark.long
    ),
    EngineConfig(max_num_seqs=1, max_num_batched_tokens=5, page_size=11, num_pages=1),
]


@pytest.mark.parametrize("config", ODD_SIZES, ids=lambda config: f"{config.max_model_len}-{config.page_size}")
def test_any_size_works_and_changes_no_token(engine: EngineClient, config: EngineConfig) -> None:
    with tiny_engine(config, mode="filtered") as odd:
        longest = odd.max_model_len
        assert longest == (config.max_model_len or 11)
        prompts = [list(range(2, 2 + length)) for length in (1, 3, longest - 1)]
        for sampling in (
            SamplingParams(temperature=0.0, ignore_eos=True),
            SamplingParams(seed=3, max_tokens=longest // 2),
            SamplingParams(seed=4, top_p=0.9, ignore_eos=True),
        ):
            answers = [Answer(odd, prompt, sampling) for prompt in prompts]
            for prompt, answer in zip(prompts, answers, strict=True):
                tokens = answer.wait()[0]
                assert tokens == ask(engine, prompt, sampling)[: longest - len(prompt)]
                assert answer.reasons in (["length"], ["stop"])
        with pytest.raises(RequestError, match=f"context of {longest} tokens"):
            ask(odd, [2] * longest, SamplingParams())
        until_idle(odd)
