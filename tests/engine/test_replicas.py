"""Several engines as one, over fake devices: who gets what, and what becomes of the others when one fails."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine import replicas
from jaxserve.engine.client import EngineClient, Replica
from jaxserve.engine.replicas import ReplicatedEngine
from jaxserve.engine.request import EngineStoppedError, QueueFullError, RequestError, RequestOutput
from jaxserve.engine.scheduler import Scheduler
from jaxserve.sampling_params import SamplingParams
from tests.engine.client_harness import MODEL_CONFIG, PROMPT, TIMEOUT, Collected, Gate, until
from tests.engine.fake_device import FakeRunner, solo_tokens
from tests.engine.scheduler_harness import make_limits

LIMITS = make_limits(seqs=4, page_size=4)
LONG = tuple(range(2, 22))  # five pages
SHORT = SamplingParams(max_tokens=4, seed=5, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)


@dataclass
class Builder:
    """Makes replicas over fake devices, and remembers them.

    Attributes:
        gates: one for each replica that was built, which hold up or fail its steps.
        refusals: errors that building ends with, from the next time on.
    """

    opened: bool = True
    gates: list[Gate] = field(default_factory=list)
    clients: list[EngineClient] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    refusals: list[Exception] = field(default_factory=list)

    def __call__(self, config: EngineConfig, replica: Replica) -> EngineClient:
        if self.refusals:
            raise self.refusals.pop(0)
        gate = Gate()
        if self.opened:
            gate.opened.set()
        client = EngineClient(
            config=config,
            model_config=MODEL_CONFIG,
            scheduler=Scheduler(LIMITS),
            runner=FakeRunner(LIMITS, gate),
            device_kind="fake",
            replica=replica,
        )
        client.start()
        self.gates.append(gate)
        self.clients.append(client)
        self.indices.append(replica.index)
        return client

    def kill(self, number: int, error: Exception | None = None) -> None:
        """Makes a replica's next step fail."""
        self.gates[number].error = error or RuntimeError("the device is lost")
        self.gates[number].opened.set()


@contextmanager
def replicated(builder: Builder, count: int = 2, **settings: int) -> Iterator[ReplicatedEngine]:
    before = set(threading.enumerate())
    engine = ReplicatedEngine(EngineConfig(seed=0, data_parallel_size=count, **settings), builder)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        for gate in builder.gates:
            gate.opened.set()
        engine.shutdown()
        assert not set(threading.enumerate()) - before


def start(engine: ReplicatedEngine, prompt: tuple[int, ...] = PROMPT, sampling: SamplingParams = ENDLESS) -> Collected:
    collected = Collected()
    engine.submit_with_callback(prompt, sampling, collected)
    return collected


def lives(builder: Builder) -> list[int]:
    return [client.num_live for client in builder.clients]


def test_equal_requests_go_where_least_is_to_do() -> None:
    builder = Builder(opened=False)
    with replicated(builder, 3) as engine:
        for _ in range(7):
            start(engine)
        assert sorted(lives(builder)) == [2, 2, 3]
        assert engine.stats().num_running + engine.stats().num_waiting <= 7


def test_a_prompt_goes_to_the_replica_that_knows_most_of_it() -> None:
    builder = Builder()
    with replicated(builder, 3) as engine:
        builder.gates[0].opened.clear()
        held = start(engine)  # by the first replica, so that the next goes to another
        assert start(engine, LONG, SHORT).tokens() == solo_tokens(LONG, 5, 4)
        assert builder.clients[1].stats().cached_prompt_tokens == 0
        until(lambda: builder.clients[1].num_live == 0)
        builder.gates[0].opened.set()
        held.all()
        until(lambda: lives(builder) == [0, 0, 0])
        # All have as little to do, and the first would be next.
        assert start(engine, (*LONG, 23, 24), SHORT).tokens() == solo_tokens((*LONG, 23, 24), 5, 4)
        assert builder.clients[1].stats().cached_prompt_tokens == len(LONG)
        assert [client.stats().prompt_tokens for client in builder.clients] == [len(PROMPT), 2 * len(LONG) + 2, 0]
        # Another salt shares nothing.
        salted = Collected()
        engine.submit_with_callback(LONG, SHORT, salted, cache_salt="mine")
        salted.all()
        assert builder.clients[1].stats().prompt_tokens == 2 * len(LONG) + 2


def test_a_prompt_that_all_share_does_not_bring_all_to_one_replica() -> None:
    builder = Builder()
    with replicated(builder) as engine:
        start(engine, LONG, SHORT).all()
        until(lambda: lives(builder) == [0, 0])
        for gate in builder.gates:
            gate.opened.clear()
        for _ in range(16):
            start(engine, LONG)
        assert min(lives(builder)) >= 4
        assert sum(lives(builder)) == 16


def test_a_full_replica_is_passed_over_and_only_all_of_them_refuse() -> None:
    builder = Builder(opened=False)
    with replicated(builder, max_num_queued_requests=1) as engine:
        for _ in range(2 * (LIMITS.max_num_seqs + 1)):
            start(engine)
        with pytest.raises(QueueFullError, match="sequences run or wait"):
            start(engine)
        with pytest.raises(RequestError, match="outside the vocabulary"):
            start(engine, (99,))


def test_a_replica_that_fails_is_built_anew_while_the_others_go_on() -> None:
    builder = Builder(opened=False)
    with replicated(builder) as engine:
        answers = [start(engine) for _ in range(4)]
        on_first = [answer for index, answer in enumerate(answers) if index % 2 == 0]
        builder.kill(0)
        for answer in on_first:
            last = answer.all()[-1]
            assert (last.finish_reason, last.is_retryable) == ("error", True)
            assert last.error == "the engine failed"
        assert start(engine).outputs is not None  # taken by the other one, or by the new one
        until(lambda: len(builder.clients) == 3 and all(engine.stats().replicas))
        assert builder.indices == [0, 1, 0]
        assert engine.failure is None
        assert engine.is_ready
        for gate in builder.gates:
            gate.opened.set()
        for answer in answers:
            if answer not in on_first:
                assert answer.tokens() == solo_tokens(PROMPT, 5, 40)
        until(lambda: engine.stats().num_running == 0)
        assert [start(engine, (9, index), SHORT).tokens() for index in range(8)] == [
            solo_tokens((9, index), 5, 4) for index in range(8)
        ]


def test_streams_and_their_ids_are_told_apart() -> None:
    async def ask(engine: ReplicatedEngine) -> tuple[set[str], list[list[RequestOutput]]]:
        streams = [engine.submit(PROMPT, SHORT) for _ in range(6)]
        return {stream.request_id for stream in streams}, [[output async for output in stream] for stream in streams]

    with replicated(Builder(), 3) as engine:
        ids, outputs = asyncio.run(ask(engine))
    assert len(ids) == 6
    for answer in outputs:
        assert [token for output in answer for token in output.token_ids] == solo_tokens(PROMPT, 5, 4)


def test_replicas_draw_different_seeds_from_the_engines_own() -> None:
    builder = Builder(opened=False)
    unseeded = SamplingParams(max_tokens=8, ignore_eos=True)
    with replicated(builder) as engine:
        answers = [start(engine, sampling=unseeded) for _ in range(2)]
        assert lives(builder) == [1, 1]
        for gate in builder.gates:
            gate.opened.set()
        first, second = (answer.tokens() for answer in answers)
    assert first != second


def test_abort_finds_the_replica() -> None:
    builder = Builder(opened=False)
    with replicated(builder) as engine:
        collected = [Collected(), Collected()]
        ids = [engine.submit_with_callback(PROMPT, ENDLESS, each) for each in collected]
        engine.abort(ids[1])
        for gate in builder.gates:
            gate.opened.set()
        assert collected[1].all()[-1].finish_reason == "abort"
        assert collected[0].all()[-1].finish_reason == "length"


def test_a_replica_that_fails_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "MAX_RESTARTS", 2)
    builder = Builder(opened=False)
    with replicated(builder) as engine:
        for number in (0, 2, 3):
            start(engine, sampling=SHORT)
            builder.kill(number)
            until(lambda number=number: builder.clients[number].failure is not None)
            if number < 3:
                until(lambda number=number: len(builder.clients) == max(3, number + 2) and all(engine.stats().replicas))
        until(lambda: engine.stats().replicas[0] is None)
        assert engine.failure is None
        assert start(engine).outputs is not None
        # The last one fails and cannot be built anew: then the engine has failed.
        broken = RuntimeError("no device is left")
        builder.refusals.append(broken)
        builder.kill(1)
        until(lambda: engine.failure is not None)
        assert engine.failure is broken
        assert not engine.is_ready
        with pytest.raises(EngineStoppedError, match="no replica"):
            start(engine)


def test_a_pinned_prompt_is_kept_everywhere_and_by_replicas_to_come() -> None:
    builder = Builder()
    with replicated(builder) as engine:
        engine.pin_prompt(LONG)
        pages = len(LONG) // LIMITS.page_size
        assert [client.stats().num_cached_pages for client in builder.clients] == [pages, pages]
        builder.kill(0)
        start(engine)
        until(lambda: len(builder.clients) == 3 and builder.clients[2].stats().num_cached_pages >= pages)
        until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
        assert engine.flush_prefix_cache().result(TIMEOUT) >= 2 * pages


def test_draining_waits_for_all_and_reaches_replicas_to_come() -> None:
    builder = Builder(opened=False)
    with replicated(builder) as engine:
        answers = [start(engine, sampling=SHORT) for _ in range(2)]
        engine.start_draining()
        with pytest.raises(EngineStoppedError):
            start(engine)
        assert not asyncio.run(engine.wait_drained(0.05))
        builder.kill(0)
        until(lambda: len(builder.clients) == 3)
        builder.gates[1].opened.set()
        assert asyncio.run(engine.wait_drained(TIMEOUT))
        assert [answer.all()[-1].finish_reason for answer in answers] == ["error", "length"]
        until(lambda: all(engine.stats().replicas))
        assert not engine.is_ready


def test_what_was_built_is_stopped_when_the_rest_cannot_be() -> None:
    builder = Builder()
    late = RuntimeError("too few devices")

    def build(config: EngineConfig, replica: Replica) -> EngineClient:
        if replica.index == 1:
            raise late
        return builder(config, replica)

    with pytest.raises(RuntimeError, match="too few devices"):
        ReplicatedEngine(EngineConfig(data_parallel_size=2), build)
    assert not builder.clients[0].is_ready


def test_numbers_are_summed() -> None:
    builder = Builder()
    with replicated(builder) as engine:
        for index in range(4):
            start(engine, (7, index), SHORT).all()
        until(lambda: engine.stats().num_free_pages == 2 * LIMITS.num_pages)
        stats = engine.stats()
        parts = [part for part in stats.replicas if part is not None]
        assert stats.generation_tokens == sum(part.generation_tokens for part in parts) == 16
        assert stats.finished == {"length": 4}
        assert sum(stats.step_times.counts) == stats.num_steps == sum(part.num_steps for part in parts)
        assert sum(stats.host_times.counts) == stats.num_steps
        assert stats.host_times.total == pytest.approx(stats.host_s)
        assert 0 < stats.last_host_ms <= 1e3 * stats.host_s
        assert engine.busy_times() == (stats.busy_s, stats.device_idle_s)


def test_what_a_failed_replica_had_is_freed_though_it_was_frozen() -> None:
    builder = Builder()
    with replicated(builder) as engine:
        client = weakref.ref(builder.clients.pop())
        gc.collect()
        gc.freeze()
        try:
            builder.kill(1)
            builder.gates[0].opened.clear()
            for _ in range(2):
                start(engine, sampling=SHORT)
            until(lambda: client() is None)
        finally:
            gc.unfreeze()


def test_counts_are_those_of_the_numbers() -> None:
    builder = Builder(opened=False)
    with replicated(builder) as engine:
        for _ in range(2 * LIMITS.max_num_seqs + 3):
            start(engine)
        until(lambda: engine.sequence_counts() == (2 * LIMITS.max_num_seqs, 3))
        stats = engine.stats()
        assert engine.sequence_counts() == (stats.num_running, stats.num_waiting)
