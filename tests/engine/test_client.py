"""The engine thread and its client over a fake device: no model, nothing to compile."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.client import EngineClient, choice_seed
from jaxserve.engine.request import EngineStoppedError, QueueFullError, RequestError, RequestOutput
from jaxserve.engine.scheduler import Scheduler, SchedulerLimits
from jaxserve.engine.stream import GenerationStream
from jaxserve.sampling_params import SamplingParams
from tests.engine.fake_device import VOCAB_SIZE, FakeRunner, solo_tokens
from tests.engine.scheduler_harness import make_limits

EOS = 31
MODEL_CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8,
    max_position_embeddings=64, eos_token_ids=(EOS,),
)  # fmt: skip
PROMPT = (5, 6, 7)
TIMEOUT = 30.0  # seconds that nothing here comes near


@dataclass
class Gate:
    """Lets the engine fetch steps only while it is open; may make one fail.

    Attributes:
        free_steps: that pass it before.
    """

    opened: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    free_steps: int = 0

    def __call__(self, step: int) -> None:
        assert step < self.free_steps or self.opened.wait(TIMEOUT)
        if self.error is not None:
            raise self.error


@dataclass
class Collected:
    """What a callback was given."""

    outputs: queue.SimpleQueue[RequestOutput] = field(default_factory=queue.SimpleQueue)

    def __call__(self, output: RequestOutput) -> None:
        self.outputs.put(output)

    def all(self, choices: int = 1) -> list[RequestOutput]:
        """Every output until each choice has ended."""
        collected: list[RequestOutput] = []
        while sum(output.finish_reason is not None for output in collected) < choices:
            collected.append(self.outputs.get(timeout=TIMEOUT))
        return collected

    def tokens(self) -> list[int]:
        return [token for output in self.all() for token in output.token_ids]


@contextmanager
def engine(
    limits: SchedulerLimits | None = None,
    config: EngineConfig | None = None,
    gate: Callable[[int], None] = lambda step: None,
    model_config: ModelConfig = MODEL_CONFIG,
) -> Iterator[EngineClient]:
    limits = limits or make_limits()
    client = EngineClient(
        config=config or EngineConfig(seed=0),
        model_config=model_config,
        scheduler=Scheduler(limits),
        runner=FakeRunner(limits, gate),
        device_kind="fake",
    )
    client.start()
    with ExitStack() as stack:
        stack.callback(client.shutdown)
        yield client


def until(condition: Callable[[], bool]) -> None:
    """Waits for the engine thread's counters, which nothing announces."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def is_idle(client: EngineClient) -> bool:
    stats = client.stats()
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_pages == stats.num_pages


async def read(stream: GenerationStream) -> list[RequestOutput]:
    return [output async for output in stream]


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


def test_prompt_tokens_of_aborted_requests_wait_no_more() -> None:
    gate = Gate()
    with engine(make_limits(seqs=1), EngineConfig(max_num_queued_tokens=4), gate) as client:
        first = client.submit_with_callback(PROMPT, SamplingParams(), lambda output: None)
        gone = Collected()
        second = client.submit_with_callback((5,), SamplingParams(), gone)
        client.abort(second)
        client.abort(first)
        gate.opened.set()
        assert gone.all()[-1].finish_reason == "abort"
        again = Collected()
        client.submit_with_callback((5,) * 4, SamplingParams(max_tokens=2, ignore_eos=True), again)
        assert len(again.tokens()) == 2


def test_an_aborted_stream_ends_and_frees_everything() -> None:
    gate = Gate(free_steps=2)

    async def ask(client: EngineClient) -> list[RequestOutput]:
        stream = client.submit(PROMPT, SamplingParams(ignore_eos=True, n=2, seed=3))
        outputs = [await anext(stream)]
        stream.abort(0)
        stream.abort()
        gate.opened.set()
        return outputs + await read(stream)

    with engine(make_limits(max_len=200), gate=gate) as client:
        outputs = asyncio.run(asyncio.wait_for(ask(client), TIMEOUT))
        until(lambda: is_idle(client))
        assert client.stats().finished == {"abort": 2}
    for index in range(2):
        mine = [output for output in outputs if output.index == index]
        assert mine[-1].finish_reason == "abort"
        tokens = [token for output in mine for token in output.token_ids]
        assert tokens == solo_tokens(PROMPT, choice_seed(3, index), 3)[: len(tokens)]  # no step is taken in after it


def test_a_closed_stream_ends_its_request() -> None:
    gate = Gate(free_steps=2)

    async def ask(client: EngineClient) -> None:
        stream = client.submit(PROMPT, SamplingParams(ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        gate.opened.set()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    with engine(make_limits(max_len=200), gate=gate) as client:
        asyncio.run(ask(client))
        until(lambda: is_idle(client))
        assert client.stats().finished == {"abort": 1}


def test_requests_of_a_closed_event_loop_are_ended() -> None:
    gate = Gate()

    async def ask_and_leave(client: EngineClient) -> None:
        client.submit(PROMPT, SamplingParams(ignore_eos=True))

    with engine(make_limits(max_len=200), gate=gate) as client:
        asyncio.run(ask_and_leave(client))
        gate.opened.set()
        until(lambda: client.stats().num_steps > 0 and is_idle(client))
        assert client.stats().finished == {"abort": 1}
        received = Collected()
        client.submit_with_callback(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True), received)
        assert len(received.tokens()) == 2


def test_a_callback_that_raises_ends_its_own_request_only(caplog: pytest.LogCaptureFixture) -> None:
    def broken(output: RequestOutput) -> None:
        raise OSError("the pipe is broken")

    with engine(make_limits(max_len=200)) as client:
        received = Collected()
        client.submit_with_callback(PROMPT, SamplingParams(ignore_eos=True), broken)
        client.submit_with_callback(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True), received)
        assert len(received.tokens()) == 9
        until(lambda: is_idle(client))
        assert client.failure is None
        assert client.stats().finished == {"abort": 1, "length": 1}
    assert "the pipe is broken" in caplog.text


def test_a_failed_step_fails_every_request_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    error = RuntimeError("the device is gone")
    gate = Gate(error=error)
    failures: list[BaseException | None] = []
    with engine(make_limits(seqs=2), gate=gate) as client:
        running, waiting = Collected(), Collected()
        client.submit_with_callback(PROMPT, SamplingParams(n=2), running)
        client.submit_with_callback(PROMPT, SamplingParams(), waiting)
        client.submit_with_callback(PROMPT, SamplingParams(), lambda output: failures.append(client.failure))
        gate.opened.set()
        for outputs in (running.all(choices=2), waiting.all()):
            assert {output.finish_reason for output in outputs} == {"error"}
            assert all(output.error and not output.token_ids for output in outputs)
        until(lambda: bool(failures))
        assert client.failure is error
        assert failures == [error]  # known before any client hears of it
        assert not client.is_ready
        with pytest.raises(EngineStoppedError):
            client.submit_with_callback(PROMPT, SamplingParams(), lambda output: None)
    assert "the device is gone" in caplog.text


def test_a_request_that_comes_as_the_thread_ends_is_answered() -> None:
    """It passed the check of readiness, but its command comes after the last look at the queue."""
    with engine() as client:
        client._loop.stop()
        received = Collected()
        client.submit_with_callback(PROMPT, SamplingParams(n=2), received)
        assert [output.finish_reason for output in received.all(choices=2)] == ["error", "error"]


def test_shutdown_answers_those_that_run_and_those_that_wait() -> None:
    gate = Gate()
    with engine(make_limits(seqs=1), gate=gate) as client:
        received = [Collected() for _ in range(3)]
        for one in received:
            client.submit_with_callback(PROMPT, SamplingParams(), one)
        until(lambda: client.stats().num_running == 1)
        gate.opened.set()
        client.shutdown()
        for one in received:
            assert one.all()[-1].finish_reason in ("error", "stop", "length")
        assert received[-1].outputs.empty()
        assert client.failure is None
        with pytest.raises(EngineStoppedError):
            client.submit_with_callback(PROMPT, SamplingParams(), lambda output: None)
        client.shutdown()  # once more does nothing


def test_draining_finishes_what_runs_and_takes_no_more() -> None:
    gate = Gate()
    with engine(gate=gate) as client:
        received = Collected()
        client.submit_with_callback(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True), received)
        client.start_draining()
        assert not client.is_ready
        with pytest.raises(EngineStoppedError):
            client.submit_with_callback(PROMPT, SamplingParams(), lambda output: None)
        assert not asyncio.run(client.wait_drained(timeout=0.01))
        gate.opened.set()
        assert asyncio.run(client.wait_drained(timeout=TIMEOUT))
        assert len(received.tokens()) == 4


def test_draining_finishes_what_waits_too() -> None:
    gate = Gate()
    with engine(make_limits(seqs=1), gate=gate) as client:
        received = [Collected() for _ in range(3)]
        for one in received:
            client.submit_with_callback(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True), one)
        until(lambda: client.stats().num_waiting == 2)
        client.start_draining()
        gate.opened.set()
        assert asyncio.run(client.wait_drained(timeout=TIMEOUT))
        assert [len(one.tokens()) for one in received] == [4] * 3


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


def test_calls_into_a_stopped_engine_fail() -> None:
    with engine() as client:
        client.shutdown()
        with pytest.raises(EngineStoppedError, match="has stopped"):
            client.flush_prefix_cache().result(TIMEOUT)
