"""Heads are shown steps only where their drafts are worth it: whole loads in simulated time."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.engine.draft_lengths import DraftLengths
from jaxserve.engine.schedule import SampledTokens, ScheduledBatch
from jaxserve.engine.simulator import LLAMA_8B_ON_H200, SimulatedRequest, SimulationResult, Simulator, simulated_tokens
from jaxserve.engine.step_pace import StepPace
from tests.engine.drafting_model import DRAFTS, prompts
from tests.engine.test_draft_simulation import limits
from tests.long_cases import few_of

SHARE = 0.04  # of a step, that showing it takes: the head is one layer, beside 32
PER_DRAFT = 0.25e-3
SIZES = (64, 128, 192, 256)  # of prompts


class HeadModel:
    """A device with a head, whose drafts are right with some probability where it was shown the step before.

    Args:
        per_prompts: seconds that showing takes longer in each step with prompts.

    Attributes:
        batches: every step that was simulated.
    """

    def __init__(self, acceptance: float | None, per_prompts: float = 0.0) -> None:
        self.acceptance = acceptance  # None: there is no head
        self.per_prompts = per_prompts
        self.batches: list[ScheduledBatch] = []
        self._rng = random.Random(3)

    def seconds(self, batch: ScheduledBatch) -> float:
        seconds = LLAMA_8B_ON_H200.seconds(batch)
        if self.acceptance is not None:
            seconds *= 1 + SHARE * batch.is_shown
            seconds += self.per_prompts * (batch.is_shown and bool(batch.prefill))
            seconds += batch.num_drafts * (PER_DRAFT + 6e-6 * len(batch.decode))
            if batch.num_drafts:
                assert batch.is_shown and self.batches[-1].is_shown
        self.batches.append(batch)
        return seconds * (1 + 0.05 * self._rng.random() ** 2)

    def showing(self, num_decode: int, num_tokens: int) -> float:
        """Seconds of a step with prompts, as the engine has measured it."""
        return SHARE * (5e-3 + 15e-6 * num_tokens) + self.per_prompts

    def sample(self, batch: ScheduledBatch) -> SampledTokens:
        if not batch.num_drafts or self.acceptance is None:
            return simulated_tokens(batch)
        tokens = np.full((len(batch.decode), batch.num_drafts + 1), 10, np.int32)
        counts = []
        for row in batch.decode:
            wrong = (i for i in range(row.num_drafts) if self._rng.random() >= self.acceptance)
            counts.append(next(wrong, row.num_drafts) + 1)
        drafted = np.array([row.num_drafts for row in batch.decode], np.int32)
        return SampledTokens(tokens, np.array(counts, np.int32), drafted)


def simulated(
    trace: list[SimulatedRequest],
    seqs: int,
    acceptance: float | None,
    *,
    adaptive: bool = True,
    per_prompts: float = 0.0,
    pace: StepPace | None = None,
) -> tuple[SimulationResult, HeadModel]:
    device = HeadModel(acceptance, per_prompts)
    lengths = DraftLengths("eagle", (DRAFTS,), 64, adaptive=adaptive, reads_states=True)
    simulator = Simulator(
        limits(seqs),
        device,
        drafting=None if acceptance is None else lengths,
        showing_seconds=device.showing,
        sample=device.sample,
        pace=pace,
    )
    return simulator.run(trace), device


def mean_time_per_token(result: SimulationResult) -> float:
    return float(np.mean([gap for course in result.courses for gap in course.inter_token_times]))


@pytest.mark.parametrize(
    ("seqs", "acceptance"), few_of(((1, 0.0), (8, 0.0), (1, 0.1), (8, 0.1)), itertools.product((1, 8, 64), (0.0, 0.1)))
)
def test_heads_that_are_wrong_cost_less_than_two_hundredths(seqs: int, acceptance: float) -> None:
    trace = prompts(4 * seqs + 4, 600, 1000)
    plain, _ = simulated(trace, seqs, None)
    adaptive, device = simulated(trace, seqs, acceptance)
    assert adaptive.seconds < 1.02 * plain.seconds
    assert mean_time_per_token(adaptive) < 1.02 * mean_time_per_token(plain)
    shown = [batch.is_shown for batch in device.batches]
    assert sum(shown) < 0.2 * len(shown) and any(shown[-300:])  # now and then it is looked whether that has changed


def test_where_prompts_leave_few_steps_to_draft_in_it_is_as_fast_as_without() -> None:
    trace = prompts(300, 600, 60)
    plain, _ = simulated(trace, 64, None)
    adaptive, _ = simulated(trace, 64, 0.5)
    assert adaptive.seconds < 1.02 * plain.seconds


@pytest.mark.parametrize("seqs", [1, 8])
def test_heads_that_are_right_are_shown_everything(seqs: int) -> None:
    trace = prompts(6 * seqs, 600, 200)
    plain, _ = simulated(trace, seqs, None)
    always, _ = simulated(trace, seqs, 0.8, adaptive=False)
    adaptive, device = simulated(trace, seqs, 0.8)
    assert always.seconds < 0.7 * plain.seconds
    assert adaptive.seconds < 1.02 * always.seconds
    assert np.mean([batch.is_shown for batch in device.batches]) > 0.95


@pytest.mark.parametrize(
    ("seqs", "acceptance", "most"), [(1, 0.3, 0.9), (8, 0.35, 0.9), (1, 0.25, 0.97), (3, 0.25, 0.98)]
)
def test_heads_that_are_seldom_right_keep_most_of_what_little_they_gain(
    seqs: int, acceptance: float, most: float
) -> None:
    trace = prompts(24 if seqs == 1 else 10 * seqs, 600, 150)
    plain, _ = simulated(trace, seqs, None)
    always, _ = simulated(trace, seqs, acceptance, adaptive=False)
    adaptive, _ = simulated(trace, seqs, acceptance)
    assert mean_time_per_token(always) < most * mean_time_per_token(plain)
    assert mean_time_per_token(adaptive) < most * mean_time_per_token(plain)


def test_heads_draft_again_when_they_become_right() -> None:
    trace = [replace(request, num_output=4000) for request in prompts(4, 600, 200)]
    plain, _ = simulated(trace, 4, None)
    device = HeadModel(0.0)

    def turn(batch: ScheduledBatch) -> None:
        if len(device.batches) == 1500:
            device.acceptance = 0.8

    lengths = DraftLengths("eagle", (DRAFTS,), 64, reads_states=True)
    simulator = Simulator(
        limits(4), device, drafting=lengths, showing_seconds=device.showing, sample=device.sample, on_step=turn
    )
    result = simulator.run(trace)
    assert result.seconds < 0.8 * plain.seconds
    assert all(batch.is_shown for batch in device.batches[-200:])
    assert np.mean([batch.num_drafts > 0 for batch in device.batches[-200:]]) > 0.9


def pace() -> StepPace:
    """As a GPU has it, where each size was measured at the start, without a head."""
    return StepPace(SIZES, measured={64: {size: 12e-6 * size for size in SIZES}})


def prompt_tokens_beside_decoding(device: HeadModel) -> float:
    """Of a step that has both, on average."""
    return float(
        np.mean([batch.num_tokens - len(batch.decode) for batch in device.batches if batch.prefill and batch.decode])
    )


def test_while_a_head_is_tried_prompts_go_on_in_pieces_as_large_as_without() -> None:
    """What showing adds to the steps of the trial is not taken for what their prompts take."""
    trace = prompts(24, 230, 200)
    _, plain = simulated(trace, 8, None, pace=pace())
    _, tried = simulated(trace, 8, 0.0, pace=pace(), per_prompts=3e-3)
    assert any(batch.is_shown and batch.prefill for batch in tried.batches)
    assert prompt_tokens_beside_decoding(tried) > 0.95 * prompt_tokens_beside_decoding(plain)


def test_what_showing_prompts_takes_is_weighed_as_it_was_measured() -> None:
    """However little showing adds to steps without prompts: right as the head is, it is not worth its price here."""
    trace = prompts(300, 230, 200)
    plain, _ = simulated(trace, 64, None, pace=pace())
    always, _ = simulated(trace, 64, 0.8, adaptive=False, pace=pace(), per_prompts=8e-3)
    adaptive, device = simulated(trace, 64, 0.8, pace=pace(), per_prompts=8e-3)
    assert always.seconds > 1.05 * plain.seconds
    assert adaptive.seconds < 1.03 * plain.seconds
    assert mean_time_per_token(adaptive) < 1.03 * mean_time_per_token(plain)
    with_prompts = [batch for batch in device.batches[len(device.batches) // 2 :] if batch.prefill]
    assert sum(batch.is_shown for batch in with_prompts) < 0.2 * len(with_prompts)
