"""The scheduler with drafts, over a fake device: pages, preemption, aborts and ends while nobody knows how far rows are."""

from __future__ import annotations

import random

import pytest

from jaxserve.engine.draft_lengths import DraftLengths
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.scheduler import Scheduler
from tests.engine.drafting_device import DraftingRunner
from tests.engine.scheduler_harness import Harness, make_limits


def drafting_harness(
    limits: SchedulerLimits, *, accuracy: float, seed: int = 0, length: int = 3, adaptive: bool = False
) -> Harness:
    harness = Harness(limits)
    harness.scheduler = Scheduler(
        limits, drafting=DraftLengths("fake", (length,), limits.max_num_seqs, adaptive=adaptive)
    )
    harness.runner = DraftingRunner(limits, accuracy, seed)
    return harness


@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_drafted_each_request_gives_its_own_tokens(accuracy: float, seed: int) -> None:
    rng = random.Random(seed)
    limits = make_limits(tokens=32, max_len=40, pages=rng.choice([12, 18, 40]))
    harness = drafting_harness(limits, accuracy=accuracy, seed=seed)
    for _ in range(14):
        stop = [rng.randrange(32)] if rng.random() < 0.5 else []
        harness.add(rng.randint(1, 24), rng.randint(1, 40), seed=rng.getrandbits(64), stop=stop)
        for _ in range(rng.choice([0, 0, 1, 5])):
            harness.step()
        if rng.random() < 0.2:
            harness.abort(f"request-{rng.randrange(len(harness.sequences))}")
    harness.run()
    harness.check_done()
    assert any(batch.num_drafts for batch in harness.runner.launched)


def test_prompts_and_drafts_are_never_in_one_step() -> None:
    harness = drafting_harness(make_limits(tokens=32), accuracy=0.9)
    for _ in range(6):
        harness.add(9, 30)
        harness.step()
        harness.step()
    harness.run()
    harness.check_done()
    assert not any(batch.num_drafts and batch.prefill for batch in harness.runner.launched)


def test_a_right_drafter_saves_steps_up_to_the_end_of_the_context() -> None:
    limits = make_limits(max_len=64)
    harness = drafting_harness(limits, accuracy=1.0)
    key = harness.add(4, 60)
    steps = harness.run()
    harness.check_done()
    assert len(harness.outputs[key]) == 60
    assert steps <= 60 / 4 + 6
    stats = harness.scheduler.speculative_stats
    assert stats is not None
    assert stats.num_accepted_tokens <= stats.num_draft_tokens <= 3 * stats.num_drafts


@pytest.mark.parametrize("max_tokens", [5, 6, 7, 8, 40])
@pytest.mark.parametrize("stops", [False, True])
def test_only_drafts_that_are_part_of_an_answer_count_as_kept(max_tokens: int, stops: bool) -> None:
    told = []
    for _ in range(2):
        harness = drafting_harness(make_limits(), accuracy=1.0)
        stop = [told[0][-3]] if stops and told else []  # the answer ends before it else would
        key = harness.add(4, max_tokens, stop=stop)
        harness.run()
        told.append(harness.outputs[key])
    stats = harness.scheduler.speculative_stats
    assert stats is not None
    # All drafts are right, so that each that an answer had place for is part of it: all its tokens but one of each step.
    assert stats.accepted_per_position == stats.drafted_per_position
    steps = stats.num_drafts
    assert len(told[-1]) - 1 - steps <= stats.num_accepted_tokens <= len(told[-1]) - 1


def test_drafts_behind_an_abort_do_not_count() -> None:
    harness = drafting_harness(make_limits(), accuracy=1.0)
    key = harness.add(4, 40)
    harness.step_until(lambda: len(harness.outputs[key]) > 10)
    harness.abort(*key)
    harness.run()
    stats = harness.scheduler.speculative_stats
    assert stats is not None
    assert stats.num_accepted_tokens == stats.num_draft_tokens < len(harness.outputs[key])


def test_drafts_take_no_page_from_others() -> None:
    limits = make_limits(seqs=2, tokens=32, pages=4, max_len=16)  # two sequences of eight tokens, and not one more
    harness = drafting_harness(limits, accuracy=1.0)
    harness.add(4, 4, request_id="a")
    harness.add(4, 4, request_id="b")
    harness.run()
    harness.check_done()
    assert harness.scheduler.num_preemptions == 0
