"""Speculation under whole loads, in simulated time: it keeps what it gains, and costs little where it gains nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.schedule import ScheduledBatch
from jaxserve.engine.simulator import LLAMA_8B_ON_H200, SimulatedRequest, SimulationResult
from tests.engine.drafting_model import DraftingModel, DraftTimes, prompts, simulate_drafting

TIMES = DraftTimes()
# Prompts leave few steps between them with 64 sequences, and many with 8.
PROMPT, OUTPUT = 600, 200


def limits(seqs: int) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=seqs, max_num_batched_tokens=256, max_prefill_rows=16, max_model_len=20_000, page_size=16,
        num_pages=25_000,
    )  # fmt: skip


def simulated(
    trace: list[SimulatedRequest], seqs: int, *, speculates: bool = True, is_told: bool = True, noise: float = 0.05
) -> tuple[SimulationResult, list[ScheduledBatch]]:
    """Args:
    is_told: what showing takes; else it seems to take nothing.
    """
    device = DraftingModel(LLAMA_8B_ON_H200, TIMES if speculates else None, 0.8, noise)
    told = TIMES if is_told else replace(TIMES, showing_base=0.0, per_shown_token=0.0)
    return simulate_drafting(limits(seqs), trace, device, told if speculates else None), device.batches


def test_where_showing_prompts_takes_more_than_drafts_save_it_is_as_fast_as_without() -> None:
    trace = prompts(300, PROMPT, OUTPUT)
    plain, _ = simulated(trace, 64, speculates=False)
    always, _ = simulated(trace, 64, is_told=False)
    adaptive, batches = simulated(trace, 64)
    assert always.seconds > 1.08 * plain.seconds
    assert adaptive.seconds < 1.02 * plain.seconds
    with_prompts = [batch for batch in batches if batch.prefill]
    assert sum(batch.is_shown for batch in with_prompts) < 0.1 * len(with_prompts)


@pytest.mark.parametrize("seqs", [1, 8, 16])
def test_where_drafts_clearly_pay_every_prompt_is_shown_at_once(seqs: int) -> None:
    trace = prompts(6 * seqs, PROMPT, OUTPUT)
    plain, _ = simulated(trace, seqs, speculates=False)
    always, _ = simulated(trace, seqs, is_told=False)
    adaptive, batches = simulated(trace, seqs)
    assert always.seconds < 0.8 * plain.seconds
    assert adaptive.seconds < 1.02 * always.seconds
    with_prompts = [batch for batch in batches if batch.prefill]
    assert sum(batch.is_shown for batch in with_prompts) > 0.95 * len(with_prompts)


def test_when_the_load_falls_drafts_come_back_and_what_was_missed_is_caught_up_on() -> None:
    crowd = prompts(200, PROMPT, OUTPUT)
    # Among them eight that go on for long when the others have ended.
    for index in range(40, 200, 20):
        crowd[index] = replace(crowd[index], num_output=2000)
    (plain, _), (adaptive, batches) = simulated(crowd, 64, speculates=False), simulated(crowd, 64)
    assert adaptive.seconds < 0.8 * plain.seconds
    few = [batch for batch in batches[-300:] if not batch.prefill]
    assert sum(batch.num_drafts > 0 for batch in few) > 0.9 * len(few)
    caught_up = sum(len(chunk.token_ids) for batch in batches for group in batch.catch_up for chunk in group)
    assert caught_up > 8 * PROMPT / 2
    # Of the rows that are left, each brings drafts again.
    assert all(row.num_drafts for row in few[-150].decode)


def test_a_step_is_never_held_up_for_long_by_what_is_caught_up_on() -> None:
    crowd = prompts(200, PROMPT, OUTPUT)
    for index in range(0, 200, 50):
        crowd[index] = replace(crowd[index], prompt_token_ids=tuple(range(8000 + index)), num_output=2000)
    _, batches = simulated(crowd, 64)
    for batch in batches:
        shown = [len(chunk.token_ids) for group in batch.catch_up for chunk in group]
        assert sum(count for count in shown if count > 64) <= limits(64).max_num_batched_tokens
    assert any(batch.catch_up for batch in batches)
