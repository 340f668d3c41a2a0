"""What a step drafts, and what a drafter that reads prompts is shown of it. Host only."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

from jaxserve.engine.draft_backlog import DraftBacklog
from jaxserve.engine.draft_lengths import DraftLengths, Trial
from jaxserve.engine.draft_rows import take_verified, with_drafts
from jaxserve.engine.draft_showing import DraftShowing, PromptPieces, ShowingSeconds
from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.engine.head_showing import HeadShowing
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.page_pool import PagePool
from jaxserve.engine.prefill_budget import PrefillBudget
from jaxserve.engine.schedule import DecodeRow, PrefillChunk, SampledTokens, ScheduledBatch
from jaxserve.engine.sequence import Sequence, SequenceStatus

# Tokens that a row is behind at most to catch up at once: those of a few steps without drafts. Of more it is shown a part in
# a step, so that the others do not wait long.
_FEW_TOKENS = 64
_LEAST_SHARE = 0.25  # of a step, that is left when what catching up took is taken off


class DraftPlan(NamedTuple):
    """See `ScheduledBatch`; `decode` are its rows, with their drafts."""

    decode: list[DecodeRow]
    num_drafts: int = 0
    is_shown: bool = True
    catch_up: tuple[tuple[PrefillChunk, ...], ...] = ()


class _CatchUp(NamedTuple):
    """Rows that are to catch up in a step.

    Attributes:
        rows: that can draft then.
        parts: that will be shown a part of what they miss, or all of it, and how many tokens of each.
        seconds: that `rows` take, and `parts`.
    """

    rows: list[DecodeRow]
    parts: list[tuple[DecodeRow, int]]
    seconds: tuple[float, float]


class DraftPlanner:
    """Completes the scheduler's steps by what speculation adds to them.

    Args:
        showing_seconds: what it takes to show the drafter a step with prompts; None: it is shown none, since it reads none.
        budget: of prompt tokens.
    """

    def __init__(
        self,
        lengths: DraftLengths,
        limits: SchedulerLimits,
        pages: PagePool,
        showing_seconds: ShowingSeconds | None,
        budget: PrefillBudget,
    ) -> None:
        self._lengths = lengths
        self._limits = limits
        self._pages = pages
        self._showing = self._head = None
        if showing_seconds is not None:
            if lengths.reads_states:
                self._head = HeadShowing(lengths, showing_seconds)
            else:
                self._showing = DraftShowing(lengths, showing_seconds, self._behind_seconds)
        self._backlog = DraftBacklog(limits, pages)
        self._budget = budget
        # Of the step that is being planned, or of the one before.
        self._waiting = 0  # prompt tokens
        self._decode: list[DecodeRow] = []

    @property
    def stats(self) -> SpeculativeStats:
        return self._lengths.stats

    def pays(self, num_decode: int) -> bool:
        """Whether drafts were seen to be worth what showing prompts takes, beside so many rows: then prompts come in large
        pieces, for a step with some brings no drafts and is shown. False where prompts are not shown."""
        showing = self._head or self._showing
        return showing is not None and showing.is_known_to_pay(num_decode + 1)

    def offer_prompts(self, waiting: int) -> None:
        """Tells of a step before it is planned how many prompt tokens it could have had, its own among them."""
        self._waiting = waiting

    def plan(self, decode: list[DecodeRow], prefill: list[PrefillChunk]) -> DraftPlan:
        """Decides about a step whose rows and chunks are launched with it."""
        self._decode = decode
        if prefill:  # they leave a step no time to spare: it brings no drafts
            return self._plan_prompts(decode, prefill)
        if not decode:
            return DraftPlan(decode)
        if self._head is not None:
            return self._plan_with_head(decode, self._head)
        if self._showing is None:
            length = self._lengths.choose([row.sequence for row in decode])
            return DraftPlan(*self._with_drafts(decode, decode, length))
        return self._plan_decoding(decode, self._showing)

    def take_cached(self, sequence: Sequence, before: int) -> None:
        """Takes in that a sequence goes on with pages of the prefix tree, where `before` of its tokens were computed."""
        if self._showing is not None:
            self._backlog.take_cached(sequence, before)

    def take_verified(self, batch: ScheduledBatch, sampled: SampledTokens) -> None:
        """Takes in what came of a step with drafts, before its tokens."""
        self._lengths.observe_tokens(batch, sampled)
        take_verified(batch, sampled)
        if self._showing is not None:
            for row, count in zip(batch.decode, sampled.counts.tolist(), strict=True):
                if row.sequence.status is SequenceStatus.RUNNING:
                    self._backlog.take_verified(row, count)

    def count(self, drafted: int, kept: int, taken: int, *, is_end: bool) -> None:
        """Counts what an answer took of a row's drafts: as `DraftCounts.add`."""
        self._lengths.counts.add(drafted, kept, taken, is_end=is_end)

    def observe_step(self, batch: ScheduledBatch, seconds: float) -> None:
        """Learns from what a step took."""
        # Where each step with drafts is one that some row catches up for, there is nothing else to learn from. What that
        # took is an estimate: where it is too high, the rest of the step must not seem to take nothing.
        catching_up = self._seconds([len(chunk.token_ids) for group in batch.catch_up for chunk in group])
        self._lengths.observe_step(batch, max(_LEAST_SHARE * seconds, seconds - catching_up))

    def is_tried(self, batch: ScheduledBatch) -> bool:
        """Whether prompts were shown in a step to find out what drafts bring: most steps like it will be shown none."""
        showing = self._head or self._showing
        if showing is None or not (batch.prefill and batch.is_shown):
            return False
        return not showing.is_known_to_pay(len(batch.decode) + len(batch.prefill))

    def _plan_prompts(self, decode: list[DecodeRow], prefill: list[PrefillChunk]) -> DraftPlan:
        showing = self._head or self._showing
        if showing is None:
            return DraftPlan(decode)
        is_shown = showing.shows_prompts(len(decode), len(prefill), self._pieces(len(decode), prefill))
        if self._showing is None:
            return DraftPlan(decode, is_shown=is_shown)
        self._backlog.count_prompts(decode, prefill, is_shown=is_shown)
        return DraftPlan(decode, is_shown=is_shown)

    def _pieces(self, num_decode: int, prefill: list[PrefillChunk]) -> PromptPieces:
        """What drafts would make of a step's prompts: a part of a larger piece, as long as they do not pay."""
        tokens = sum(len(chunk.token_ids) for chunk in prefill)
        larger = self._budget.piece_between_drafts(num_decode, self._waiting)
        if not num_decode or larger.tokens <= tokens:
            return PromptPieces(tokens)
        share = tokens / larger.tokens
        return PromptPieces(
            larger.tokens, share, share * larger.seconds - self._budget.added_seconds(num_decode, tokens)
        )

    def _plan_with_head(self, rows: list[DecodeRow], head: HeadShowing) -> DraftPlan:
        """Drafts for all, if the head was shown what came before them."""
        may_draft, is_shown = head.shows_decoding(len(rows))
        drafting = rows if may_draft else []
        length = self._lengths.choose([row.sequence for row in drafting], len(rows) - len(drafting))
        rows, num_drafts = self._with_drafts(rows, drafting, length)
        sequences = [row.sequence for row in drafting] if num_drafts else []
        head.count_decoding(len(rows), self._lengths.expected_tokens(sequences, num_drafts, len(rows)))
        return DraftPlan(rows, num_drafts, is_shown=is_shown)

    def _plan_decoding(self, rows: list[DecodeRow], showing: DraftShowing) -> DraftPlan:
        """Drafts for those who can, and for those who are worth being shown what they miss."""
        ready, behind = self._backlog.split(rows)
        due = self._due(len(rows), behind, showing)
        drafting = ready + due.rows
        may_try = not drafting and self._lengths.may_draft(len(rows))
        tried, trial = self._trial(behind, showing) if may_try else ([], Trial())
        sequences = [row.sequence for row in drafting]
        length = self._lengths.choose(sequences, len(rows) - len(drafting), trial)
        if length and not drafting:
            shown = tried
            if all(count == row.sequence.num_unshown for row, count in tried):
                drafting = [row for row, _ in tried]
            else:
                length = 0  # there is more to be shown, at the next time
        else:
            shown = due.parts
            showing.spend(len(rows), due.seconds[1])
            if length:
                shown = [(row, row.sequence.num_unshown) for row in due.rows] + shown
                showing.spend(len(rows), due.seconds[0])
        catch_up = self._backlog.show([row for row, _ in shown], [count for _, count in shown])
        rows, num_drafts = self._with_drafts(rows, drafting, length)
        self._backlog.count_decoding(rows, is_drafting=num_drafts > 0)
        sequences = [row.sequence for row in drafting] if num_drafts else []
        showing.count_decoding(len(rows), self._lengths.expected_tokens(sequences, num_drafts, len(rows)))
        return DraftPlan(rows, num_drafts, catch_up=catch_up)

    def _due(self, num_rows: int, behind: list[DecodeRow], showing: DraftShowing) -> _CatchUp:
        """Rows that have waited long enough for what they take to catch up, the least behind first."""
        if not behind or not self._lengths.may_draft(num_rows) or not showing.pays(num_rows):
            showing.wait(num_rows, 0, 0.0)
            return _CatchUp([], [], (0.0, 0.0))
        counts = [row.sequence.num_unshown for row in behind]
        showing.wait(num_rows, len(behind), self._seconds(counts))
        most = self._limits.max_num_batched_tokens
        num_few = sum(count <= min(_FEW_TOKENS, most) for count in counts)
        at_once = showing.may_spend_at_once(most)
        few, spent = self._backlog.affordable(counts[:num_few], showing.seconds, at_once)
        parts: list[tuple[DecodeRow, int]] = []
        used, taken = 0, 0.0  # one group holds them all
        if few == num_few:
            for row in behind[few : few + self._limits.max_prefill_rows]:
                part = min(row.sequence.num_unshown, most - used)
                if not part or spent + showing.seconds(0, used + part) > at_once:
                    break
                parts.append((row, part))
                used += part
                taken = showing.seconds(0, used)
        return _CatchUp(behind[:few], parts, (spent, taken))

    def _seconds(self, counts: Rows[int]) -> float:
        """What it takes at most to show so many tokens of each of some rows."""
        if self._showing is None:
            return 0.0
        return self._backlog.seconds(counts, self._showing.seconds)

    def _behind_seconds(self) -> float:
        return self._seconds([row.sequence.num_unshown for row in self._decode])

    def _trial(self, behind: list[DecodeRow], showing: DraftShowing) -> tuple[list[tuple[DecodeRow, int]], Trial]:
        """The row that is least behind, and those that are shown with it in the same time, to see what drafts bring.

        Returns:
            Rows with how many tokens each is to be shown: all that it misses, or as many as fit a step.
        """
        if not behind:
            return [], Trial()
        room = self._limits.max_num_batched_tokens
        tokens = min(room, behind[0].sequence.num_unshown)
        rows, seconds = [(behind[0], tokens)], showing.seconds(0, tokens)
        for row in behind[1 : self._limits.max_prefill_rows]:
            count = row.sequence.num_unshown
            tokens += count
            if tokens > room or showing.seconds(0, tokens) > seconds:
                break
            rows.append((row, count))
        return rows, Trial(tuple(row.sequence for row, _ in rows), seconds)

    def _with_drafts(
        self, rows: list[DecodeRow], drafting: Rows[DecodeRow], length: int
    ) -> tuple[list[DecodeRow], int]:
        """Lets some of the rows bring drafts; with the number that the step is compiled for."""
        if not length:
            return rows, 0
        counts = self._lengths.of_rows([row.sequence for row in drafting], length)
        wanted = {row.slot: count for row, count in zip(drafting, counts, strict=True)}
        rows = [with_drafts(row, wanted.get(row.slot, 0), self._limits, self._pages) for row in rows]
        return rows, length if any(row.num_drafts for row in rows) else 0
