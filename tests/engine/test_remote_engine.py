"""An engine in a process of its own does what one in this process does, and its end is noticed."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.client import choice_seed
from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.engine.engine_process import ProcessSetup
from jaxserve.engine.host_pages import OffloadStats
from jaxserve.engine.process_messages import ConstraintSource, Snapshot, decode, encode_outputs, portable
from jaxserve.engine.remote_engine import EngineProcessError, RemoteEngine
from jaxserve.engine.request import EngineStoppedError, QueueFullError, RequestError, RequestOutput, TokenLogprobs
from jaxserve.progress import NoProgress
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.errors import GrammarError
from tests.engine.client_harness import PROMPT, TIMEOUT, Collected, read, until
from tests.engine.fake_device import VOCAB_SIZE, solo_tokens
from tests.engine.hosted_fake import die_at_start, log_to_file, refuse_to_start, start_fake

SAMPLING = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)


def quiet() -> None:
    """Logs nothing that is not logged anyway."""


SETUP = ProcessSetup(quiet, NoProgress)


@contextmanager
def remote_engine(folder: Path, config: EngineConfig | None = None) -> Iterator[RemoteEngine]:
    setup = ProcessSetup(partial(log_to_file, folder / "log"), NoProgress)
    engine = RemoteEngine(partial(start_fake, folder, config or EngineConfig()), setup)
    try:
        yield engine
    finally:
        (folder / "closed").unlink(missing_ok=True)
        engine.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("remote")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[RemoteEngine]:
    config = EngineConfig(max_num_queued_requests=3, max_num_queued_tokens=40)
    with remote_engine(folder, config) as engine:
        yield engine


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """While no step is fetched."""
    (folder / "closed").touch()
    try:
        yield
    finally:
        (folder / "closed").unlink(missing_ok=True)


def ask(engine: RemoteEngine, sampling: SamplingParams = SAMPLING, **options: object) -> list[RequestOutput]:
    received = Collected()
    engine.submit_with_callback(PROMPT, sampling, received, **options)  # type: ignore[arg-type]
    return received.all(sampling.n)


def refusal(call: Callable[[], object]) -> Exception:
    with pytest.raises((RequestError, QueueFullError, EngineStoppedError)) as raised:
        call()
    return raised.value


def test_a_stream_brings_every_choice_and_its_numbers(engine: RemoteEngine) -> None:
    before = engine.stats()

    async def streamed() -> list[RequestOutput]:
        stream = engine.submit(PROMPT, dataclasses.replace(SAMPLING, n=3))
        return await asyncio.wait_for(read(stream), TIMEOUT)

    outputs = asyncio.run(streamed())
    for index in range(3):
        tokens = [token for output in outputs if output.index == index for token in output.token_ids]
        assert tokens == solo_tokens(PROMPT, choice_seed(3, index), 6)
    assert all(0 < output.scheduled_time <= output.time <= time.monotonic() for output in outputs)
    stats = engine.stats()
    assert stats.generation_tokens - before.generation_tokens == 18, "an answer that is there counts"
    assert stats.finished["length"] - before.finished.get("length", 0) == 3
    assert engine.num_live == 0
    until(lambda: engine.stats().num_running == 0 and engine.stats().num_steps > before.num_steps)


def test_numbers_come_while_an_answer_runs_and_age_without_it(engine: RemoteEngine, folder: Path) -> None:
    received = Collected()
    with closed(folder):
        engine.submit_with_callback(PROMPT, SAMPLING, received)
        until(lambda: engine.stats().num_running == 1)
    received.all()
    first = engine.stats().uptime_s
    until(lambda: engine.stats().uptime_s > first)


def test_what_is_wrong_with_a_request_is_raised_at_once(engine: RemoteEngine) -> None:
    error = refusal(lambda: ask(engine, priority=1))
    assert isinstance(error, RequestError)
    assert error.parameter == "priority"
    error = refusal(lambda: engine.submit_with_callback((1,) * 64, SAMPLING, lambda output: None))
    assert isinstance(error, RequestError)
    assert error.code == "context_length_exceeded"
    error = refusal(lambda: ask(engine, SamplingParams(stop_token_ids=(VOCAB_SIZE,))))
    assert isinstance(error, RequestError)
    assert engine.num_live == 0


def test_a_full_queue_refuses_and_takes_again(engine: RemoteEngine, folder: Path) -> None:
    received = [Collected() for _ in range(5)]
    with closed(folder):
        for one in received:
            engine.submit_with_callback(PROMPT, SAMPLING, one)
        assert "5 sequences run or wait" in str(refusal(lambda: ask(engine)))
    assert [one.tokens() for one in received] == [solo_tokens(PROMPT, 3, 6)] * 5
    with closed(folder):
        first = Collected()
        engine.submit_with_callback((5,) * 39, SAMPLING, first)
        assert "39 prompt tokens wait" in str(refusal(lambda: ask(engine)))
    first.all()
    assert len(ask(engine)) == 6


def test_an_abort_ends_a_request_or_a_choice(engine: RemoteEngine, folder: Path) -> None:
    for index, reasons in ((1, ["length", "abort"]), (None, ["abort", "abort"])):
        received = Collected()
        with closed(folder):
            request_id = engine.submit_with_callback(PROMPT, dataclasses.replace(SAMPLING, n=2), received)
            until(lambda: engine.stats().num_running == 2)
            engine.abort(request_id, index)
            engine.abort("no-such-request")
            engine.compile_constraint(((1,),)).result(TIMEOUT)  # behind them: they have come when a step goes on
        ended = {output.index: output.finish_reason for output in received.all(2) if output.finish_reason}
        assert [ended[0], ended[1]] == reasons
    until(lambda: engine.stats().num_free_pages == engine.stats().num_pages)


def test_an_abort_ends_a_request_whose_constraint_is_there_just_now(engine: RemoteEngine, folder: Path) -> None:
    received = Collected()
    with closed(folder):
        for name in ("compiling", "held"):
            (folder / name).touch()
        sampling = SamplingParams(constraint=ConstraintSource(((), (3, 4), (5,))))
        request_id = engine.submit_with_callback(PROMPT, sampling, received)
        engine.compile_constraint(((1,),)).result(TIMEOUT)  # behind it: it waits to be compiled
        (folder / "compiling").unlink()
        until((folder / "beginning").exists)
        engine.abort(request_id)
        (folder / "held").unlink()
        engine.compile_constraint(((1,),)).result(TIMEOUT)  # behind it
    assert received.all()[-1].finish_reason == "abort"


def test_a_constraint_that_cannot_begin_fails_its_request_alone(engine: RemoteEngine, folder: Path) -> None:
    (folder / "broken").touch()
    (output,) = ask(engine, SamplingParams(constraint=ConstraintSource(((), (3,)))))
    (folder / "broken").unlink()
    assert (output.finish_reason, output.error) == ("error", "a rule that cannot begin")
    assert engine.failure is None and engine.num_live == 0


def test_prompts_are_pinned_and_the_cache_is_flushed(engine: RemoteEngine) -> None:
    prompt = tuple(range(12))
    engine.pin_prompt(prompt)
    received = Collected()
    engine.submit_with_callback((*prompt, 3), SAMPLING, received)
    assert received.all()[0].num_cached_tokens == 12
    assert engine.flush_prefix_cache().result(TIMEOUT) > 0
    assert isinstance(refusal(lambda: engine.pin_prompt((1,) * 100)), RequestError)


def test_a_call_that_nobody_waits_for_any_more_does_no_harm(engine: RemoteEngine) -> None:
    for call in (engine.flush_prefix_cache(), engine.compile_constraint(((1,),))):
        call.cancel()  # as asyncio does it when its waiter is cancelled
    assert [token for output in ask(engine) for token in output.token_ids] == solo_tokens(PROMPT, 3, 6)
    assert engine.failure is None


def test_a_constraint_that_nobody_waits_for_any_more_is_dropped(engine: RemoteEngine, folder: Path) -> None:
    (folder / "compiling").touch()
    source = ((), (1,))
    asked = engine.compile_constraint(source)
    assert asked.cancel()
    until((folder / "dropped").exists)
    engine.flush_prefix_cache().result(TIMEOUT)  # behind it
    assert (folder / "dropped").read_text() == repr(source)
    (folder / "compiling").unlink()
    assert engine.compile_constraint(((1,),)).result(TIMEOUT) and asked.cancelled()


def test_what_an_aborted_request_waited_for_is_dropped(engine: RemoteEngine, folder: Path) -> None:
    (folder / "dropped").unlink(missing_ok=True)
    (folder / "compiling").touch()
    source, received = ((), (2,)), Collected()
    request_id = engine.submit_with_callback(PROMPT, SamplingParams(constraint=ConstraintSource(source)), received)
    engine.abort(request_id)
    engine.flush_prefix_cache().result(TIMEOUT)  # behind it
    assert received.all()[-1].finish_reason == "abort"
    assert (folder / "dropped").read_text() == repr(source)
    (folder / "compiling").unlink()


def test_constraints_are_compiled_in_the_engine_s_process(engine: RemoteEngine) -> None:
    words = ((3, 4), (5,), (6, 7))
    constraint = engine.compile_constraint(words).result(TIMEOUT)
    tokens = [token for output in ask(engine, SamplingParams(constraint=constraint)) for token in output.token_ids]
    assert all(token in allowed for token, allowed in zip(tokens, words, strict=True))
    with pytest.raises(RequestError, match="no words"):
        engine.compile_constraint(()).result(TIMEOUT)
    (output,) = ask(engine, SamplingParams(constraint=ConstraintSource(())))
    assert (output.finish_reason, output.error, output.is_retryable) == ("error", "no words", False)
    assert engine.num_live == 0


def test_collecting_garbage_does_not_hold_up_steps(engine: RemoteEngine, folder: Path) -> None:
    engine.compile_constraint(((1,),)).result(TIMEOUT)
    assert int((folder / "frozen").read_text()) > 10_000, "what was there before is not looked through again"


def test_signals_of_the_terminal_are_the_parent_s_business(engine: RemoteEngine, folder: Path) -> None:
    os.kill(engine.process_id, signal.SIGINT)
    os.kill(engine.process_id, signal.SIGTERM)
    assert len(ask(engine)) == 6
    assert "started" in (folder / "log").read_text(), "it logs as it was told to"


def test_outputs_and_numbers_cross_whole(engine: RemoteEngine) -> None:
    places = (TokenLogprobs(5, -0.5, ((5, -0.5), (6, -1.25))), TokenLogprobs(7, -2.0, ()))
    outputs = [
        RequestOutput("a", 0, (5, 7), logprobs=places, prompt_logprobs=(None, *places), time=1.5, scheduled_time=1.0),
        RequestOutput("a", 1, (), "error", error="gone", is_retryable=True),
        RequestOutput("b", 0, (9,), "stop", stop_token_id=9, num_cached_tokens=16),
    ]
    one = dataclasses.replace(
        engine.stats(),
        speculative=SpeculativeStats("ngram", 1, (4, 5), (2, 3)),
        kv_offload=OffloadStats(1, 2, 3, 4, 5, 6),
    )
    snapshot = Snapshot(dataclasses.replace(one, replicas=(one, None)), is_ready=True)
    assert decode(encode_outputs(outputs, snapshot)) == (outputs, snapshot)
    assert decode(encode_outputs(outputs, None)) == (outputs, None)


def test_an_engine_that_drains_ends_what_it_has(engine: RemoteEngine, folder: Path) -> None:
    received = Collected()
    with closed(folder):
        engine.submit_with_callback(PROMPT, SAMPLING, received)
        engine.start_draining()
        assert not engine.is_ready
        assert isinstance(refusal(lambda: ask(engine)), EngineStoppedError)
        assert not asyncio.run(engine.wait_drained(0.05))
    assert asyncio.run(engine.wait_drained(TIMEOUT))
    assert len(received.all()) == 6
    engine.shutdown()  # and once more by the fixture
    assert engine.failure is None
    assert_ended(engine.process_id)
    assert isinstance(refusal(lambda: engine.flush_prefix_cache().result()), EngineStoppedError)


def test_a_constraint_that_still_compiles_does_not_hold_up_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "compiling").touch()
    with remote_engine(tmp_path) as engine:
        asked = engine.compile_constraint(((), (1,)))
        until((tmp_path / "began").exists)
        engine.shutdown()
        assert isinstance(refusal(lambda: asked.result(TIMEOUT)), EngineStoppedError)
        assert_ended(engine.process_id)
    assert "was killed" not in caplog.text
    assert (tmp_path / "ended").exists()


def test_a_fault_in_the_engine_s_thread_fails_it(tmp_path: Path) -> None:
    with remote_engine(tmp_path) as engine:
        (tmp_path / "fault").touch()
        (output,) = ask(engine)
        assert (output.finish_reason, output.is_retryable) == ("error", True)
        assert type(engine.failure) is RuntimeError
        assert str(engine.failure) == "the device is gone"
        assert "before_fetch" in "".join(engine.failure.__notes__), "where it was raised is told"
        assert isinstance(refusal(lambda: ask(engine)), EngineStoppedError)
        process = engine.process_id
    assert_ended(process)


def test_a_process_that_is_killed_fails_the_engine(tmp_path: Path) -> None:
    with remote_engine(tmp_path) as engine:
        received = Collected()
        with closed(tmp_path):
            engine.submit_with_callback(PROMPT, dataclasses.replace(SAMPLING, n=2), received)
            until(lambda: engine.stats().num_running == 2)
            asked = engine.flush_prefix_cache()
            os.kill(engine.process_id, signal.SIGKILL)
            outputs = received.all(2)
            assert isinstance(refusal(lambda: asked.result(TIMEOUT)), EngineStoppedError)
        assert {(output.finish_reason, output.is_retryable) for output in outputs} == {("error", True)}
        assert isinstance(engine.failure, EngineProcessError)
        assert "signal 9 (SIGKILL)" in str(engine.failure)
        assert engine.num_live == 0
        assert isinstance(refusal(lambda: ask(engine)), EngineStoppedError)


def test_what_is_wrong_at_the_start_is_raised_here() -> None:
    with pytest.raises(RequestError, match="no such model") as raised:
        RemoteEngine(refuse_to_start, SETUP)
    assert raised.value.parameter == "model"
    with pytest.raises(EngineProcessError, match=r"signal 9 \(SIGKILL\) while it loaded"):
        RemoteEngine(die_at_start, SETUP)


def assert_ended(process: int) -> None:
    """It ended and was reaped."""
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_an_error_that_cannot_cross_says_the_same() -> None:
    error = portable(GrammarError("it is wrong", "properties.age"))
    assert isinstance(error, GrammarError)

    class LocalError(Exception):
        pass

    assert repr(portable(LocalError("here alone"))) == repr(RuntimeError("LocalError: here alone"))
