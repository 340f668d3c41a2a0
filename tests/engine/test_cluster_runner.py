"""Several hosts over fake devices: they run the same steps, and those that go on tell of one that is lost."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing import Pipe

import numpy as np
import pytest

from jaxserve.engine.cluster import ClusterError, Follower, Leader
from jaxserve.engine.cluster_runner import LeadingRunner, follow
from jaxserve.engine.request import Request
from jaxserve.engine.schedule import PrefillChunk, SampledTokens, ScheduledBatch
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.step_wire import Constrained
from jaxserve.sampling_params import SamplingParams
from tests.engine.fake_device import FakeRunner
from tests.engine.scheduler_harness import Harness, make_limits

LIMITS = make_limits(page_size=4, pages=20, tokens=12)
TIMEOUT = 30.0


class Host(FakeRunner):
    """A follower's runner, which keeps what it fetches."""

    def __init__(self, before_fetch: Callable[[int], None] = lambda step: None) -> None:
        super().__init__(LIMITS, before_fetch)
        self.fetched: list[SampledTokens] = []

    def fetch(self, pending: object) -> SampledTokens:
        tokens = super().fetch(pending)  # type: ignore[arg-type]
        self.fetched.append(tokens)
        return tokens


class HostThread(threading.Thread):
    """Follows, and keeps how that ended."""

    def __init__(self, runner: Host, link: Follower) -> None:
        super().__init__(daemon=True)
        self.runner, self.link = runner, link
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            follow(self.runner, self.link)
        except Exception as error:
            self.error = error

    def ended(self) -> Exception | None:
        self.join(TIMEOUT)
        assert not self.is_alive()
        return self.error


@contextmanager
def cluster(*followers: Host) -> Iterator[tuple[Leader, list[HostThread]]]:
    pipes = [Pipe() for _ in followers]
    links = [Follower(rank, there) for rank, (_, there) in enumerate(pipes, start=1)]
    threads = [HostThread(runner, link) for runner, link in zip(followers, links, strict=True)]
    for thread in threads:
        thread.start()
    leader = Leader([here for here, _ in pipes])
    try:
        yield leader, threads
    finally:
        leader.close()
        for thread in threads:
            thread.join(TIMEOUT)


def test_every_host_runs_the_same_steps() -> None:
    own, *hosts = Host(), Host(), Host()
    with cluster(*hosts) as (leader, threads):
        harness = Harness(LIMITS, host_pages=8)
        harness.runner = LeadingRunner(own, leader)  # type: ignore[assignment]
        for name in range(12):
            harness.add([100 * (name % 3) + position for position in range(5 + name)], max_tokens=9, seed=name)
            for _ in range(name % 4):
                harness.step()
        harness.run()
        harness.check_done()
        harness.runner.close()
        assert [thread.ended() for thread in threads] == [None, None]
    assert sum(len(batch.copies) for batch in own.launched) > 10
    for host in hosts:
        assert host.is_closed
        assert len(host.fetched) == len(own.fetched) == len(own.launched)
        for there, here in zip(host.fetched, own.fetched, strict=True):
            assert np.array_equal(there.token_ids, here.token_ids)
            assert np.array_equal(there.counts, here.counts)


def test_masks_reach_every_host() -> None:
    own, host = Host(), Host()
    constrained = Sequence(
        Request("request", (1, 2, 3), SamplingParams(), arrival_time=0.0),
        0,
        0,
        frozenset(),
        4,
        Constrained(),
        [1, 2, 3],
    )
    batch = ScheduledBatch((), (PrefillChunk(constrained, 0, 0, (1, 2, 3), (0,), samples=True, output_index=0),))
    with cluster(host) as (leader, (thread,)):
        runner = LeadingRunner(own, leader)
        for allowed in (3, 17):
            masks = np.array([[1 << allowed]], np.int32)
            assert runner.fetch(runner.launch_sample(runner.launch_forward(batch), masks)).token_ids.tolist() == [
                [allowed]
            ]
        runner.close()
        assert thread.ended() is None
    assert [tokens.token_ids.tolist() for tokens in host.fetched] == [[[3]], [[17]]]


def assert_told(told: Future[ClusterError], expected: str) -> None:
    assert str(told.result(TIMEOUT)).startswith(expected)


def test_a_host_that_fails_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def fail(step: int) -> None:
        raise RuntimeError(f"the device of step {step} is gone")

    told: Future[ClusterError] = Future()
    expected = "host 1 of 2 is gone (RuntimeError: the device of step 0 is gone)"
    with cluster(Host(fail)) as (leader, (thread,)):
        leader.on_loss(told.set_result)
        harness = Harness(LIMITS)
        own = Host(lambda step: assert_told(told, expected) if step == 2 else None)
        harness.runner = LeadingRunner(own, leader)  # type: ignore[assignment]
        harness.add(5, max_tokens=8)
        with pytest.raises(ClusterError, match=re.escape(expected)):
            harness.run()
        assert told.done()
        assert "step 0" in str(thread.ended())
    assert "was gone before the end" in caplog.text


def test_hosts_end_when_the_first_one_is_lost() -> None:
    here, there = Pipe()
    thread = HostThread(Host(), Follower(1, there))
    thread.start()
    here.close()
    assert isinstance(thread.ended(), ClusterError)
    assert "host 0 is gone" in str(thread.error)
    assert thread.runner.is_closed
