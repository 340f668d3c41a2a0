"""A fake device whose drafter has a memory: what it was shown, page by page, so that it is known what it drafts from."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.schedule import PrefillChunk, ScheduledBatch
from tests.engine.drafting_device import DraftingRunner
from tests.engine.fake_device import FakePending, _Slot


def chain(before: int, token: int) -> int:
    """What the drafter makes of a token: it depends on what it has made of all before it."""
    return zlib.crc32(np.array([before, token], np.int64).tobytes())


class SeeingRunner(DraftingRunner):
    """Keeps the drafter's pages as the real one does, and checks them wherever a row drafts.

    Attributes:
        num_checked: rows that brought drafts.
        num_shown: tokens of prompts and of rows that caught up.
        num_lost: of `num_checked`, those whose drafter had not seen all of their tokens, each after all before it.
    """

    def __init__(self, limits: SchedulerLimits, accuracy: float, seed: int) -> None:
        super().__init__(limits, accuracy, seed)
        self._limits = limits
        self._seen = [[-1] * limits.page_size for _ in range(limits.num_pages)]
        self.num_checked = self.num_lost = self.num_shown = 0

    def launch_forward(self, batch: ScheduledBatch) -> FakePending:  # pyright: ignore
        for row in batch.decode:
            if row.new_page >= 0:
                self._slots[row.slot].page_table[row.new_page_index :] = [row.new_page]
        for group in batch.catch_up:
            assert len(group) <= self._limits.max_prefill_rows
            assert sum(len(chunk.token_ids) for chunk in group) <= self._limits.max_num_batched_tokens
            self._show_chunks(group)
        slots = [self._slots[row.slot] for row in batch.decode]
        if batch.num_drafts:
            for row, slot in zip(batch.decode, slots, strict=True):
                self._show_last_two(slot)
                if row.num_drafts:
                    self.num_checked += 1
                    self.num_lost += not self._has_seen_all(slot)
        elif batch.prefill and batch.is_shown:
            for slot in slots:
                self._show_last_two(slot)
            self._show_chunks(batch.prefill)
        for copy in batch.copies:
            if not copy.to_host:
                self._seen[copy.page] = [-1] * self._page_size
        logits = super().launch_forward(batch)
        if batch.num_drafts:
            for row in logits.rows:  # all drafts but the last are read as well
                slot = self._slots[row.slot]
                for ahead, token in enumerate(row.inputs[1:-1], start=1):
                    self._see(slot.page_table, slot.kv_len + ahead, token)
        return logits

    def _show_chunks(self, chunks: Iterable[PrefillChunk]) -> None:
        for chunk in chunks:
            self.num_shown += len(chunk.token_ids)
            for place, token in enumerate(chunk.token_ids, start=chunk.start):
                self._see(chunk.pages, place, token)

    def _show_last_two(self, slot: _Slot) -> None:
        for place in (slot.kv_len - 1, slot.kv_len):
            self._see(slot.page_table, place, self._tokens(slot)[place])

    def _tokens(self, slot: _Slot) -> tuple[int, ...]:
        return (*self._read(slot), slot.last_token)

    def _see(self, pages: Sequence[int], place: int, token: int) -> None:
        size = self._page_size
        before = self._seen[pages[(place - 1) // size]][(place - 1) % size] if place else 0
        self._seen[pages[place // size]][place % size] = chain(before, token)

    def _has_seen_all(self, slot: _Slot) -> bool:
        wanted = 0
        for place, token in enumerate(self._tokens(slot)):
            wanted = chain(wanted, token)
            if self._seen[slot.page_table[place // self._page_size]][place % self._page_size] != wanted:
                return False
        return True
