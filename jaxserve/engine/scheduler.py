"""Iteration-level scheduling: who computes what in the next step. Host only; imports no jax."""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable
from itertools import islice

from jaxserve.engine.admission import Admission
from jaxserve.engine.draft_lengths import DraftLengths
from jaxserve.engine.draft_planner import DraftPlan, DraftPlanner
from jaxserve.engine.draft_showing import ShowingSeconds
from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.engine.endings import take_tokens
from jaxserve.engine.forced_tokens import begin_jump, choose_jumps
from jaxserve.engine.host_pages import HostPages
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.logprobs import take_prompt_logprobs, told_logprobs, told_of_prompt
from jaxserve.engine.page_pool import PagePool
from jaxserve.engine.prefill_budget import PrefillBudget
from jaxserve.engine.prefill_sizes import PrefillSizes
from jaxserve.engine.prefix_cache import PageNode
from jaxserve.engine.request import FinishReason, RequestOutput
from jaxserve.engine.schedule import DecodeRow, LogprobRows, PrefillChunk, SampledTokens, ScheduledBatch
from jaxserve.engine.sequence import Sequence, SequenceStatus
from jaxserve.engine.step_pace import StepPace
from jaxserve.engine.waiting_queue import SchedulingOrder, WaitingQueue, turn_of


class Scheduler:
    """Decode first, then prefill chunks in the order of their turns, under a token budget.

    A sequence that needs a page when none is free takes those of the one whose turn comes last, which starts over later
    from its known tokens (recomputation). The first in line can always preempt every other, and no request is taken that
    does not fit alone, so that something always advances.

    Args:
        order: whose turn comes first.
        host_pages: where KV pages go that are evicted from the prefix tree; None: nowhere.
        pace: how much prefill a step may take on beside those who decode; None: as much as `limits` allow.
        drafting: how many tokens a step drafts; None: none.
        showing_seconds: what it takes to show prompts to what drafts; None: it reads none.
        clock: seconds, of which outputs tell when they came.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        prefix_caching: bool = True,
        host_pages: HostPages[PageNode] | None = None,
        order: SchedulingOrder | None = None,
        pace: StepPace | None = None,
        prefill_sizes: PrefillSizes | None = None,
        drafting: DraftLengths | None = None,
        showing_seconds: ShowingSeconds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.pages = PagePool(limits.num_pages, limits.page_size, caching=prefix_caching, host=host_pages)
        self.waiting = WaitingQueue(order or SchedulingOrder())
        self.running: list[Sequence] = []  # in the order of their turns
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generation_tokens = 0
        self.num_forced_tokens = 0  # of these, those that no step was needed for but their chunk
        self.finished: Counter[str] = Counter()
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._by_request: dict[str, list[Sequence]] = {}
        self._pending_outputs: list[RequestOutput] = []
        self._pace = pace
        self._admission = Admission(limits, self.pages)
        self._budget = PrefillBudget(limits, pace, prefill_sizes)
        self._drafting = (
            None if drafting is None else DraftPlanner(drafting, limits, self.pages, showing_seconds, self._budget)
        )
        self._clock = clock

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._pending_outputs)

    @property
    def speculative_stats(self) -> SpeculativeStats | None:
        """What was drafted so far; None: the engine does not speculate."""
        return None if self._drafting is None else self._drafting.stats

    @property
    def num_live_requests(self) -> int:
        return len(self._by_request)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            RequestError: if it can never be served, whatever else leaves.
        """
        self.limits.check_prompt(len(sequence.token_ids))
        self.waiting.add(sequence)
        self._by_request.setdefault(sequence.request.request_id, []).append(sequence)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one choice of it. Unknown and finished ones are left alone."""
        for sequence in list(self._by_request.get(request_id, ())):
            if index is None or sequence.index == index:
                self._finish(sequence, "abort")
                self._pending_outputs.append(RequestOutput(request_id, sequence.index, (), finish_reason="abort"))

    def fail(self, sequence: Sequence, message: str) -> None:
        """Ends one choice whose constraint cannot go on; one that has finished is left alone."""
        if sequence.status is not SequenceStatus.FINISHED:
            self._finish(sequence, "error")
            key = sequence.request.request_id, sequence.index
            self._pending_outputs.append(
                RequestOutput(*key, (), finish_reason="error", error=message, is_constraint_failure=True)
            )

    def schedule(self) -> ScheduledBatch:
        """Decides the next step and counts it as launched."""
        jumped = self._jump_forward()
        decode, unfinished = self._schedule_decode()
        if jumped:  # they come first, for they would have decoded in this step
            unfinished.sort(key=lambda sequence: sequence not in jumped)
        prefill: list[PrefillChunk] = []
        if unfinished or self.waiting:
            self.pages.begin_step(others_decode=bool(decode))
            prefill = self._schedule_prefill(unfinished, len(decode))
        plan = DraftPlan(decode) if self._drafting is None else self._drafting.plan(decode, prefill)
        return ScheduledBatch(
            decode=tuple(plan.decode),
            prefill=tuple(prefill),
            # Copies that were decided for a step in which nothing runs go with the next one.
            copies=self.pages.take_copies() if decode or prefill else (),
            num_drafts=plan.num_drafts,
            is_shown=plan.is_shown,
            catch_up=plan.catch_up,
        )

    def update(self, batch: ScheduledBatch, sampled: SampledTokens) -> list[RequestOutput]:
        """Takes in the tokens of a launched step, and says what is new for the clients."""
        outputs = self.take_pending_outputs()
        now = self._clock()
        tokens, counts = sampled.token_ids.tolist(), sampled.counts.tolist()
        width = sampled.token_ids.shape[1]
        rows = [row.sequence for row in batch.decode]
        if batch.prefill:
            rows += [chunk.sequence for chunk in batch.prefill]
            if sampled.prompt_logprobs is not None:
                take_prompt_logprobs(batch.prefill, sampled.prompt_logprobs)
        if self._drafting is not None and batch.num_drafts:
            self._drafting.take_verified(batch, sampled)
        for row, sequence in enumerate(rows):
            if not counts[row]:
                continue
            sequence.num_in_flight -= 1
            is_known = sequence.num_known_in_flight > 0
            sequence.num_known_in_flight -= is_known
            if sequence.status is SequenceStatus.FINISHED:
                self._release_if_idle(sequence)  # launched past its end: the token is discarded
                continue
            if is_known:
                continue  # it was forced, and the host did not wait for it
            new = tokens[row] if width == 1 else tokens[row][: counts[row]]
            output = self._append(sequence, new, sampled.logprobs, row * width, now)
            outputs.append(output)
            if self._drafting is not None and sampled.num_drafts is not None:
                is_end = output.finish_reason is not None
                self._drafting.count(
                    int(sampled.num_drafts[row]), counts[row] - 1, len(output.token_ids), is_end=is_end
                )
        return outputs

    def observe_step(self, batch: ScheduledBatch, seconds: float) -> None:
        """Learns from what a step took."""
        if any(not copy.to_host for copy in batch.copies):
            return  # it had more to do than others of its kind
        if self._pace is not None and not batch.catch_up:
            self._pace.observe(batch, seconds, had_more=self._drafting is not None and self._drafting.is_tried(batch))
        if self._drafting is not None:
            self._drafting.observe_step(batch, seconds)

    def take_pending_outputs(self) -> list[RequestOutput]:
        """Outputs that no step gave: of aborts, and of forced tokens."""
        outputs, self._pending_outputs = self._pending_outputs, []
        return outputs

    def _append(
        self, sequence: Sequence, tokens: list[int], logprobs: LogprobRows | None, row: int, now: float
    ) -> RequestOutput:
        """Takes in what a step gave a sequence, up to its end: what comes after that is discarded.

        Args:
            row: of `logprobs`, where those of the tokens begin.
        """
        taken, end = take_tokens(sequence, tokens)
        if sequence.request.is_counted:
            self.num_generation_tokens += len(taken)
        if len(sequence.token_ids) >= sequence.next_full_page:
            self.pages.keep_full_pages(sequence)
        if end.reason is not None:
            self._finish(sequence, end.reason)
        return RequestOutput(
            sequence.request.request_id,
            sequence.index,
            taken,
            finish_reason=end.reason,
            stop_token_id=end.stop_token,
            error=end.error,
            num_cached_tokens=sequence.num_cached_tokens,
            logprobs=None if logprobs is None else told_logprobs(sequence, taken, logprobs, row),
            prompt_logprobs=told_of_prompt(sequence, len(taken)) if sequence.prompt_logprobs else None,
            time=now,
            scheduled_time=sequence.scheduled_time,
            is_constraint_failure=end.error is not None,
        )

    def _schedule_decode(self) -> tuple[list[DecodeRow], list[Sequence]]:
        """A row for each sequence that decodes; and those that run with known tokens left to compute, in their order."""
        rows: list[DecodeRow] = []
        unfinished: list[Sequence] = []
        page_size, longest = self.limits.page_size, self.limits.longest_sequence
        # Preemption takes from the end of `running`: it never hits a row that was collected before.
        for sequence in list(self.running):
            if not sequence.is_decoding:
                unfinished.append(sequence)
                continue
            if sequence.is_complete_when_fetched:
                continue
            page, page_index = -1, -1
            most_computed = sequence.num_computed + sequence.num_drafts_in_flight
            if most_computed >= longest:
                continue  # perhaps there is no place left for a token: that is known when the drafts are fetched
            if most_computed == len(sequence.pages) * page_size:
                pages = self._allocate_or_preempt(sequence)
                if pages is None:
                    continue
                page, page_index = pages[0], len(sequence.pages)
                sequence.pages += pages
            rows.append(DecodeRow(sequence, sequence.slot, page, page_index))
            sequence.num_computed += 1
            sequence.num_in_flight += 1
        return rows, [sequence for sequence in unfinished if sequence.status is SequenceStatus.RUNNING]

    def _jump_forward(self) -> list[Sequence]:
        """Appends their forced tokens to sequences, where that is worth it; those that go on behind them."""
        forced = [sequence for sequence in self.running if sequence.forced_tokens]
        if not forced:
            return []
        has_prompts = (self.waiting and self._free_slots) or not all(other.is_decoding for other in self.running)
        jumped: list[Sequence] = []
        for sequence in choose_jumps(forced, len(self.running), self.limits.max_prefill_rows, bool(has_prompts)):
            run = begin_jump(sequence, self.limits, self.pages)
            if run:
                output = self._append(sequence, list(run), None, 0, self._clock())
                self._pending_outputs.append(output)
                self.num_forced_tokens += len(output.token_ids)
                if output.finish_reason is None:
                    jumped.append(sequence)
        return jumped

    def _schedule_prefill(self, unfinished: list[Sequence], num_decode: int) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        deepest, used = 0, 0
        drafts = self._drafting is not None and self._drafting.pays(num_decode)
        # Tokens of the step, unless a long context makes them dearer.
        room = self._budget.most(num_decode, context=0, between_drafts=drafts)
        is_fitted = False
        while used < room and len(chunks) < self.limits.max_prefill_rows:
            sequence = self._next_to_prefill(unfinished)
            if sequence is None:
                break
            if self._goes_on_elsewhere(sequence):
                continue
            # Only now is it known how much comes before a chunk: most of a long prompt may have been in the tree.
            if sequence.num_computed > deepest:
                deepest = sequence.num_computed
                room = min(room, self._budget.most(num_decode, context=deepest, between_drafts=drafts))
            if not is_fitted:
                candidates = [sequence, *unfinished, *islice(self.waiting, self.limits.max_prefill_rows)]
                waiting = sum(candidate.num_uncomputed for candidate in candidates)
                room = self._budget.fitting(room, num_decode, waiting, between_drafts=drafts)
                is_fitted = True
            if used < room:
                used += self._add_chunk(sequence, room - used, chunks)
        if self._drafting is not None and chunks:
            more = 0
            if used >= room:  # else nobody else could have come
                others = [*(chunk.sequence for chunk in chunks), *unfinished]
                others += islice(self.waiting, len(self._free_slots))
                more = sum(other.num_uncomputed for other in others)
            self._drafting.offer_prompts(used + more)
        return chunks

    def _next_to_prefill(self, unfinished: list[Sequence]) -> Sequence | None:
        """Whose turn it is, of those that run unfinished and of the first in line, which is admitted then.

        If the first in line does not fit, nobody behind it is let in.
        """
        if self.waiting and (not unfinished or self.waiting.first.turn < unfinished[0].turn):
            admitted = self._admit_first()
            if admitted is not None:
                return admitted
        return unfinished.pop(0) if unfinished else None

    def _goes_on_elsewhere(self, sequence: Sequence) -> bool:
        """Lets a sequence take what others have computed of its prompt meanwhile; whether more of that is on its way."""
        if sequence.num_computed < len(sequence.pages) * self.limits.page_size:
            return False
        return self._take_cached(sequence, self.pages.match(sequence))

    def _add_chunk(self, sequence: Sequence, budget: int, chunks: list[PrefillChunk]) -> int:
        """Appends the next chunk of a running sequence, and returns its tokens (0: pages are lacking)."""
        length = min(budget, sequence.num_uncomputed)
        missing = self.limits.pages_for(sequence.num_computed + length) - len(sequence.pages)
        if missing > 0:
            pages = self.pages.allocate(missing)
            if pages is None:
                # Those who decode have grown into what was promised; admission made sure that it is enough once they end.
                return 0
            sequence.pages += pages
        chunk = PrefillChunk.next_of(sequence, length)
        chunks.append(chunk)
        sequence.num_computed += length
        sequence.num_in_flight += chunk.samples
        sequence.is_decoding = chunk.samples
        self.pages.keep_full_pages(sequence)
        return length

    def _take_cached(self, sequence: Sequence, matched: list[PageNode]) -> bool:
        """Lets a sequence go on with pages that hold its next tokens already; whether more of them are on their way."""
        before = sequence.num_computed
        is_waiting = self.pages.take(sequence, matched)
        if self._drafting is not None:
            self._drafting.take_cached(sequence, before)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens += sequence.num_computed - before
            if sequence.request.is_counted:
                self.num_cached_tokens += sequence.num_computed - before
        return is_waiting

    def _admit_first(self) -> Sequence | None:
        """Admits the first in line, if there is a slot and room for it."""
        sequence = self.waiting.first
        if sequence.num_in_flight or not self._free_slots:
            return None
        matched = self._admission.admit(sequence, self.running, len(self.waiting))
        if matched is None:
            return None
        self.waiting.remove(sequence)
        sequence.slot = self._free_slots.pop()
        sequence.status = SequenceStatus.RUNNING
        self._take_cached(sequence, matched)
        if sequence.num_preemptions == 0:
            if sequence.request.is_counted:
                self.num_prompt_tokens += sequence.num_prompt_tokens
            sequence.scheduled_time = self._clock()
        insort(self.running, sequence, key=turn_of)
        return sequence

    def _allocate_or_preempt(self, sequence: Sequence) -> list[int] | None:
        """A page for a sequence, if need be of those whose turn comes after its own, last first.

        None: there is none; `sequence` is itself the last, and is preempted.
        """
        pages = self.pages.allocate(1)
        while pages is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return None
            pages = self.pages.allocate(1)
        return pages

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's slot and pages; it goes back into the queue and starts over from its known tokens.

        Its pages may be given away at once: steps run in the order of their launch, so that what a launched step still
        writes there is overwritten by the next owner. Tokens in flight are taken in when they are fetched.
        """
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.is_decoding = False
        sequence.num_computed = sequence.num_drafts_in_flight = sequence.num_unshown = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add_preempted(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        if sequence.request.is_counted:
            self.finished[reason] += 1
        siblings = self._by_request[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request.request_id]
        self._release_if_idle(sequence)

    def _release_if_idle(self, sequence: Sequence) -> None:
        """A finished sequence keeps slot and pages until the last step that was launched with it is fetched."""
        if sequence.num_in_flight == 0:
            self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.pages.give_back(sequence)
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
