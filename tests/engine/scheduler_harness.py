"""Drives a scheduler and a fake runner as the engine loop does, and checks after every step what must always hold."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence as Tokens
from typing import Any

from jaxserve.engine.host_pages import HostPages
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.prefix_cache import PageNode
from jaxserve.engine.request import FinishReason, Request, RequestOutput, token_bytes
from jaxserve.engine.schedule import ScheduledBatch
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence, SequenceStatus
from jaxserve.sampling_params import SamplingParams
from tests.engine.fake_device import FakeRunner, solo_tokens

Key = tuple[str, int]


def make_limits(
    *, seqs: int = 4, tokens: int = 16, prefill_rows: int = 4, max_len: int = 64, page_size: int = 4, pages: int = 64
) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_prefill_rows=prefill_rows,
        max_model_len=max_len,
        page_size=page_size,
        num_pages=pages,
    )


def own_pages(sequence: Sequence) -> list[int]:
    """Pages that are not the tree's."""
    shared = {node.page for node in sequence.nodes}
    return [page for page in sequence.pages if page not in shared]


class Harness:
    """One scheduler with its runner. Step N + 1 is launched before the tokens of step N are taken in."""

    def __init__(self, limits: SchedulerLimits | None = None, *, caching: bool = True, host_pages: int = 0) -> None:
        self.limits = limits or make_limits()
        self.caching = caching
        self.host: HostPages[PageNode] | None = HostPages(host_pages) if host_pages else None
        self.scheduler = Scheduler(self.limits, prefix_caching=caching, host_pages=self.host)
        self.runner = FakeRunner(self.limits)
        self.sequences: dict[Key, Sequence] = {}
        self.outputs: dict[Key, list[int]] = {}
        self.reasons: dict[Key, FinishReason] = {}
        self.stop_tokens: dict[Key, int | None] = {}
        self.pending: Any = None

    def add(
        self,
        prompt: Tokens[int] | int,
        max_tokens: int,
        *,
        request_id: str | None = None,
        index: int = 0,
        seed: int = 0,
        stop: Tokens[int] = (),
        salt: str | None = None,
        prompt_logprobs: int | None = None,
    ) -> Key:
        """Queues a request; a number as the prompt stands for that many tokens that begin no other request's prompt."""
        name = f"request-{len(self.sequences)}" if request_id is None else request_id
        first = zlib.crc32(name.encode()) % 997
        tokens = tuple(range(first, first + prompt)) if isinstance(prompt, int) else tuple(prompt)
        sequence = Sequence(
            request=Request(
                name,
                tokens,
                SamplingParams(prompt_logprobs=prompt_logprobs),
                arrival_time=float(len(self.sequences)),  # so far apart that no prompt is long enough to be overtaken
                cache_salt=salt,
            ),
            index=index,
            seed=seed,
            stop_token_ids=frozenset(stop),
            max_output_tokens=min(max_tokens, self.limits.longest_sequence - len(tokens)),
            token_ids=list(tokens),
        )
        self.scheduler.add(sequence)
        self.sequences[name, index] = sequence
        self.outputs[name, index] = []
        return name, index

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.scheduler.abort(request_id, index)
        self.check()

    def step(self) -> ScheduledBatch:
        """What the engine loop does in one round: schedule and launch, then fetch the step before."""
        batch = self.scheduler.schedule()
        self.check_batch(batch)
        self.check()
        launched = (batch, self.runner.launch_sample(self.runner.launch_forward(batch))) if batch else None
        if self.pending is not None:
            self.tell_prompt_logprobs(self.pending[0])
            self.take(self.scheduler.update(self.pending[0], self.runner.fetch(self.pending[1])))
        elif launched is None:
            self.take(self.scheduler.take_pending_outputs())
        self.pending = launched
        self.check()
        return batch

    def tell_prompt_logprobs(self, batch: ScheduledBatch) -> None:
        """What fetching a step brings beside its tokens; of the values, only how many there are matters here."""
        for chunk in batch.prefill:
            sequence, known = chunk.sequence, chunk.sequence.prompt_logprobs
            end = min(chunk.start + len(chunk.token_ids), sequence.num_prompt_tokens)
            if sequence.wants_prompt_logprobs and chunk.start <= len(known) < end:
                known += [None] * (end - len(known))

    def run(self, max_steps: int = 1000) -> int:
        """Steps until nothing is left to do; returns how many it took."""
        for step in range(max_steps):
            if not self.scheduler.has_work and self.pending is None:
                return step
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def step_until(self, condition: Any, max_steps: int = 200) -> None:
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"not so after {max_steps} steps")

    def solo(self, key: Key) -> list[int]:
        sequence = self.sequences[key]
        return solo_tokens(
            sequence.request.prompt_token_ids, sequence.seed, sequence.max_output_tokens, sequence.stop_token_ids
        )

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            key = output.request_id, output.index
            assert key not in self.reasons, f"{output} after the end"
            self.outputs[key] += output.token_ids
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason
                self.stop_tokens[key] = output.stop_token_id

    def check_batch(self, batch: ScheduledBatch) -> None:
        limits = self.limits
        assert batch.num_tokens <= limits.max_num_batched_tokens
        assert len(batch.prefill) <= limits.max_prefill_rows
        slots = [row.slot for row in (*batch.decode, *batch.prefill)]
        assert len(slots) == len(set(slots)), "a slot has two rows in one step"
        for chunk in batch.prefill:
            assert chunk.token_ids
            assert len(chunk.pages) * limits.page_size >= chunk.start + len(chunk.token_ids)

    def check(self) -> None:
        """A slot has one owner, a page several only where it is full and of the tree, and none is lost."""
        held = Counter(node for sequence in self.sequences.values() for node in sequence.nodes)
        assert all(node.holders == count for node, count in held.items()), "a page of the tree has other holders"
        own = [page for sequence in self.sequences.values() for page in own_pages(sequence)]
        pages = [*own, *(node.page for node in held)]
        assert len(pages) == len(set(pages)), "a page has two owners"
        assert len(pages) + self.scheduler.pages.num_free == self.limits.num_pages, "pages were lost"
        for sequence in self.sequences.values():
            self.check_nodes(sequence)
        assert self.host is None or len(self.host) <= self.host.num_places
        slots = [sequence.slot for sequence in self.sequences.values() if sequence.slot >= 0]
        assert len(slots) == len(set(slots)), "a slot has two owners"
        assert len(self.scheduler.running) <= self.limits.max_num_seqs
        for sequence in self.scheduler.running:
            assert sequence.status is SequenceStatus.RUNNING
            assert sequence.slot >= 0

    def check_nodes(self, sequence: Sequence) -> None:
        """What the tree has for a sequence is its own tokens, and its full pages are all there."""
        size = self.limits.page_size
        for index, node in enumerate(sequence.nodes):
            assert node.key == token_bytes(sequence.token_ids[index * size : (index + 1) * size])
            assert node.parent is (sequence.nodes[index - 1] if index else None)
        if sequence.status is SequenceStatus.RUNNING and self.caching:
            full = min(sequence.num_computed, len(sequence.token_ids)) // size
            # The last token may have come before its step was launched. What computes on purpose what is there stays out.
            assert len(sequence.nodes) in (full, full - 1) or sequence.request.sampling.prompt_logprobs is not None

    def check_done(self) -> None:
        """Every request has ended; those that were not aborted gave their solo tokens; nothing is held."""
        for key in self.sequences:
            solo = self.solo(key)
            if self.reasons[key] == "abort":
                assert self.outputs[key] == solo[: len(self.outputs[key])]
            else:
                assert self.outputs[key] == solo
                ended = bool(solo) and solo[-1] in self.sequences[key].stop_token_ids
                assert self.reasons[key] == ("stop" if ended else "length")
                assert self.stop_tokens[key] == (solo[-1] if ended else None)
        assert self.scheduler.pages.num_free == self.limits.num_pages
        assert all(sequence.slot == -1 and sequence.num_in_flight == 0 for sequence in self.sequences.values())
        assert not self.scheduler.has_work
        assert self.scheduler.num_live_requests == 0
