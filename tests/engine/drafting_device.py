"""A fake device that drafts: right tokens as often as it is told, so that what drafts do to pages and slots shows."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.schedule import SampledTokens, ScheduledBatch
from tests.engine.fake_device import VOCAB_SIZE, FakePending, FakeRunner, next_token


@dataclass(frozen=True)
class _Drafted:
    batch: ScheduledBatch
    sampled: SampledTokens


class DraftingRunner(FakeRunner):
    """Writes all drafts of a row before it knows which are kept, as the device does.

    Args:
        accuracy: probability that a draft is the right token.
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
        width = batch.num_drafts + 1
        tokens, counts = np.full((len(batch.decode), width), -7, np.int32), np.ones(len(batch.decode), np.int32)
        for place, row in enumerate(batch.decode):
            slot = self._slots[row.slot]
            if row.new_page >= 0:
                slot.page_table[row.new_page_index :] = [row.new_page]
            start = slot.kv_len
            inputs, kept = [slot.last_token], []
            for _ in range(row.num_drafts):
                self._write(slot, inputs[-1])
                right = next_token(self._read(slot), slot.seed, slot.counter + len(inputs) - 1)
                inputs.append(right if self._rng.random() < self._accuracy else (right + 1) % VOCAB_SIZE)
            self._write(slot, inputs[-1])
            for count in range(1, len(inputs) + 1):
                slot.kv_len = start + count
                kept.append(next_token(self._read(slot), slot.seed, slot.counter + count - 1))
                if count == len(inputs) or inputs[count] != kept[-1]:
                    break
            slot.counter += len(kept)
            slot.last_token = kept[-1]
            tokens[place, : len(kept)] = kept
            counts[place] = len(kept)
            self.num_kept += len(kept) - 1
        drafted = np.array([row.num_drafts for row in batch.decode], np.int32)
        return _Drafted(batch, SampledTokens(tokens, counts, drafted))

    def launch_sample(  # pyright: ignore
        self, logits: FakePending | _Drafted, masks: np.ndarray | None = None
    ) -> tuple[ScheduledBatch, SampledTokens]:
        if isinstance(logits, _Drafted):
            return logits.batch, logits.sampled
        return super().launch_sample(logits, masks)
