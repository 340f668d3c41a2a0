"""A fake device that drafts: right tokens as often as it is told, so that what drafts do to pages and slots shows."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.schedule import DraftedTokens, SampledTokens, ScheduledBatch
from tests.engine.fake_device import VOCAB_SIZE, FakePending, FakeRunner, nearest_allowed, next_token


@dataclass(frozen=True)
class _Row:
    """A row's last token and its drafts, and what the device would say after each of them."""

    slot: int
    inputs: tuple[int, ...]
    said: tuple[int, ...]


@dataclass(frozen=True)
class _Drafted:
    batch: ScheduledBatch
    rows: tuple[_Row, ...]


class DraftingRunner(FakeRunner):
    """Writes all drafts of a row before it knows which are kept, as the device does.

    Args:
        accuracy: probability that a draft is the token that the device would say if it might say anything.
    """

    def __init__(self, limits: SchedulerLimits, accuracy: float, seed: int) -> None:
        super().__init__(limits)
        self._rng = random.Random(seed)
        self._accuracy = accuracy
        self.num_kept = 0

    def launch_forward(self, batch: ScheduledBatch) -> FakePending | _Drafted:  # pyright: ignore
        if not batch.num_drafts:
            return super().launch_forward(batch)
        self.launched.append(batch)
        self._copy(batch)
        rows: list[_Row] = []
        for row in batch.decode:
            slot = self._slots[row.slot]
            if row.new_page >= 0:
                slot.page_table[row.new_page_index :] = [row.new_page]
            start = slot.kv_len
            inputs, said = [slot.last_token], []
            while True:
                self._write(slot, inputs[-1])
                said.append(next_token(self._read(slot), slot.seed, slot.counter + len(said)))
                if len(said) > row.num_drafts:
                    break
                inputs.append(said[-1] if self._rng.random() < self._accuracy else (said[-1] + 1) % VOCAB_SIZE)
            slot.kv_len = start
            rows.append(_Row(row.slot, tuple(inputs), tuple(said)))
        return _Drafted(batch, tuple(rows))

    def fetch_drafts(self, logits: _Drafted) -> DraftedTokens:  # pyright: ignore
        tokens = np.full((len(logits.rows), logits.batch.num_drafts), -7, np.int32)
        for place, row in enumerate(logits.rows):
            tokens[place, : len(row.inputs) - 1] = row.inputs[1:]
        return DraftedTokens(tokens, np.array([len(row.inputs) - 1 for row in logits.rows], np.int32))

    def launch_sample(  # pyright: ignore
        self, logits: FakePending | _Drafted, masks: np.ndarray | None = None
    ) -> tuple[ScheduledBatch, SampledTokens]:
        if not isinstance(logits, _Drafted):
            return super().launch_sample(logits, masks)
        width = logits.batch.num_drafts + 1
        tokens, counts = np.full((len(logits.rows), width), -7, np.int32), np.ones(len(logits.rows), np.int32)
        for place, row in enumerate(logits.rows):
            kept: list[int] = []
            for position, token in enumerate(row.said):
                word = -1 if masks is None else int(masks[place * width + position, 0])
                kept.append(nearest_allowed(token, word))
                if position + 1 == len(row.inputs) or row.inputs[position + 1] != kept[-1]:
                    break
            slot = self._slots[row.slot]
            slot.kv_len += len(kept)
            slot.counter += len(kept)
            slot.last_token = kept[-1]
            tokens[place, : len(kept)] = kept
            counts[place] = len(kept)
            self.num_kept += len(kept) - 1
        drafted = np.array([len(row.inputs) - 1 for row in logits.rows], np.int32)
        return logits.batch, SampledTokens(tokens, counts, drafted)
