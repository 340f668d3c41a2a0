"""How much prefill rides along: what was measured decides, within the goal, and a prompt always goes on."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.engine.schedule import DecodeRow, PrefillChunk, ScheduledBatch
from jaxserve.engine.step_pace import StepPace
from tests.engine.scheduler_harness import Harness

SIZES = (16, 32, 64, 128, 256, 512)


def batch(num_decode: int, tokens: int = 0, start: int = 0) -> ScheduledBatch:
    harness = Harness()
    sequence = harness.sequences[harness.add(1, max_tokens=1)]
    decode = tuple(DecodeRow(sequence, slot, -1, -1) for slot in range(num_decode))
    chunk = PrefillChunk(sequence, 0, start, (1,) * tokens, (), samples=False, output_index=0)
    return ScheduledBatch(decode, (chunk,) if tokens else ())


def show_decoding(pace: StepPace, rows: int, seconds: float) -> None:
    """Lets it see enough steps that only decode."""
    for _ in range(3):
        pace.observe(batch(rows), seconds)


def learned(seconds_per_token: float, *, decode: float = 0.005, goal: float | None = None) -> StepPace:
    """A pace that has seen every size beside eight rows."""
    pace = StepPace(SIZES, goal=goal)
    show_decoding(pace, 8, decode)
    for size in SIZES:
        pace.observe(batch(8, size), decode + size * seconds_per_token)
    return pace


def test_nobody_decodes_so_there_is_no_bound() -> None:
    assert learned(1.0).prefill_budget(0, 0) == 512


def test_a_step_takes_at_most_twice_as_long_by_default() -> None:
    assert learned(10e-6).prefill_budget(8, 0) == 256  # 2.56 ms of 5; 512 would be 5.12
    assert learned(5e-6).prefill_budget(8, 0) == 512


@pytest.mark.parametrize(("goal", "budget"), [(0.0064, 64), (0.008, 256), (1.0, 512)])
def test_a_stated_goal_is_held(goal: float, budget: int) -> None:
    assert learned(10e-6, goal=goal).prefill_budget(8, 0) == budget


@pytest.mark.parametrize("goal", [0.001, 0.005])
def test_a_goal_that_cannot_be_held_still_lets_prompts_go_on(goal: float) -> None:
    assert learned(10e-6, goal=goal).prefill_budget(8, 0) == 16


def test_long_contexts_leave_room_for_less() -> None:
    pace = learned(10e-6)
    assert pace.prefill_budget(8, context=32768) == 128  # three times as dear


def test_steps_that_only_decode_come_first() -> None:
    pace = learned(10e-6)
    for _ in range(3):
        assert pace.prefill_budget(16, 0) == 0  # rows of a number that was not seen
        pace.observe(batch(16), 0.006)
    assert pace.prefill_budget(16, 0) == 512


def test_steps_with_drafts_tell_what_decoding_takes_where_every_step_has_some() -> None:
    pace = learned(10e-6)
    pace.observe(batch(16), 0.006)
    drafting = dataclasses.replace(batch(16), num_drafts=3)
    for _ in range(3):
        assert pace.prefill_budget(16, 0) == 0
        pace.observe(drafting, 0.006)
    assert pace.prefill_budget(16, 0) == 512


@pytest.mark.parametrize("first", [(0.0039, 0.0079), (0.0079, 0.0039), (0.015,), (0.0005,)])
def test_a_long_prompt_keeps_to_the_goal_though_the_first_steps_were_odd(first: tuple[float, ...]) -> None:
    """As on an H200, where 16 sequences that begin at once have a long prompt behind them: steps take 5 ms."""
    pace = StepPace((64, 96, 128, 192, 256, 512, 1024, 2048))
    for seconds in first:
        pace.observe(batch(16), seconds)
    late, start, num_steps = 0, 0, 0
    while start < 16_000:
        budget = pace.prefill_budget(16, start)
        seconds = 0.005 + budget * (14.7e-6 + 1.5e-9 * start)
        late += seconds > 0.0102
        pace.observe(batch(16, budget, start), seconds)
        start, num_steps = start + budget, num_steps + 1
    assert late <= 1
    assert num_steps < 150


def test_sizes_are_tried_from_below() -> None:
    pace = StepPace(SIZES, goal=0.01)
    show_decoding(pace, 8, 0.005)
    budgets = []
    for _ in range(len(SIZES) + 1):
        budgets.append(pace.prefill_budget(8, 0))
        pace.observe(batch(8, budgets[-1]), 0.005 + 0.001 + 5e-6 * budgets[-1])  # a fixed part, as steps have
    assert budgets == [*SIZES, 512]


def test_one_slow_step_does_not_rule_a_size_out_for_ever() -> None:
    pace = StepPace(SIZES, goal=0.01)
    show_decoding(pace, 8, 0.005)
    pace.observe(batch(8, 512), 3.0)  # while something else went on
    budgets = []
    while len(budgets) < 500 and 512 not in budgets:
        budgets.append(pace.prefill_budget(8, 0))
        pace.observe(batch(8, budgets[-1]), 0.005 + budgets[-1] * 5e-6)
    assert len(budgets) > 10
    assert budgets[-1] == 512


@pytest.mark.parametrize("first", [-0.001, 0.0, 1e-6, 1e-4])
@pytest.mark.parametrize("exact", [0, 2, 5])
def test_a_size_that_seemed_to_cost_nothing_does_not_make_all_larger_ones_cheap(first: float, exact: int) -> None:
    """What the first steps with a prompt are seen to take is hardly more than without one: the device was behind before."""
    pace = StepPace((64, 96, 128, 192, 256, 512, 1024, 2048))
    show_decoding(pace, 16, 0.005)
    late = 0
    for step in range(40):
        budget = pace.prefill_budget(16, 0)
        seconds = 0.005 + (first if step in (exact, exact + 1) else budget * 20e-6)
        late += step not in (exact, exact + 1) and seconds > 0.0105
        pace.observe(batch(16, budget), seconds)
    assert late <= 1
    assert pace.prefill_budget(16, 0) in (192, 256)


MEASURED = {16: {64: 0.4e-3, 128: 0.8e-3, 256: 3.0e-3, 512: 8.0e-3}, 64: {64: 1.0e-3, 128: 1.5e-3, 256: 5.0e-3}}


def test_a_size_that_was_measured_to_take_too_long_is_hardly_ever_tried() -> None:
    pace = StepPace((64, 128, 256, 512), measured=MEASURED)
    show_decoding(pace, 16, 0.005)
    budgets = []
    for _ in range(10_000):
        budgets.append(pace.prefill_budget(16, 0))
        pace.observe(batch(16, budgets[-1]), 0.005 + MEASURED[16][budgets[-1]])
    assert budgets.count(256) + budgets.count(512) == len(budgets)
    assert budgets.count(512) <= 5


@pytest.mark.parametrize("factor", [1.3, 2.0, 4.0])
def test_sizes_that_were_measured_on_a_busy_device_are_found_to_take_less(factor: float) -> None:
    wrong = {rows: {size: factor * seconds for size, seconds in sizes.items()} for rows, sizes in MEASURED.items()}
    pace = StepPace((64, 128, 256, 512), measured=wrong)
    show_decoding(pace, 16, 0.005)
    budgets = []
    for _ in range(8000):
        budgets.append(pace.prefill_budget(16, 0))
        pace.observe(batch(16, budgets[-1]), 0.005 + MEASURED[16][budgets[-1]])
    assert budgets[-1000:].count(256) > 990


def test_the_first_prompt_goes_by_what_was_measured_beside_as_many_rows() -> None:
    pace = StepPace((64, 128, 256, 512), measured=MEASURED)
    show_decoding(pace, 9, 0.005)
    show_decoding(pace, 40, 0.005)
    assert pace.prefill_budget(9, 0) == 256
    assert pace.prefill_budget(40, 0) == 128


def test_what_was_measured_is_corrected_by_what_is_seen() -> None:
    pace = StepPace((64, 128, 256, 512), measured=MEASURED)
    show_decoding(pace, 16, 0.005)
    show_decoding(pace, 64, 0.0055)
    for _ in range(10):
        pace.observe(batch(16, 256), 0.0115)
    assert pace.prefill_budget(16, 0) == 128
    assert pace.prefill_budget(64, 0) == 128  # by what was measured beside so many


@pytest.mark.parametrize("goal", [0.0103, 0.012])
def test_sizes_that_differ_in_what_they_take_without_context_keep_to_the_goal_with_it(goal: float) -> None:
    """As of an H200: a piece of 192 tokens takes more than twice what one of 128 does, and context the same for both."""
    added = {64: 0.4e-3, 96: 0.65e-3, 128: 0.85e-3, 192: 2.0e-3, 256: 3.2e-3, 512: 8.0e-3}
    pace = StepPace(tuple(added), goal=goal, measured={16: added})
    show_decoding(pace, 16, 0.0051)
    taken = []
    for _ in range(4):
        start = 0
        while start < 16_000:
            budget = pace.prefill_budget(16, start)
            taken.append(0.0051 + added[budget] + 1.85e-9 * budget * (start + budget / 2))
            pace.observe(batch(16, budget, start), taken[-1])
            start += budget
    assert max(taken) <= goal
    assert sum(taken) / len(taken) > 0.75 * goal


def test_what_context_costs_is_learned() -> None:
    """At 10 us a token, and as much again for each 4,000 tokens before it: the chunks of one long prompt."""
    pace = StepPace(SIZES, goal=0.0105)
    show_decoding(pace, 8, 0.005)
    start, over = 0, 0
    while start < 30_000:
        budget = pace.prefill_budget(8, start)
        seconds = 0.005 + budget * 10e-6 * (1 + (start + budget / 2) / 4000)
        over += seconds > 0.0105
        pace.observe(batch(8, budget, start), seconds)
        start += budget
    assert budget == 32  # 2.7 ms of 4.95
    assert over <= 2


def test_steps_are_followed_as_they_change() -> None:
    pace = learned(10e-6)
    for _ in range(200):
        pace.observe(batch(8), 0.010)
        pace.observe(batch(8, 256), 0.010 + 256 * 60e-6)
    decode = pace.decode_seconds(8)
    assert decode is not None
    assert 0.0095 < decode < 0.0105
    assert pace.prefill_budget(8, 0) == 128


def test_rows_that_were_not_seen_take_what_their_neighbours_do() -> None:
    pace = StepPace(SIZES)
    assert pace.decode_seconds(4) is None
    pace.observe(batch(2), 0.004)
    pace.observe(batch(64), 0.008)
    assert [pace.decode_seconds(rows) for rows in (1, 3, 5, 30, 64)] == [0.004, 0.004, 0.004, 0.008, 0.008]
