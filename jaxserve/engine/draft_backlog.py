"""What a drafter that reads prompts has not been shown of each sequence, and how it is. Host only."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from itertools import islice

from jaxserve.engine.draft_showing import ShowingSeconds
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.page_pool import PagePool
from jaxserve.engine.schedule import DecodeRow, PrefillChunk
from jaxserve.engine.sequence import Sequence

# The last token whose keys and values may be lacking when a sequence drafts: each draft begins with the last two tokens.
_TAKEN_ALONG = 1


class DraftBacklog:
    """Keeps `Sequence.num_unshown`, and which pages hold what the drafter makes of their tokens.

    The drafter's keys and values lie in pages of the same numbers as the target's. A page that was computed unshown is
    shared like any other: whoever takes it from the prefix tree has a backlog then, and when one sequence has caught up on
    it, all have.
    """

    def __init__(self, limits: SchedulerLimits, pages: PagePool) -> None:
        self._limits = limits
        self._pages = pages

    def take_cached(self, sequence: Sequence, before: int) -> None:
        """Counts what a sequence has found in the prefix tree, where `before` of its tokens were computed."""
        sequence.num_unshown += sequence.num_computed - before
        self._skip_shown(sequence, sequence.num_computed)

    def count_prompts(self, decode: Iterable[DecodeRow], prefill: Iterable[PrefillChunk], *, is_shown: bool) -> None:
        """Counts a step with prompts, which the drafter sees or not."""
        for row in decode:
            self._count_row(row.sequence, is_seen=is_shown, may_lack=0)
        for chunk in prefill:
            sequence, length = chunk.sequence, len(chunk.token_ids)
            if sequence.num_known_in_flight and sequence.num_drafts_in_flight:
                sequence.num_unshown = 0  # it goes on from forced tokens: whatever was drafted, it is not part of it
            self._skip_shown(sequence, chunk.start)
            if sequence.num_unshown or not is_shown:
                sequence.num_unshown += length
            else:
                self._mark(sequence, chunk.start, chunk.start + length)

    def count_decoding(self, rows: Iterable[DecodeRow], *, is_drafting: bool) -> None:
        """Counts a step without prompts. One that drafts sees its rows' tokens, but not the last draft of each."""
        for row in rows:
            self._count_row(row.sequence, is_seen=is_drafting, may_lack=1 if row.num_drafts else 0)

    def take_verified(self, row: DecodeRow, count: int) -> None:
        """Takes in how many of a row's tokens counted: it is known then whether its last draft was one of them."""
        sequence = row.sequence
        # Where a later step brings drafts, its own last one may be lacking; forced tokens have taken the place of any.
        if count <= row.num_drafts and not (sequence.num_drafts_in_flight or sequence.num_known_in_flight):
            sequence.num_unshown = max(0, sequence.num_unshown - 1)
        self._mark_last(sequence)

    def split(self, rows: Iterable[DecodeRow]) -> tuple[list[DecodeRow], list[DecodeRow]]:
        """Of rows that decode: those that can draft, and those that can catch up, the least behind first."""
        ready: list[DecodeRow] = []
        behind: list[DecodeRow] = []
        for row in rows:
            sequence = row.sequence
            if sequence.num_unshown > _TAKEN_ALONG:
                self._skip_shown(sequence, sequence.num_computed - 1)
            if sequence.num_unshown <= _TAKEN_ALONG:
                ready.append(row)
            elif not sequence.num_drafts_in_flight:  # else it is known a step later how far it is
                behind.append(row)
        behind.sort(key=lambda row: row.sequence.num_unshown)
        return ready, behind

    def seconds(self, counts: Rows[int], seconds: ShowingSeconds) -> float:
        """What it takes at most to show as many tokens of each of some rows."""
        most = self._limits.max_num_batched_tokens
        parts = [min(most, count - first) for count in counts for first in range(0, count, most)]
        return sum(seconds(0, sum(group)) for group in self._groups(parts))

    def affordable(self, counts: Rows[int], seconds: ShowingSeconds, most: float) -> tuple[int, float]:
        """How many of the first rows can be shown as many tokens as this in `most` seconds, and what they take.

        Args:
            counts: each fits a step.
        """
        taken = before = 0.0  # with the group that is being filled, and without it
        used = num_rows = 0
        for number, count in enumerate(counts):
            if num_rows == self._limits.max_prefill_rows or used + count > self._limits.max_num_batched_tokens:
                before, used, num_rows = taken, 0, 0
            used, num_rows = used + count, num_rows + 1
            with_row = before + seconds(0, used)
            if with_row > most:
                return number, taken
            taken = with_row
        return len(counts), taken

    def show(self, rows: Rows[DecodeRow], counts: Rows[int]) -> tuple[tuple[PrefillChunk, ...], ...]:
        """Counts as seen so many of the tokens that each row is behind, from the first; groups in which to show them."""
        found = (self._chunk(row, count) for row, count in zip(rows, counts, strict=True))
        chunks = [chunk for chunk in found if chunk is not None]
        rest = iter(chunks)
        groups = self._groups([len(chunk.token_ids) for chunk in chunks])
        return tuple(tuple(islice(rest, len(group))) for group in groups)

    def _groups(self, counts: Rows[int]) -> list[list[int]]:
        """Rows in turn, in groups that each fit a step."""
        groups: list[list[int]] = []
        used = 0
        for count in counts:
            is_full = not groups or len(groups[-1]) == self._limits.max_prefill_rows
            if is_full or used + count > self._limits.max_num_batched_tokens:
                groups.append([])
                used = 0
            groups[-1].append(count)
            used += count
        return groups

    def _chunk(self, row: DecodeRow, count: int) -> PrefillChunk | None:
        """None: others have just caught up on these pages."""
        sequence = row.sequence
        computed = sequence.num_computed - 1  # the step itself computes one more
        end = computed - sequence.num_unshown + count
        self._skip_shown(sequence, computed)
        start = computed - sequence.num_unshown
        if start >= end:
            return None
        sequence.num_unshown = computed - end
        self._mark(sequence, start, end)
        tokens = tuple(sequence.token_ids[start:end])
        return PrefillChunk(sequence, row.slot, start, tokens, tuple(sequence.pages), samples=False, output_index=0)

    def _count_row(self, sequence: Sequence, *, is_seen: bool, may_lack: int) -> None:
        if is_seen and sequence.num_unshown <= _TAKEN_ALONG:
            sequence.num_unshown = may_lack
            self._mark_last(sequence)
        else:
            sequence.num_unshown += 1

    def _skip_shown(self, sequence: Sequence, computed: int) -> None:
        """Takes pages for seen that others have shown, as long as they are the next ones of a sequence's backlog."""
        size = self._limits.page_size
        seen = computed - sequence.num_unshown
        while seen < computed and self._pages.is_shown(sequence.pages[seen // size]):
            seen = min(computed, (seen // size + 1) * size)
        sequence.num_unshown = computed - seen

    def _mark(self, sequence: Sequence, start: int, end: int) -> None:
        size = self._limits.page_size
        self._pages.mark_shown(sequence.pages[start // size : end // size])

    def _mark_last(self, sequence: Sequence) -> None:
        """Of a row that is seen, the last page that is full: it fills one at most with each step."""
        full = (sequence.num_computed - sequence.num_unshown) // self._limits.page_size
        self._pages.mark_shown(sequence.pages[max(0, full - 1) : full])
