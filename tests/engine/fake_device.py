"""A runner without a device or a model: it keeps pages and slots as the real one does, and its tokens are hashes.

The next token is a hash of what the sequence's pages hold, of its seed and of its random counter. Whatever goes wrong
with pages, slots, chunks or counters changes a token, and what a request gives alone is known exactly (`solo_tokens`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.schedule import DraftedTokens, SampledTokens, ScheduledBatch
from jaxserve.engine.scheduler import SchedulerLimits

VOCAB_SIZE = 32


def next_token(context: Sequence[int], seed: int, counter: int) -> int:
    words = np.array([*context, seed & 0xFFFFFFFF, seed >> 32, counter], np.int64)
    return zlib.crc32(words.tobytes()) % VOCAB_SIZE


def solo_tokens(prompt: Sequence[int], seed: int, max_output: int, stop_token_ids: Collection[int] = ()) -> list[int]:
    """What a request gives when nothing else runs."""
    tokens = list(prompt)
    for counter in range(max_output):
        tokens.append(next_token(tokens, seed, counter))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[len(prompt) :]


def nearest_allowed(token: int, word: int) -> int:
    """The first token from `token` on, round the vocabulary, whose bit is set."""
    allowed = [bit for bit in range(VOCAB_SIZE) if word >> bit & 1]
    return min(allowed, key=lambda other: (other - token) % VOCAB_SIZE)


@dataclass
class _Slot:
    page_table: list[int]
    kv_len: int
    seed: int
    counter: int
    last_token: int = -1


@dataclass(frozen=True)
class FakePending:
    batch: ScheduledBatch
    rows: tuple[tuple[_Slot, tuple[int, ...]], ...]  # of each row: its slot, and what attention sees


class FakeRunner:
    """Runs steps in the order of their launch, at once; `fetch` only hands their tokens out.

    Args:
        before_fetch: called with the number of steps fetched so far; may wait or raise.

    Attributes:
        launched: every step, in order.
        is_closed: whether its engine has ended.
    """

    def __init__(self, limits: SchedulerLimits, before_fetch: Callable[[int], None] = lambda step: None) -> None:
        self._page_size = limits.page_size
        self._pages = [[-1] * limits.page_size for _ in range(limits.num_pages)]
        self._host_pages: dict[int, list[int]] = {}
        self._slots: dict[int, _Slot] = {}
        self._max_num_seqs = limits.max_num_seqs
        self._before_fetch = before_fetch
        self._num_fetched = 0
        self.launched: list[ScheduledBatch] = []
        self.is_closed = False

    def launch_forward(self, batch: ScheduledBatch) -> FakePending:
        self.launched.append(batch)
        self._copy(batch)
        for chunk in batch.prefill:
            slot = _Slot(list(chunk.pages), chunk.start, chunk.sequence.seed, chunk.output_index)
            self._slots[self._check_slot(chunk.slot)] = slot
            for token in chunk.token_ids:
                self._write(slot, token)
        for row in batch.decode:
            slot = self._slots[row.slot]
            if row.new_page >= 0:
                slot.page_table[row.new_page_index :] = [row.new_page]
            self._write(slot, slot.last_token)
        rows = [*batch.decode, *batch.prefill]
        return FakePending(batch, tuple((self._slots[row.slot], self._read(self._slots[row.slot])) for row in rows))

    def fetch_drafts(self, logits: FakePending) -> DraftedTokens:
        raise TypeError(f"a step of {len(logits.batch.decode)} rows brings no drafts here")

    def launch_sample(
        self, logits: FakePending, masks: np.ndarray | None = None
    ) -> tuple[ScheduledBatch, SampledTokens]:
        counts = [1] * len(logits.batch.decode) + [int(chunk.samples) for chunk in logits.batch.prefill]
        tokens = np.full((len(counts), 1), -7, np.int32)
        for row, (slot, context) in enumerate(logits.rows):
            if counts[row]:
                token = next_token(context, slot.seed, slot.counter)
                slot.last_token = tokens[row] = token if masks is None else nearest_allowed(token, int(masks[row, 0]))
                slot.counter += 1
        return logits.batch, SampledTokens(tokens, np.array(counts, np.int32))

    def is_ready(self, pending: tuple[ScheduledBatch, SampledTokens]) -> bool:
        del pending
        return True

    def fetch(self, pending: tuple[ScheduledBatch, SampledTokens]) -> SampledTokens:
        self._before_fetch(self._num_fetched)
        self._num_fetched += 1
        return pending[1]

    def close(self) -> None:
        self.is_closed = True

    def _copy(self, batch: ScheduledBatch) -> None:
        for copy in batch.copies:
            if copy.to_host:
                self._host_pages[copy.place] = list(self._pages[copy.page])
            else:
                self._pages[copy.page] = list(self._host_pages[copy.place])

    def _check_slot(self, slot: int) -> int:
        if not 0 <= slot < self._max_num_seqs:
            raise IndexError(f"{slot=} of {self._max_num_seqs}")
        return slot

    def _write(self, slot: _Slot, token: int) -> None:
        page = slot.page_table[slot.kv_len // self._page_size]
        self._pages[page][slot.kv_len % self._page_size] = token
        slot.kv_len += 1

    def _read(self, slot: _Slot) -> tuple[int, ...]:
        cells = [self._pages[page] for page in slot.page_table]
        return tuple(token for page in cells for token in page)[: slot.kv_len]
