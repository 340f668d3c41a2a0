"""How requests end before their answer does: aborts, failures, draining, shutting down."""

from __future__ import annotations

import asyncio

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.client import EngineClient, choice_seed
from jaxserve.engine.request import EngineStoppedError, RequestOutput
from jaxserve.sampling_params import SamplingParams
from tests.engine.client_harness import (
    PROMPT,
    TIMEOUT,
    Collected,
    Gate,
    engine,
    is_idle,
    read,
    until,
)
from tests.engine.fake_device import solo_tokens
from tests.engine.scheduler_harness import make_limits


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


def test_calls_into_a_stopped_engine_fail() -> None:
    with engine() as client:
        client.shutdown()
        with pytest.raises(EngineStoppedError, match="has stopped"):
            client.flush_prefix_cache().result(TIMEOUT)
