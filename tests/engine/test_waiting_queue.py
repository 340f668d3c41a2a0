"""Whose turn it is under each policy, and that everybody's comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.request import Request
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.waiting_queue import SchedulingOrder, WaitingQueue
from jaxserve.sampling_params import SamplingParams


def sequence(name: str, arrival: float = 0.0, length: int = 1, priority: int = 0) -> Sequence:
    request = Request(name, tuple(range(length)), SamplingParams(), arrival_time=arrival, priority=priority)
    return Sequence(
        request=request,
        index=0,
        seed=0,
        stop_token_ids=frozenset(),
        max_output_tokens=1,
        token_ids=list(request.prompt_token_ids),
    )


def order_of(queue: WaitingQueue) -> str:
    return "".join(waiting.request.request_id for waiting in queue)


def queued(order: SchedulingOrder, *sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue(order)
    for each in sequences:
        queue.add(each)
    return queue


def test_first_come_first_served_looks_at_no_priority() -> None:
    queue = queued(
        SchedulingOrder(),
        sequence("a", 0.0, length=50, priority=9),
        sequence("b", 1.0),
        sequence("c", 1.0, priority=-9),
    )
    assert order_of(queue) == "abc"
    first = queue.first
    queue.remove(first)
    assert order_of(queue) == "bc"
    queue.add_preempted(first)
    assert order_of(queue) == "abc"


def test_in_a_burst_a_prompt_lets_shorter_ones_pass_that_come_while_it_would_be_computed() -> None:
    order = SchedulingOrder(fcfs_seconds_per_token=1e-5)
    queue = queued(
        order,
        sequence("a", 0.0, 1000),  # 10 ms
        sequence("b", 0.001, 10),
        sequence("c", 0.002, 900),
        sequence("d", 0.012, 10),
        sequence("e", 0.02, 900),
    )
    assert order_of(queue) == "bacde"
    queue.add(sequence("f", 0.009, 1))
    assert order_of(queue) == "bfacde"


def test_smaller_priorities_go_first_until_waiting_outweighs_them() -> None:
    order = SchedulingOrder("priority", seconds_per_priority=10.0)
    queue = queued(
        order,
        sequence("a", 0.0, priority=1),
        sequence("b", 1.0, priority=0),
        sequence("c", 2.0, priority=0),
        sequence("d", 9.0, priority=0),
        sequence("e", 11.0, priority=0),  # "a" has waited for longer than a priority is worth
        sequence("f", 12.0, priority=-5),
    )
    assert order_of(queue) == "fbcdae"


def test_short_prompts_go_first_until_waiting_outweighs_them() -> None:
    order = SchedulingOrder("sjf", seconds_per_token=0.01)
    queue = queued(
        order, sequence("a", 0.0, 500), sequence("b", 1.0, 20), sequence("c", 1.1, 10), sequence("d", 5.5, 1)
    )
    assert order_of(queue) == "bcad"


def test_a_preempted_answer_goes_on_before_prompts_that_are_shorter() -> None:
    long, short = sequence("a", 0.0, 500), sequence("b", 1.0, 20)
    queue = queued(SchedulingOrder("sjf"), long, short)
    queue.remove(long)
    queue.add_preempted(long)
    queue.add(sequence("c", 0.0, 1))
    assert order_of(queue)[0] == "a"


PRIORITIES = st.integers(-(2**31) + 1, 2**31 - 1)  # all that a client may ask for


@given(one=PRIORITIES, other=PRIORITIES)
def test_any_priority_is_outweighed_by_two_hours_of_waiting(one: int, other: int) -> None:
    low, high = sorted((one, other))
    order = SchedulingOrder("priority")
    queue = queued(order, sequence("a", 0.0, priority=high), sequence("b", 7200.0, priority=low))
    assert order_of(queue) == "ab"


@given(one=st.integers(-100_000, 100_000), other=st.integers(-100_000, 100_000))
def test_large_priorities_keep_their_order(one: int, other: int) -> None:
    low, high = sorted((one, other))
    queue = queued(SchedulingOrder("priority"), sequence("a", 0.0, priority=high), sequence("b", 0.0, priority=low))
    assert order_of(queue) == ("ab" if low == high else "ba")


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf"])
@given(
    requests=st.lists(
        st.tuples(st.floats(0, 100, allow_nan=False), st.integers(1, 200), st.integers(-3, 3)), min_size=1, max_size=20
    )
)
def test_nobody_is_overtaken_for_longer_than_the_handicaps_differ(
    policy: str, requests: list[tuple[float, int, int]]
) -> None:
    order = SchedulingOrder(policy, seconds_per_priority=5.0, seconds_per_token=0.1)  # type: ignore[arg-type]
    requests.sort(key=lambda request: request[0])
    sequences = [sequence(str(number), *request) for number, request in enumerate(requests)]
    waiting = list(queued(order, *sequences))
    for place, overtaken in enumerate(waiting):
        for other in waiting[:place]:
            late = other.request.arrival_time - overtaken.request.arrival_time
            assert late <= order.handicap(overtaken.request) - order.handicap(other.request) + 1e-9 or late <= 0
