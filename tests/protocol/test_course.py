"""Times of a prompt's course come from the engine's stamps, whenever they are read."""

from __future__ import annotations

import time

import pytest

from jaxserve.engine.request import RequestOutput
from jaxserve.protocol.course import CourseTimer
from jaxserve.protocol.observer import Outcome, RequestCourse


class Recorder:
    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.first: list[float] = []
        self.next: list[tuple[float, int]] = []
        self.courses: list[RequestCourse] = []

    def first_token(self, since_arrival: float) -> None:
        self.first.append(since_arrival)

    def next_tokens(self, since_previous: float, count: int) -> None:
        self.next.append((since_previous, count))

    def finished(self, course: RequestCourse) -> None:
        self.courses.append(course)


def run(outputs: list[tuple[int, tuple[int, ...], float]], outcomes: list[Outcome]) -> Recorder:
    """Outputs as (choice, tokens, seconds since arrival), scheduled 10 s after arrival."""
    start = time.monotonic()
    recorder = Recorder(arrival=start)
    timer = CourseTimer(recorder)
    for index, tokens, at in outputs:
        timer.take(RequestOutput("request-0", index, tokens, time=start + at, scheduled_time=start + 10))
    timer.finish(outcomes, prompt_tokens=3, completion_tokens=4, cached_tokens=1)
    return recorder


def test_every_time_is_the_engine_s() -> None:
    recorder = run([(0, (1,), 15), (1, (1,), 16), (0, (2, 3), 19), (1, (), 30)], ["stop", "length"])
    assert recorder.first == [pytest.approx(15, abs=0.1)]
    assert recorder.next == [(pytest.approx(4), 2)]
    course = recorder.courses[0]
    assert course.queued == pytest.approx(10, abs=0.1)
    assert course.prefill == pytest.approx(5)
    assert course.decode == pytest.approx(4)
    assert course.total == pytest.approx(19, abs=0.1)
    assert (course.prompt_tokens, course.completion_tokens, course.cached_tokens) == (3, 4, 1)


def test_an_aborted_request_ends_when_it_is_aborted() -> None:
    course = run([(0, (1,), 15)], ["abort"]).courses[0]
    assert course.total < 5
    assert course.outcomes == ("abort",)


def test_a_request_without_tokens_has_no_times_of_running() -> None:
    course = run([], ["error"]).courses[0]
    assert course.queued is course.prefill is course.decode is None


def test_times_start_when_the_request_had_been_received_not_when_it_was_queued() -> None:
    recorder = Recorder(arrival=time.monotonic() - 100)
    timer = CourseTimer(recorder)
    now = time.monotonic()
    timer.take(RequestOutput("request-0", 0, (1,), time=now + 2, scheduled_time=now + 1))
    timer.finish(["stop"], prompt_tokens=1, completion_tokens=1, cached_tokens=0)
    assert recorder.first == [pytest.approx(102, abs=0.5)]
    assert recorder.courses[0].queued == pytest.approx(101, abs=0.5)
    assert recorder.courses[0].total == pytest.approx(102, abs=0.5)
