"""The engine thread and its client over a fake device: no model, nothing to compile."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.client import EngineClient, choice_seed
from jaxserve.engine.request import QueueFullError, RequestError, RequestOutput
from jaxserve.sampling_params import SamplingParams
from tests.engine.client_harness import (
    EOS,
    MODEL_CONFIG,
    PROMPT,
    TIMEOUT,
    Collected,
    Gate,
    engine,
    is_idle,
    read,
    until,
)
from tests.engine.fake_device import VOCAB_SIZE, solo_tokens
from tests.engine.scheduler_harness import make_limits


def test_a_stream_brings_every_choice_and_ends() -> None:
    sampling = SamplingParams(max_tokens=6, seed=3, n=3, ignore_eos=True)
    with engine() as client:

        async def ask() -> list[RequestOutput]:
            return await asyncio.wait_for(read(client.submit(PROMPT, sampling)), TIMEOUT)

        outputs = asyncio.run(ask())
    for index in range(3):
        tokens = [token for output in outputs if output.index == index for token in output.token_ids]
        assert tokens == solo_tokens(PROMPT, choice_seed(3, index), 6)
    assert sum(output.finish_reason == "length" for output in outputs) == 3


def test_many_threads_and_loops_at_once() -> None:
    results: list[tuple[int, list[int]]] = []

    def ask(client: EngineClient, seed: int) -> None:
        async def run() -> list[RequestOutput]:
            return await read(client.submit(PROMPT, SamplingParams(max_tokens=8, seed=seed, ignore_eos=True)))

        results.append((seed, [token for output in asyncio.run(run()) for token in output.token_ids]))

    with engine(make_limits(seqs=3, pages=8)) as client:
        threads = [threading.Thread(target=ask, args=(client, seed)) for seed in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        until(lambda: is_idle(client))
    assert sorted(results) == [(seed, solo_tokens(PROMPT, seed, 8)) for seed in range(12)]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_every_bit_of_a_seed_counts(seed: int) -> None:
    received = Collected()
    with engine() as client:
        client.submit_with_callback(PROMPT, SamplingParams(max_tokens=5, seed=seed, ignore_eos=True), received)
        assert received.tokens() == solo_tokens(PROMPT, seed % 2**64, 5)


def test_choice_seeds_differ_and_the_first_is_the_request_s_own() -> None:
    seeds = [choice_seed(seed, index) for seed in (0, 1, 7, 2**32, 2**64 - 1) for index in range(16)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert choice_seed(7, 0) == 7


def test_requests_without_a_seed_follow_the_engine_s() -> None:
    def run(seed: int | None) -> list[list[int]]:
        received = [Collected() for _ in range(3)]
        with engine(config=EngineConfig(seed=seed)) as client:
            for one in received:
                client.submit_with_callback(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True), one)
            return [one.tokens() for one in received]

    first = run(5)
    assert first == run(5)
    assert first != run(6)
    assert len({tuple(tokens) for tokens in first}) == 3
    assert run(None) != run(None)


def test_end_of_text_ends_unless_ignored() -> None:
    endless = solo_tokens(PROMPT, 1, 60)
    eos = endless.index(EOS)
    stop, at = next((token, i) for i, token in enumerate(endless) if endless.index(token) == i and 2 < i < eos)

    def ask(client: EngineClient, **params: object) -> list[RequestOutput]:
        received = Collected()
        client.submit_with_callback(PROMPT, SamplingParams(seed=1, **params), received)  # type: ignore[arg-type]
        return received.all()

    with engine() as client:
        ended = ask(client)
        assert (len(ended), ended[-1].finish_reason, ended[-1].stop_token_id) == (eos + 1, "stop", EOS)
        ignored = ask(client, ignore_eos=True, max_tokens=eos + 2)
        assert (len(ignored), ignored[-1].finish_reason, ignored[-1].stop_token_id) == (eos + 2, "length", None)
        stopped = ask(client, ignore_eos=True, stop_token_ids=(stop,))
        assert (len(stopped), stopped[-1].finish_reason, stopped[-1].stop_token_id) == (at + 1, "stop", stop)


def test_each_end_of_text_of_the_model_ends_unless_ignored() -> None:
    endless = solo_tokens(PROMPT, 1, 20)
    ends = [token for i, token in enumerate(endless) if endless.index(token) == i][1:4]
    model_config = dataclasses.replace(MODEL_CONFIG, eos_token_ids=tuple(ends))

    def length(client: EngineClient, **params: Any) -> int:
        received = Collected()
        client.submit_with_callback(PROMPT, SamplingParams(seed=1, max_tokens=20, **params), received)
        return len(received.tokens())

    with engine(model_config=model_config) as client:
        assert length(client) == endless.index(ends[0]) + 1
        assert length(client, ignore_eos=True) == 20
        assert length(client, ignore_eos=True, stop_token_ids=(ends[2],)) == endless.index(ends[2]) + 1
    for end in ends:
        with engine(model_config=dataclasses.replace(MODEL_CONFIG, eos_token_ids=(VOCAB_SIZE - 1, end))) as client:
            assert length(client) == min(endless.index(token) for token in {end, VOCAB_SIZE - 1} & {*endless}) + 1


@pytest.mark.parametrize("max_tokens", [None, 10**12])
def test_an_answer_is_cut_to_the_room_that_is_left(max_tokens: int | None) -> None:
    received = Collected()
    with engine(make_limits(max_len=20)) as client:
        client.submit_with_callback(PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True), received)
        outputs = received.all()
    assert len(outputs) == 17
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "stop_token_ids", "parameter", "code"),
    [
        ((), (), "prompt", None),
        ((1, VOCAB_SIZE), (), "prompt", None),
        ((1, -1), (), "prompt", None),
        ((1,), (VOCAB_SIZE,), "stop_token_ids", None),
        ((1,) * 64, (), "prompt", "context_length_exceeded"),
    ],
)
def test_bad_requests_are_refused_at_once(
    prompt: tuple[int, ...], stop_token_ids: tuple[int, ...], parameter: str, code: str | None
) -> None:
    with engine() as client:
        with pytest.raises(RequestError) as refusal:
            client.submit_with_callback(prompt, SamplingParams(stop_token_ids=stop_token_ids), lambda output: None)
        assert (refusal.value.parameter, refusal.value.code) == (parameter, code)
        assert client.is_ready
        assert is_idle(client)


def test_a_full_queue_refuses_and_takes_again() -> None:
    gate = Gate()
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    with engine(make_limits(seqs=2), EngineConfig(max_num_queued_requests=3), gate) as client:
        received = [Collected() for _ in range(5)]
        for one in received:
            client.submit_with_callback(PROMPT, sampling, one)
        with pytest.raises(QueueFullError, match=r"5 .*at most 5.*--max-num-queued-requests"):
            client.submit_with_callback(PROMPT, sampling, lambda output: None)
        gate.opened.set()
        assert [len(one.tokens()) for one in received] == [3] * 5
        again = Collected()
        client.submit_with_callback(PROMPT, sampling, again)
        assert len(again.tokens()) == 3


def test_a_queue_that_one_fills_says_so_of_one() -> None:
    gate = Gate()
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    with engine(make_limits(seqs=1), EngineConfig(max_num_queued_requests=0), gate) as client:
        received = Collected()
        client.submit_with_callback(PROMPT, sampling, received)
        with pytest.raises(QueueFullError, match=r"^1 sequence runs or waits, of at most 1; try again later"):
            client.submit_with_callback(PROMPT, sampling, lambda output: None)
        gate.opened.set()
        assert len(received.tokens()) == 3


def test_too_many_prompt_tokens_that_wait_refuse() -> None:
    gate = Gate()
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    with engine(make_limits(seqs=2), EngineConfig(max_num_queued_tokens=10), gate) as client:
        received = [Collected() for _ in range(4)]
        client.submit_with_callback((5,) * 12, sampling, received[0])  # nothing waits: it may be longer than the limit
        with pytest.raises(
            QueueFullError, match=r"12 prompt tokens wait, of at most 10.* 3 more.*--max-num-queued-tokens"
        ):
            client.submit_with_callback(PROMPT, sampling, lambda output: None)
        gate.opened.set()
        assert len(received[0].tokens()) == 3
        gate.opened.clear()
        for one in received[1:]:
            client.submit_with_callback(PROMPT, sampling, one)
        with pytest.raises(QueueFullError):
            client.submit_with_callback((5,), SamplingParams(n=2), lambda output: None)
        client.submit_with_callback((5,), sampling, lambda output: None)  # the tenth
        gate.opened.set()
        assert [len(one.tokens()) for one in received[1:]] == [3] * 3


def test_outputs_say_when_they_were_made() -> None:
    received = Collected()
    with engine() as client:
        before = time.monotonic()
        client.submit_with_callback(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True), received)
        outputs = received.all()
        after = time.monotonic()
    times = [output.time for output in outputs]
    assert before <= outputs[0].scheduled_time <= times[0]
    assert times == sorted(times)
    assert times[-1] <= after
    assert {output.scheduled_time for output in outputs} == {outputs[0].scheduled_time}


def test_stats_add_up() -> None:
    with engine(make_limits(seqs=2)) as client:
        received = [Collected() for _ in range(4)]
        for one in received:
            client.submit_with_callback(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True), one)
        for one in received:
            one.tokens()
        until(lambda: is_idle(client))
        stats = client.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (4 * len(PROMPT), 4 * 5)
    assert stats.finished == {"length": 4}
    assert stats.num_pages == stats.num_free_pages == 64
    assert stats.num_steps >= 10
    assert stats.device_kind == "fake"
    assert 0.0 <= stats.host_gap <= 1.0


def cached_tokens(client: EngineClient, prompt: list[int], **options: str) -> int:
    collected = Collected()
    client.submit_with_callback(prompt, SamplingParams(max_tokens=2, ignore_eos=True), collected, **options)
    return {output.num_cached_tokens for output in collected.all()}.pop()


def test_the_prefix_cache_is_flushed() -> None:
    prompt = list(range(10))
    with engine() as client:
        assert [cached_tokens(client, prompt) for _ in range(2)] == [0, 8]
        until(lambda: is_idle(client))
        assert client.stats().num_cached_pages == 2
        assert client.flush_prefix_cache().result(TIMEOUT) == 2
        assert client.stats().num_cached_pages == 0
        assert cached_tokens(client, prompt) == 0
        assert client.stats().cached_prompt_tokens == 8


def test_a_flush_that_nobody_waits_for_any_more_does_no_harm() -> None:
    gate = Gate()
    with engine(gate=gate) as client:
        collected = Collected()
        client.submit_with_callback(PROMPT, SamplingParams(max_tokens=4, seed=3, ignore_eos=True), collected)
        flushed = client.flush_prefix_cache()
        flushed.cancel()  # as asyncio does it when its waiter is cancelled
        gate.opened.set()
        assert collected.tokens() == solo_tokens(PROMPT, 3, 4)
        assert client.is_ready


def test_salts_reach_the_cache() -> None:
    prompt = list(range(10))
    with engine() as client:
        told = [cached_tokens(client, prompt, cache_salt=salt) for salt in ("x", "y", "x")]
        assert [*told, cached_tokens(client, prompt)] == [0, 0, 8, 0]


def test_a_pinned_prompt_is_there_for_the_first_request() -> None:
    prompt = list(range(10))
    with engine() as client:
        client.pin_prompt(prompt)
        assert cached_tokens(client, [*prompt[:8], 30, 31]) == 8


def test_what_pins_a_prompt_is_nobodys_request() -> None:
    prompt = list(range(10))
    with engine() as client:
        client.pin_prompt(prompt)
        client.pin_prompt(prompt)  # takes what is there
        stats = client.stats()
        assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.generation_tokens) == (0, 0, 0)
        assert stats.finished == {}
        cached_tokens(client, prompt)
        stats = client.stats()
        assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.generation_tokens) == (10, 8, 2)
        assert stats.finished == {"length": 1}


def test_a_prompt_is_pinned_beside_requests_whose_ids_another_engine_gave() -> None:
    gate = Gate()
    gate.free_steps = 1
    with engine(gate=gate) as client:
        collected = Collected()
        client.submit_as("request-0", PROMPT, SamplingParams(max_tokens=5, seed=2, ignore_eos=True), collected)
        pinned = threading.Thread(target=client.pin_prompt, args=(list(range(10)),))
        pinned.start()
        gate.opened.set()
        pinned.join(TIMEOUT)
        assert collected.tokens() == solo_tokens(PROMPT, 2, 5)
        assert not pinned.is_alive()


def test_the_id_of_a_request_that_is_under_way_is_refused_and_may_come_again_after_it() -> None:
    gate = Gate()
    gate.free_steps = 1
    sampling = SamplingParams(max_tokens=5, seed=2, ignore_eos=True)
    with engine(gate=gate) as client:
        first, again = Collected(), Collected()
        client.submit_as("mine", PROMPT, sampling, first)
        with pytest.raises(ValueError, match="'mine' is that of a request that is under way"):
            client.submit_as("mine", PROMPT, sampling, Collected())
        gate.opened.set()
        assert first.tokens() == solo_tokens(PROMPT, 2, 5)
        client.submit_as("mine", PROMPT, sampling, again)
        assert again.tokens() == solo_tokens(PROMPT, 2, 5)


def test_a_pinned_prompt_that_cannot_be_served_is_refused() -> None:
    with engine() as client, pytest.raises(RequestError, match="leaves no room"):
        client.pin_prompt(list(range(30)) * 4)


def test_priorities_have_an_effect_or_are_refused() -> None:
    sampling = SamplingParams(max_tokens=1)
    with engine() as client, pytest.raises(RequestError, match="--scheduling-policy priority") as refusal:
        client.submit_with_callback([1, 2], sampling, Collected(), priority=1)
    assert refusal.value.parameter == "priority"
    with engine(config=EngineConfig(scheduling_policy="priority")) as client:
        collected = Collected()
        client.submit_with_callback([1, 2], sampling, collected, priority=1)
        assert len(collected.tokens()) == 1
