"""Prompts come in larger pieces where the steps between them bring drafts: the rules, and whole loads in simulated time."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.engine.draft_lengths import DraftLengths
from jaxserve.engine.draft_showing import DraftShowing, PromptPieces
from jaxserve.engine.prefill_budget import PrefillBudget
from jaxserve.engine.prefill_sizes import PrefillSizes
from jaxserve.engine.schedule import ScheduledBatch
from jaxserve.engine.simulator import SimulatedRequest, SimulationResult, Simulator
from jaxserve.engine.step_pace import StepPace
from tests.engine.drafting_model import DRAFTS, DraftingModel, DraftTimes, prompts
from tests.engine.test_draft_showing import showing
from tests.engine.test_draft_simulation import limits

# Of Llama-3-8B with a 1B drafter on an H200, as docs/performance.md tells: what prompts add to a step that decodes, and what
# the drafter takes.
ADDED = {64: 1.1e-3, 128: 1.5e-3, 192: 2.4e-3, 256: 3.5e-3, 384: 5.4e-3, 512: 7.1e-3}
TIMES = DraftTimes(per_pass=1.0e-3, per_verified_token=13e-6, showing_base=1.2e-3, per_shown_token=2.5e-6)


class H200:
    def seconds(self, batch: ScheduledBatch) -> float:
        tokens = sum(len(chunk.token_ids) for chunk in batch.prefill)
        size = list(ADDED)[min(bisect_left(list(ADDED), tokens), len(ADDED) - 1)]
        read = sum(row.sequence.num_computed for row in batch.decode)
        return 4.75e-3 + 5e-6 * len(batch.decode) + 36e-9 * read + (ADDED[size] if tokens else 0.0)


def new_pace() -> StepPace:
    return StepPace(ADDED, measured={64: ADDED})


def simulated(
    seqs: int, acceptance: float | None, trace: list[SimulatedRequest] | None = None
) -> tuple[SimulationResult, list[ScheduledBatch]]:
    """A crowd that is served at once; steps are the second half's. `acceptance=None`: without speculation."""
    device = DraftingModel(H200(), None if acceptance is None else TIMES, acceptance or 0.0, noise=0.08)  # pyright: ignore[reportArgumentType]
    simulator = Simulator(
        replace(limits(seqs), max_num_batched_tokens=512, num_pages=60_000),
        device,
        drafting=None if acceptance is None else DraftLengths("draft_model", (DRAFTS,), 64),
        showing_seconds=None if acceptance is None else TIMES.showing,
        sample=device.sample,
        pace=new_pace(),
        prefill_sizes=PrefillSizes(tuple(ADDED), balanced_tokens=208),
    )
    result = simulator.run(trace or prompts(5 * seqs, 490, 360))
    return result, device.batches[len(device.batches) // 2 :]


def prompt_tokens(batches: list[ScheduledBatch]) -> float:
    """Of a step that has some beside those who decode, on average."""
    return float(np.mean([batch.num_tokens - len(batch.decode) for batch in batches if batch.prefill and batch.decode]))


# Without larger pieces 30 sequences gain a sixth, and 64 nothing.
@pytest.mark.parametrize(("seqs", "most"), [(30, 0.75), (64, 0.9)])
def test_where_drafts_pay_prompts_come_in_larger_pieces_and_all_are_faster(seqs: int, most: float) -> None:
    plain, plain_batches = simulated(seqs, None)
    drafting, batches = simulated(seqs, 0.8)
    assert drafting.seconds < most * plain.seconds
    assert prompt_tokens(batches) > 1.5 * prompt_tokens(plain_batches)


@pytest.mark.parametrize("acceptance", [0.6, *(pytest.param(rate, marks=pytest.mark.long) for rate in (0.0, 0.4))])
def test_where_drafts_do_not_pay_pieces_stay_small_and_all_is_as_fast_as_without(acceptance: float) -> None:
    plain, plain_batches = simulated(64, None)
    drafting, batches = simulated(64, acceptance)
    assert drafting.seconds < 1.02 * plain.seconds
    assert prompt_tokens(batches) == pytest.approx(prompt_tokens(plain_batches), rel=0.1)


def with_shared_beginnings(count: int) -> list[SimulatedRequest]:
    return [
        replace(request, prompt_token_ids=(*range(number % 4, 1000), *request.prompt_token_ids))
        for number, request in enumerate(prompts(count, 10, 40))
    ]


@pytest.mark.parametrize(
    ("trace", "acceptance", "most"),
    [
        pytest.param(prompts(600, 40, 60), 0.7, 1.03, id="short"),
        pytest.param([replace(one, num_choices=16) for one in prompts(100, 40, 30)], 0.8, 1.055, id="choices"),
        pytest.param(with_shared_beginnings(500), 0.7, 1.03, id="cached"),
    ],
)
def test_prompts_that_no_step_could_take_more_of_are_not_thought_to_come_in_larger_pieces(
    trace: list[SimulatedRequest], acceptance: float, most: float
) -> None:
    """A crowd waits, but for slots; other choices take their prompts from the cache, as those do who share a beginning."""
    plain, _ = simulated(64, None, trace)
    drafting, _ = simulated(64, acceptance, trace)
    assert drafting.seconds < most * plain.seconds


def test_when_drafts_begin_again_a_step_is_held_up_by_two_groups_at_most() -> None:
    _, batches = simulated(64, 0.7)
    shown = [sum(len(chunk.token_ids) for group in batch.catch_up for chunk in group) for batch in batches]
    assert 512 < max(shown) <= 2 * 512


def test_where_no_step_can_bring_drafts_prompts_ride_along() -> None:
    for adaptive in (True, False):
        policy = DraftShowing(DraftLengths("test", (3,), 8, adaptive=adaptive), lambda rows, tokens: 1.0)
        assert not policy.is_known_to_pay(9)


def test_pieces_ride_along_with_those_who_decode_but_not_where_these_bring_drafts() -> None:
    sizes = PrefillSizes((64, 128, 256, 512), balanced_tokens=256)
    assert sizes.choose(500, 60, 64) == 128
    assert sizes.choose(500, 60, 64, between_drafts=True) == 500
    assert sizes.choose(300, 60, 64, between_drafts=True) == 256  # padding counts as ever


def batch_of(seqs: int, num_drafts: int) -> ScheduledBatch:
    """A step of a load's that only decodes, with so many drafts."""
    _, batches = simulated(seqs, 0.8 if num_drafts else None)
    return next(batch for batch in batches if not batch.prefill and batch.num_drafts == num_drafts)


def test_a_step_with_prompts_may_take_as_much_longer_as_steps_with_drafts_take() -> None:
    pace = new_pace()
    plain, drafting = batch_of(8, 0), batch_of(8, DRAFTS)
    for _ in range(3):
        pace.observe(plain, 5e-3)
    assert pace.prefill_budget(8, 0, between_drafts=True) == pace.prefill_budget(8, 0) == 256  # 3.5 ms of 5
    for _ in range(3):
        pace.observe(drafting, 9e-3)
    assert pace.prefill_budget(8, 0) == 256
    assert pace.prefill_budget(8, 0, between_drafts=True) == 512  # 7.1 ms, of twice 9 less 5
    asked = StepPace(ADDED, measured={64: ADDED}, goal=10e-3)
    for _ in range(3):
        asked.observe(plain, 5e-3)
        asked.observe(drafting, 9e-3)
    assert asked.prefill_budget(8, 0, between_drafts=True) == 256  # who names a goal has it kept


def test_what_larger_pieces_would_be_goes_by_what_waits() -> None:
    pace = new_pace()
    plain = batch_of(16, 0)
    for _ in range(3):
        pace.observe(plain, 9e-3)
    budget = PrefillBudget(limits(64), pace, PrefillSizes(tuple(ADDED), balanced_tokens=208))
    assert budget.fitting(budget.most(16, 0), 16, waiting=1000) == 192
    piece = budget.piece_between_drafts(16, waiting=1000)
    assert (piece.tokens, piece.seconds) == (240, pytest.approx(ADDED[256]))  # of the 256 of a step 16 decode
    assert budget.piece_between_drafts(16, waiting=100).tokens == 100
    assert budget.piece_between_drafts(16, waiting=0).tokens == 0


def test_prompts_count_as_they_would_come_with_drafts() -> None:
    """Where a step's prompts are a quarter of such a piece, three quarters of the steps would bring drafts instead."""
    for pieces, is_worth_it in ((PromptPieces(100), False), (PromptPieces(400, share=0.25), True)):
        policy, _ = showing(1.0, takes=3.0)
        for _ in range(400):
            shown = policy.shows_prompts(3, 1, pieces)
            policy.count_decoding(4, 1.0)
        assert shown == is_worth_it
    policy, _ = showing(1.0, takes=3.0)
    for _ in range(400):
        shown = policy.shows_prompts(3, 1, PromptPieces(400, share=0.25, seconds=1.5))  # but their tokens are dearer
        policy.count_decoding(4, 1.0)
    assert not shown
    policy, _ = showing(1.0, takes=3.0)
    for _ in range(10):  # and however much cheaper they are, showing costs no less than nothing
        policy.shows_prompts(3, 1, PromptPieces(400, share=0.25, seconds=-5.0))
    assert policy.pays(4)
    for _ in range(4):
        policy.shows_prompts(3, 1, PromptPieces(100))
    assert not policy.pays(4)


def test_drafts_begin_again_once_they_are_worth_what_all_must_catch_up_on() -> None:
    behind = 50.0
    _, lengths = showing(1.0)
    policy = DraftShowing(lengths, lambda rows, tokens: 1.0, lambda: behind)
    for _ in range(10):
        policy.shows_prompts(3, 1, PromptPieces(100))
    assert not policy.pays(4)
    steps = 0
    while not policy.pays(4):
        policy.count_decoding(4, 1.0)
        steps += 1
    assert 55 < steps < 70  # ten of showing, and fifty
    assert policy.may_spend == behind  # at once: they have waited for as long
    policy.spend(4, behind)  # and that is no reason to stop
    assert policy.pays(4)
    policy.spend(4, 2 * behind)
    assert not policy.pays(4)


def test_what_was_paid_for_catching_up_is_forgotten_once_nobody_is_behind() -> None:
    _, lengths = showing(1.0)
    policy = DraftShowing(lengths, lambda rows, tokens: 1.0, lambda: 10.0)
    policy.shows_prompts(3, 1, PromptPieces(100))
    assert not policy.pays(4)
    while not policy.pays(4):
        policy.count_decoding(4, 1.0)
    policy.wait(4, 0, 0.0)
    policy.spend(4, 11.0)
    assert not policy.pays(4)
