"""The number of drafts follows what they bring and what they cost, and never costs much where they bring nothing."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from jaxserve.engine.draft_lengths import DraftLengths, Trial
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
        self.of_rows: list[list[int]] = []

    def run(self, steps: int, acceptance: float | tuple[float, ...]) -> None:
        """Args:
        acceptance: of all rows, or of each.
        """
        right = acceptance if isinstance(acceptance, tuple) else (acceptance,) * len(self.sequences)
        for _ in range(steps):
            drafts = self.lengths.choose(self.sequences)
            self.chosen.append(drafts)
            counts = self.lengths.of_rows(self.sequences, drafts) if drafts else [0] * len(self.sequences)
            self.of_rows.append(counts)
            rows = tuple(
                DecodeRow(sequence, 0, -1, -1, count) for sequence, count in zip(self.sequences, counts, strict=True)
            )
            batch = ScheduledBatch(decode=rows, prefill=(), num_drafts=drafts)
            kept = [
                next((i for i in range(count) if self.rng.random() >= chance), count)
                for count, chance in zip(counts, right, strict=True)
            ]
            took = PLAIN + drafts * self.seconds_per_draft
            self.seconds += took
            self.tokens += len(rows) + sum(kept)
            for row, new in zip(rows, kept, strict=True):
                if row.num_drafts:
                    row.sequence.drafted_at = row.sequence.num_output_launched
                row.sequence.token_ids += [1] * (new + 1)
            if drafts:
                drafted = np.array(counts, np.int32)
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


def test_each_row_brings_all_drafts_of_a_step_unless_its_own_never_hold() -> None:
    device = Device(DraftLengths("test", (4,), 8), 3, seconds_per_draft=0.3e-3)
    device.run(600, (0.95, 0.0, 0.5))
    late = np.array([counts for counts, chosen in zip(device.of_rows, device.chosen, strict=True) if chosen][-300:])
    assert len(late) == 300
    good, bad, middling = late.T
    assert np.mean(good) > 3.9
    assert np.mean(bad > 0) < 0.1 and bad.any()  # now and then it is looked whether that has changed
    assert np.mean(middling) > 3.9  # the step is not shorter for fewer
    # A row whose drafts become right is noticed, and one whose drafts become wrong.
    device.run(300, (0.0, 0.95, 0.95))
    good, bad, middling = np.array(device.of_rows[-100:]).T
    assert np.mean(bad) > 3.9 and np.mean(middling) > 3.9
    assert np.mean(good > 0) < 0.2


def test_rows_that_draft_nothing_count_as_wrong_ones_for_what_drafts_save() -> None:
    lengths = DraftLengths("test", (4,), 8)
    device = Device(lengths, 8, seconds_per_draft=0.3e-3)
    device.run(600, (0.95,) + (0.0,) * 7)
    assert sum(map(bool, device.of_rows[-1])) <= 3
    saving = lengths.saving(8)
    assert saving is not None
    assert saving < 0.5 * (PLAIN - (PLAIN + 4 * 0.3e-3) / sum(0.95**place for place in range(5)))


def test_more_rows_than_are_compiled_bring_none() -> None:
    lengths = DraftLengths("test", (4,), 2)
    assert {lengths.choose(make_sequences(3)) for _ in range(20)} == {0}


def test_without_adapting_every_step_brings_as_many_as_it_can() -> None:
    device = Device(DraftLengths("test", (2, 4), 8, adaptive=False), 2, seconds_per_draft=1.0)
    device.run(20, acceptance=0.0)
    assert set(device.chosen) == {4}


def test_what_drafts_save_with_a_token_is_known_when_steps_of_all_kinds_were_seen() -> None:
    lengths = DraftLengths("test", (2, 4), 8)
    device = Device(lengths, 5, seconds_per_draft=1e-3)
    assert lengths.saving(5) is None
    device.run(4, acceptance=0.9)
    assert lengths.saving(5) is None
    device.run(500, acceptance=0.9)
    saving = lengths.saving(5)
    tokens = sum(0.9**position for position in range(5))
    assert saving == pytest.approx(PLAIN / 1.02 - (PLAIN + 4e-3) / tokens, rel=0.1)
    assert lengths.saving(8) == saving  # which is padded to the same size
    assert lengths.saving(4) is None
    assert lengths.saving(9) == -math.inf  # more rows than may draft
    device.run(600, acceptance=0.0)
    saving = lengths.saving(5)
    assert saving is not None
    assert saving < 0


def test_only_who_is_ready_drafts_and_the_others_count_as_without() -> None:
    lengths = DraftLengths("test", (4,), 8)
    device = Device(lengths, 8, seconds_per_draft=1e-3)  # 1.4 times as long
    device.run(300, acceptance=0.9)
    assert lengths.choose(device.sequences[:4], others=4) == 4  # 2.5 tokens for a row, of the most that there can be
    assert lengths.choose(device.sequences[:1], others=7) == 0
    assert lengths.choose([], others=8) == 0
    assert lengths.choose(device.sequences, others=1) == 0  # nine rows


def test_a_look_at_what_drafts_bring_counts_what_it_takes_to_make_somebody_ready() -> None:
    spaces = []
    for seconds in (0.0, 4 * PLAIN):
        lengths = DraftLengths("test", (4,), 8)
        device = Device(lengths, 4, seconds_per_draft=1e-3)
        device.run(300, acceptance=0.0)
        trial = Trial(tuple(device.sequences[:2]), seconds)
        chosen = [lengths.choose([], 4, trial) for _ in range(2000)]
        looks = [place for place, length in enumerate(chosen) if length]
        spaces.append(looks[-1] - looks[-2])
        # What a look is expected to lose is a hundredth of the time from one to the next.
        lost = seconds / PLAIN + 1.4 - lengths.expected_tokens(trial.sequences, 4, 4)
        # (What steps take is seen through their noise.)
        assert spaces[-1] == pytest.approx(lost / 0.01, rel=0.01, abs=3)
    assert spaces[1] > 5 * spaces[0]


def test_steps_of_a_kind_that_was_not_seen_are_tried_by_whoever_can() -> None:
    lengths = DraftLengths("test", (4,), 8)
    sequences = make_sequences(4)
    rows = tuple(DecodeRow(sequence, 0, -1, -1) for sequence in sequences)
    for _ in range(5):
        assert lengths.choose(sequences) == 0 or lengths.saving(4) is None
        lengths.observe_step(ScheduledBatch(decode=rows, prefill=()), PLAIN)
    assert lengths.choose([], 4, Trial(tuple(sequences[:1]), 1.0)) == 4
    assert lengths.choose([], 4) == 0
