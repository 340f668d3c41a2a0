"""The number of drafts follows what they bring and what they cost, and never costs much where they bring nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxserve.engine.draft_lengths import DraftLengths
from jaxserve.engine.request import Request
from jaxserve.engine.schedule import DecodeRow, SampledTokens, ScheduledBatch
from jaxserve.engine.sequence import Sequence
from jaxserve.sampling_params import SamplingParams

PLAIN = 10e-3  # seconds of a step without drafts


def make_sequences(count: int) -> list[Sequence]:
    request = Request("request", (1,), SamplingParams(), arrival_time=0.0)
    return [Sequence(request, index, 0, frozenset(), 1000) for index in range(count)]


class Device:
    """Steps of `rows` sequences whose drafts are right with some probability; a draft costs as much time as it says."""

    def __init__(self, lengths: DraftLengths, rows: int, *, seconds_per_draft: float, seed: int = 0) -> None:
        self.lengths = lengths
        self.sequences = make_sequences(rows)
        self.rng = random.Random(seed)
        self.seconds_per_draft = seconds_per_draft
        self.seconds = 0.0
        self.tokens = 0
        self.chosen: list[int] = []

    def run(self, steps: int, acceptance: float) -> None:
        for _ in range(steps):
            drafts = self.lengths.choose(self.sequences)
            self.chosen.append(drafts)
            rows = tuple(DecodeRow(sequence, 0, -1, -1, drafts) for sequence in self.sequences)
            batch = ScheduledBatch(decode=rows, prefill=(), num_drafts=drafts)
            kept = [next((i for i in range(drafts) if self.rng.random() >= acceptance), drafts) for _ in rows]
            took = PLAIN + drafts * self.seconds_per_draft
            self.seconds += took
            self.tokens += len(rows) + sum(kept)
            if drafts:
                drafted = np.full(len(rows), drafts, np.int32)
                tokens = np.zeros((len(rows), drafts + 1), np.int32)
                self.lengths.observe_tokens(batch, SampledTokens(tokens, np.array(kept, np.int32) + 1, drafted))
            self.lengths.observe_step(batch, took * self.rng.uniform(0.97, 1.03))

    def speed_up(self) -> float:
        return self.tokens / self.seconds * PLAIN / len(self.sequences)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("cost", [0.5e-3, 3e-3, 20e-3])
def test_drafts_that_are_wrong_cost_next_to_nothing(rows: int, cost: float) -> None:
    device = Device(DraftLengths("test", (2, 4), 8), rows, seconds_per_draft=cost)
    device.run(100, acceptance=0.0)
    device.seconds, device.tokens = 0.0, 0
    device.run(3000, acceptance=0.0)
    assert device.speed_up() > 0.98


def test_drafts_that_are_right_are_made_as_long_as_pays() -> None:
    device = Device(DraftLengths("test", (2, 4), 8), 1, seconds_per_draft=1e-3)
    device.run(300, acceptance=0.9)
    assert device.chosen[-50:] == [4] * 50
    device = Device(DraftLengths("test", (2, 4), 8), 1, seconds_per_draft=3e-3)
    device.run(1000, acceptance=0.6)
    assert device.chosen.count(2) > 700
    assert device.speed_up() > 1.15  # 1.22 with two drafts in every step, 1.05 with four


def test_it_is_noticed_when_drafts_become_right_and_wrong_again() -> None:
    device = Device(DraftLengths("test", (4,), 8), 2, seconds_per_draft=0.5e-3)
    device.run(300, acceptance=0.0)
    assert device.chosen[-100:].count(4) < 10
    device.run(600, acceptance=0.95)
    assert device.chosen[-50:] == [4] * 50
    device.run(300, acceptance=0.0)
    assert device.chosen[-100:].count(4) < 10


def test_more_rows_than_are_compiled_bring_none() -> None:
    lengths = DraftLengths("test", (4,), 2)
    assert {lengths.choose(make_sequences(3)) for _ in range(20)} == {0}


def test_without_adapting_every_step_brings_as_many_as_it_can() -> None:
    device = Device(DraftLengths("test", (2, 4), 8, adaptive=False), 2, seconds_per_draft=1.0)
    device.run(20, acceptance=0.0)
    assert set(device.chosen) == {4}
