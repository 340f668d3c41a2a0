"""The scheduler over whole traces: what must always hold, and what policies and goals promise."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import SchedulingPolicy
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.prefill_sizes import PrefillSizes
from jaxserve.engine.schedule import ScheduledBatch
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.simulator import (
    SimulatedRequest,
    SimulationResult,
    Simulator,
    StepModel,
    poisson_trace,
)
from jaxserve.engine.step_pace import StepPace
from jaxserve.engine.waiting_queue import SchedulingOrder
from tests.engine.scheduler_harness import make_limits

MODEL = StepModel(base=0.005, per_row=1e-4, per_cached_token=1e-6, per_prompt_token=2e-4, per_pair=1e-6)


def server_limits(**sizes: int) -> SchedulerLimits:
    """As a GPU has them."""
    defaults = {"seqs": 64, "tokens": 2048, "prefill_rows": 16, "max_len": 20_000, "page_size": 16, "pages": 25_000}
    return make_limits(**(defaults | sizes))


def random_prompt(rng: np.random.Generator, length: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, 32_000, length).tolist())


# Steps that only decode, by which a pace knows what those take, and one that is launched before the last is fetched.
STEPS_TO_LEARN = 3 + 1


class Watch:
    """Checks each step of a simulation."""

    def __init__(self, limits: SchedulerLimits, *, has_pace: bool) -> None:
        self.limits = limits
        self.has_pace = has_pace
        self.simulator: Simulator | None = None
        self.seen: dict[tuple[str, int], Sequence] = {}
        self.learning: Counter[int] = (
            Counter()
        )  # steps without a prompt though one waited, by the pace's number of rows

    def __call__(self, batch: ScheduledBatch) -> None:
        limits, scheduler = self.limits, self.simulator.scheduler  # type: ignore[union-attr]
        for row in (*batch.decode, *batch.prefill):
            self.seen[row.sequence.request.request_id, row.sequence.index] = row.sequence
        assert batch.num_tokens <= limits.max_num_batched_tokens
        assert len(batch.prefill) <= limits.max_prefill_rows
        held = {page for sequence in scheduler.running for page in sequence.pages}
        assert len(held) + scheduler.pages.num_free <= limits.num_pages
        if not self.leaves_work(batch):
            return
        if not self.has_pace or not batch.decode:
            assert batch.num_tokens == limits.max_num_batched_tokens or len(batch.prefill) == limits.max_prefill_rows
        elif not batch.prefill:
            # Beside those who decode a prompt gets no more than keeps to the goal, but it goes on in every step, once it is
            # known what a step takes that only decodes.
            rows = len(batch.decode).bit_length()
            self.learning[rows] += 1
            assert self.learning[rows] <= STEPS_TO_LEARN, "a prompt stands still"

    def leaves_work(self, batch: ScheduledBatch) -> bool:
        """Whether somebody has no part in a step who could compute something: who has a slot, or may have one, and pages."""
        limits, scheduler = self.limits, self.simulator.scheduler  # type: ignore[union-attr]
        chosen = {chunk.sequence for chunk in batch.prefill}
        for sequence in scheduler.running:
            if not sequence.is_decoding and sequence not in chosen:
                missing = limits.pages_for(len(sequence.token_ids)) - len(sequence.pages)
                if missing <= scheduler.pages.num_free:
                    return True
        if not scheduler.waiting or not scheduler._free_slots or scheduler.waiting.first.num_in_flight:
            return False
        needed = limits.pages_for(len(scheduler.waiting.first.token_ids) + 1) + limits.pages_for(
            sum(len(sequence.token_ids) + 2 * limits.page_size for sequence in scheduler.running)
        )
        return needed <= scheduler.pages.num_free


def simulate(
    limits: SchedulerLimits,
    trace: list[SimulatedRequest],
    *,
    order: SchedulingOrder | None = None,
    pace: StepPace | None = None,
    prefill_sizes: PrefillSizes | None = None,
    caching: bool = True,
) -> tuple[SimulationResult, Watch]:
    watch = Watch(limits, has_pace=pace is not None)
    watch.simulator = Simulator(
        limits, MODEL, order=order, pace=pace, prefill_sizes=prefill_sizes, prefix_caching=caching, on_step=watch
    )
    result = watch.simulator.run(trace)
    scheduler = watch.simulator.scheduler
    assert scheduler.pages.num_free == limits.num_pages, "pages leak"
    assert len(scheduler._free_slots) == limits.max_num_seqs, "slots leak"
    assert scheduler.num_live_requests == 0
    scheduler.pages.flush()
    assert scheduler.pages.num_cached == 0
    for course in result.courses:
        if course.request.abort_after is None:
            room = limits.longest_sequence - len(course.request.prompt_token_ids)
            assert (course.finish_reason, len(course.token_times)) == ("length", min(course.request.num_output, room))
    return result, watch


def check_order(watch: Watch, order: SchedulingOrder, longest_wait: float) -> None:
    """Nobody began before one who has the better place, however little it was, nor before one who came much earlier.

    Args:
        longest_wait: seconds after a request from which on nobody may go before it, whatever they ask for.
    """
    began = [sequence for sequence in watch.seen.values() if sequence.scheduled_time > 0]
    for first, second in itertools.permutations(began, 2):
        ahead = second.request.arrival_time - first.request.arrival_time
        outweighed = ahead > 0 and ahead > order.handicap(first.request) - order.handicap(second.request)
        overtaken = first.scheduled_time > second.scheduled_time
        assert not (outweighed and overtaken), "overtaken for longer than may be"
        assert not (ahead > longest_wait and overtaken), "overtaken for longer than anybody may be"


@st.composite
def traces(draw: st.DrawFn) -> tuple[dict[str, int], list[SimulatedRequest]]:
    seqs = draw(st.integers(1, 6))
    limits = {
        "seqs": seqs,
        "tokens": draw(st.integers(seqs, 24)),
        "prefill_rows": draw(st.integers(1, seqs)),
        "max_len": 40,
        "page_size": draw(st.integers(1, 4)),
        "pages": draw(st.integers(8, 40)),
    }
    longest = min(limits["max_len"], limits["page_size"] * limits["pages"])
    requests = draw(
        st.lists(
            st.tuples(
                st.floats(0, 0.05),  # after the one before
                st.integers(0, 2),  # which prefix
                st.integers(0, 16),  # of what length
                st.integers(1, 16),  # own tokens
                st.integers(1, 16),  # of the answer
                st.integers(1, 3),  # choices
                st.integers(-2, 2) | st.sampled_from([-(2**31) + 1, 2**31 - 1]),  # priority
                st.one_of(st.none(), st.floats(0, 0.2)),  # when the client goes away
                st.sampled_from([None, "x"]),
            ),
            min_size=1,
            max_size=25,
        )
    )
    trace: list[SimulatedRequest] = []
    now = 0.0
    for number, (gap, prefix, shared, own, output, choices, priority, leaves, salt) in enumerate(requests):
        now += gap
        ids = (*range(1000 * prefix, 1000 * prefix + shared), *range(100 * number, 100 * number + own))[: longest - 1]
        trace.append(SimulatedRequest(now, ids, output, priority, salt, choices, leaves))
    return limits, trace


ORDERS: list[SchedulingPolicy] = ["fcfs", "priority", "sjf"]


def check_trace(limits: dict[str, int], trace: list[SimulatedRequest], policy: SchedulingPolicy, paced: bool) -> None:
    order = SchedulingOrder(
        policy,
        seconds_per_priority=0.05,
        most_priority_seconds=0.1,
        seconds_per_token=0.002,
        fcfs_seconds_per_token=1e-3,
    )
    sizes = [size for size in (1, 4, 16) if size < limits["tokens"]] + [limits["tokens"]]
    result, watch = simulate(
        make_limits(**limits),
        trace,
        order=order,
        pace=StepPace(sizes) if paced else None,
        prefill_sizes=PrefillSizes(tuple(sizes), balanced_tokens=8) if paced else None,
    )
    longest = limits["max_len"]
    bounds = {"fcfs": longest * 1e-3, "priority": 2 * 0.1, "sjf": longest * 0.002}
    check_order(watch, order, bounds[policy])
    plain, _ = simulate(make_limits(**limits), trace, caching=False)
    assert plain.hit_rate == 0.0
    assert 0.0 <= result.hit_rate < 1.0


@pytest.mark.parametrize("policy", ORDERS)
@settings(max_examples=30)
@given(limits_and_trace=traces(), paced=st.booleans())
def test_nothing_leaks_nobody_starves_and_no_work_waits(
    policy: SchedulingPolicy, limits_and_trace: tuple[dict[str, int], list[SimulatedRequest]], paced: bool
) -> None:
    check_trace(*limits_and_trace, policy, paced)


@pytest.mark.long
@pytest.mark.parametrize("policy", ORDERS)
@settings(max_examples=3000)
@given(limits_and_trace=traces(), paced=st.booleans())
def test_nothing_leaks_at_length(
    policy: SchedulingPolicy, limits_and_trace: tuple[dict[str, int], list[SimulatedRequest]], paced: bool
) -> None:
    check_trace(*limits_and_trace, policy, paced)


def test_the_hit_rate_is_what_the_trace_says() -> None:
    """Everybody but the first finds the full pages that all prompts begin with."""
    trace = poisson_trace(20.0, [(229, 20)] * 64, shared_prefix=1000)
    result, _ = simulate(server_limits(), trace)
    assert result.hit_rate == pytest.approx(63 * 992 / (64 * 1229))


def test_a_shared_prompt_makes_the_first_token_come_sooner() -> None:
    trace = poisson_trace(2.0, [(20, 20)] * 64, shared_prefix=1000)
    with_cache, _ = simulate(server_limits(), trace)
    without, _ = simulate(server_limits(), trace, caching=False)

    def median(result: SimulationResult) -> float:
        return result.percentile(lambda course: [course.time_to_first_token], 50)

    assert median(with_cache) < median(without) / 5


def test_shortest_first_serves_most_sooner_and_the_long_ones_too() -> None:
    rng = np.random.default_rng(1)
    lengths = [(4000, 50) if number % 10 == 0 else (100, 50) for number in range(300)]
    trace = [
        SimulatedRequest(0.01 * number, random_prompt(rng, prompt), output)
        for number, (prompt, output) in enumerate(lengths)
    ]
    limits = server_limits(seqs=8)

    def first_tokens(order: SchedulingOrder) -> tuple[float, float]:
        result, _ = simulate(limits, trace, order=order)
        times = [course.time_to_first_token for course in result.courses]
        return float(np.median(times)), max(times)

    fcfs, sjf = first_tokens(SchedulingOrder()), first_tokens(SchedulingOrder("sjf", seconds_per_token=0.001))
    assert sjf[0] < 0.8 * fcfs[0]
    assert sjf[1] < fcfs[1] + 4000 * 0.001  # what a token is worth bounds it


def test_priorities_are_served_first() -> None:
    rng = np.random.default_rng(2)
    trace = [
        SimulatedRequest(0.002 * number, random_prompt(rng, 200), 50, priority=number % 2) for number in range(200)
    ]
    result, _ = simulate(server_limits(seqs=8), trace, order=SchedulingOrder("priority"))
    first_tokens = [[c.time_to_first_token for c in result.courses if c.request.priority == level] for level in (0, 1)]
    assert np.median(first_tokens[0]) < 0.7 * np.median(first_tokens[1])
