"""When requests are sent."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.bench.load import LoadRun, LoadTimeoutError, num_measured
from jaxserve.bench.records import Load, RunResult, Summary, format_table, summarize
from jaxserve.bench.run import BenchOptions, run_loads, wait_until_idle
from jaxserve.bench.workload import Workload, load_workload
from jaxserve.bench.workload_files import Task
from jaxserve.engine.draft_stats import SpeculativeStats
from tests.bench.fake_target import FakeTarget

FIXED = load_workload("fixed:3/5")


def in_thread(run: LoadRun) -> tuple[threading.Thread, list[RunResult]]:
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(run.run(10.0)))
    thread.start()
    return thread, results


def test_concurrency_is_held_to_the_end_and_the_rest_is_ended_unmeasured() -> None:
    target = FakeTarget()
    thread, results = in_thread(LoadRun(target, FIXED, Load("concurrency", 3), 4))
    target.wait_started(3)
    for ended, index in enumerate((1, 0, 2, 3)):
        assert len(target.live) == 3
        target.end(index)
        if ended < 3:
            target.wait_started(4 + ended)
    thread.join(10)
    assert [record.index for record in results[0].records] == [0, 1, 2, 3]
    assert target.most_live == 3
    assert target.stopped
    assert len(target.started) == 6  # the last measured one that ended had no successor


def test_answers_are_counted_and_the_host_gap_is_of_this_run_alone() -> None:
    target = FakeTarget(at_once=True)
    target.started = [(0, Task(1, 1), 0.0)] * 100  # what was before
    result = LoadRun(target, FIXED, Load("rate", 1000.0), 8).run(10.0)
    assert result.output_tokens == 80
    assert result.host_gap == pytest.approx(0.25)


def test_drafts_are_those_of_this_run_and_summed_over_the_rounds() -> None:
    target = FakeTarget(at_once=True)
    target.started = [(0, Task(1, 1), 0.0)] * 100  # what was before
    load = Load("rate", 1000.0)
    runs = [LoadRun(target, FIXED, load, 8).run(10.0) for _ in range(2)]
    assert runs[1].speculation == SpeculativeStats("ngram", 8, (8, 8), (8, 0))
    summary = summarize(load, runs)
    assert summary.speculation == SpeculativeStats("ngram", 16, (16, 16), (16, 0))
    assert summary.to_json()["draft_acceptance"] == 0.5
    assert Summary.from_json(json.loads(json.dumps(summary.to_json()))) == summary
    line = "at 1000/s: drafts (ngram): 16 of 32 tokens kept (50%); kept by position: 1: 100% of 16, 2: 0% of 16"
    assert format_table([summary]).splitlines()[-1] == line


def test_a_rate_sends_at_the_same_random_times_for_the_same_seed() -> None:
    due = []
    for seed in (0, 0, 1):
        target = FakeTarget(at_once=True)
        records = LoadRun(target, FIXED, Load("rate", 400.0), 20, seed=seed).run(10.0).records
        moments = np.array([record.due for record in records])
        due.append(moments - moments[0])
    assert due[0] == pytest.approx(due[1])
    assert due[0] != pytest.approx(due[2])
    assert len(target.started) == 20


def test_the_mean_time_between_requests_is_that_of_the_rate() -> None:
    run = LoadRun(FakeTarget(), FIXED, Load("rate", 50.0), 1)
    arrivals = run._arrivals()
    moments = [next(arrivals) for _ in range(4000)]
    assert np.diff(moments).mean() == pytest.approx(1 / 50, rel=0.05)
    assert np.diff(moments).std() == pytest.approx(1 / 50, rel=0.1)  # as exponential times have it


def test_no_request_is_sent_before_its_time() -> None:
    target = FakeTarget(at_once=True)
    records = LoadRun(target, FIXED, Load("rate", 200.0), 10).run(10.0).records
    for record, (index, _, sent) in zip(records, sorted(target.started), strict=True):
        assert record.index == index
        assert record.due is not None and sent >= record.due - 1e-4


def test_a_trace_is_sent_at_its_own_times_only_faster() -> None:
    workload = Workload("trace", tuple(Task(1, 1, arrival=arrival) for arrival in (0.0, 2.0, 3.0)))
    records = LoadRun(FakeTarget(at_once=True), workload, Load("trace", 50.0), 3).run(10.0).records
    due = [record.due or 0.0 for record in records]
    assert np.diff(due) == pytest.approx([0.04, 0.02], abs=1e-6)


def test_a_run_that_takes_too_long_says_how_far_it_came() -> None:
    target = FakeTarget()
    message = (
        r"0 of 3 requests ended within 0.01 s with 2 requests in flight: raise --timeout, or measure fewer \(--num-req"
    )
    with pytest.raises(LoadTimeoutError, match=message):
        LoadRun(target, FIXED, Load("concurrency", 2), 3).run(0.01)
    assert target.stopped
    with pytest.raises(LoadTimeoutError, match=r"^0 of 1 request ended within 0.01 s with 1 request in flight: raise"):
        LoadRun(FakeTarget(), FIXED, Load("concurrency", 1), 1).run(0.01)


def test_what_precedes_the_loads_is_told_apart_from_them() -> None:
    options = BenchOptions(FIXED, (Load("concurrency", 8),), timeout=0.01)
    message = r"the short run before the first load: 0 of 2 requests ended within 0.01 s .*: raise --timeout$"
    with pytest.raises(LoadTimeoutError, match=message):
        run_loads(FakeTarget(), options, judge=lambda summary, runs: summary, on_summary=lambda summary: None)


def test_what_the_target_raises_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="takes no new requests"):
        LoadRun(FakeTarget(at_once=True, refuse_from=3), FIXED, Load("concurrency", 1), 8).run(10.0)


def test_how_many_requests_are_measured() -> None:
    assert num_measured(Load("concurrency", 1), FIXED, None) == 8
    assert num_measured(Load("concurrency", 64), FIXED, None) == 192
    assert num_measured(Load("rate", 4), FIXED, None) == 120
    assert num_measured(Load("rate", 4), FIXED, 5) == 5
    trace = replace(FIXED, tasks=(Task(1, 1, arrival=0.0),) * 7)
    assert num_measured(Load("trace", 1), trace, None) == 7


def test_a_run_begins_when_nothing_is_left_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    target = FakeTarget()
    for index in range(2):
        target.start(index, Task(1, 1), lambda record: None)
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(len(target.live))
        if len(looks) > 1:
            target.end(len(looks) - 2)

    monkeypatch.setattr("jaxserve.bench.run.time.sleep", sleep)
    wait_until_idle(target)
    assert looks == [2, 2, 1] and not target.live


def test_an_engine_that_never_comes_to_rest_is_measured_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    target = FakeTarget()
    target.start(0, Task(1, 1), lambda record: None)
    wait_until_idle(target, timeout=0.0)
    assert "still has work" in caplog.text


def test_an_endpoint_that_tells_nothing_gets_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    target, slept = FakeTarget(), []
    monkeypatch.setattr(target, "snapshot", lambda seconds: None)
    monkeypatch.setattr("jaxserve.bench.run.time.sleep", slept.append)
    wait_until_idle(target)
    assert len(slept) == 1 and slept[0] > 0
