"""The scheduled, mutable host state of one choice of a request."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cached_property

from jaxserve.constraint import TokenConstraint
from jaxserve.engine.draft_record import DraftRecord
from jaxserve.engine.prefix_cache import PageNode
from jaxserve.engine.request import FinishReason, Request, TokenLogprobs


class SequenceStatus(enum.Enum):
    WAITING = "waiting"  # has no slot: new, or preempted
    RUNNING = "running"  # has a slot; its prefill may be unfinished
    FINISHED = "finished"


@dataclass(eq=False)  # two sequences are never the same one
class Sequence:
    """One choice of a request: its tokens, and how far the device is with them.

    Attributes:
        constraint: what its output must follow; it has taken in every output token that the host knows.
        token_ids: prompt and every output token that the host knows.
        num_computed: tokens whose keys and values are in the cache once every launched step has run. For a sequence that
            decodes it runs ahead of `token_ids`: the last sampled token is still on the device.
        num_in_flight: launched steps that sample a token for this sequence and are not fetched yet. One with drafts may
            bring several.
        num_drafts_in_flight: drafts in those steps at most: by so many `num_computed` may be too small, until they are
            fetched.
        drafted_at: output tokens that it had when it last brought drafts.
        num_unshown: the last ones of the `num_computed` tokens, from the first on that a drafter which reads prompts has not
            been shown.
        num_known_in_flight: of the steps in flight, those whose token the host knows already, since it was forced.
        forced_tokens: what its constraint leaves no choice about, from the token in flight on; for the next step alone.
        is_decoding: whether its slot on the device holds its last token, so that it goes on by decode rows; else its known
            tokens go through prefill chunks.
        pages: its KV pages, in order.
        nodes: what the prefix tree has for its full pages, in order; a page of its own differs where another sequence
            computed the same tokens at the same time.
        next_full_page: known tokens at which its next page is full and joins the tree.
        num_cached_tokens: prompt tokens that were found in the tree when it was first admitted.
        prompt_logprobs: what is known of the prompt's log probabilities, if they were asked for.
        slot: its row in the device's decode state, -1 without one.
        turn: its place among those who wait and those who run; the smallest is served first and preempted last.
    """

    request: Request
    index: int
    seed: int  # unsigned 64-bit: of this choice's random stream
    stop_token_ids: frozenset[int]
    max_output_tokens: int
    constraint: TokenConstraint | None = None
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_in_flight: int = 0
    num_drafts_in_flight: int = 0
    draft_record: DraftRecord = field(default_factory=DraftRecord)  # how often its drafts were right
    drafted_at: int = 0
    num_unshown: int = 0
    num_known_in_flight: int = 0
    forced_tokens: tuple[int, ...] = ()
    is_decoding: bool = False
    pages: list[int] = field(default_factory=list)
    nodes: list[PageNode] = field(default_factory=list)
    next_full_page: int = 1 << 62
    num_cached_tokens: int = 0
    slot: int = -1
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    turn: tuple[float, int] = (0.0, 0)
    scheduled_time: float = 0.0  # `time.monotonic()` seconds of its first admission
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log probabilities of the prompt are to be found yet: choice 0 reports them, once."""
        wanted = self.request.sampling.prompt_logprobs is not None and self.index == 0
        return wanted and len(self.prompt_logprobs) < self.num_prompt_tokens

    @cached_property  # it is asked for with every token
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that no launched step computes yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_output_launched(self) -> int:
        """Output tokens, with those that launched steps will give at least."""
        return len(self.token_ids) - self.num_prompt_tokens + self.num_in_flight - self.num_known_in_flight

    @property
    def is_complete_when_fetched(self) -> bool:
        """Whether the launched steps bring the last token that it may have."""
        return self.num_output_launched >= self.max_output_tokens
