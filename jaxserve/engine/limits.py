"""Sizes that bound what the scheduler may decide. Host only."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.engine.request import RequestError


@dataclass(frozen=True)
class SchedulerLimits:
    """Sizes that bound a step.

    Attributes:
        max_num_seqs: slots of the decode state.
        max_num_batched_tokens: tokens a step at most; not below max_num_seqs.
        max_prefill_rows: prefill chunks a step at most.
        max_model_len: tokens a sequence at most.
        static_batching: nobody is admitted while anybody of the batch before still runs; for comparison only.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_rows: int
    max_model_len: int
    page_size: int
    num_pages: int
    static_batching: bool = False

    @property
    def longest_sequence(self) -> int:
        """Tokens (prompt + output) that one sequence may have: what the context and the whole pool allow."""
        return min(self.max_model_len, self.num_pages * self.page_size)

    def check_prompt(self, num_tokens: int) -> None:
        """Raises:
        RequestError: if a prompt of this many tokens can never be served, whatever else leaves.
        """
        if not num_tokens:
            raise RequestError("the prompt is empty: at least one token is needed", parameter="prompt")
        if num_tokens >= self.longest_sequence:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, which leaves no room for an answer in the context of "
                f"{self.longest_sequence} tokens; shorten the prompt",
                parameter="prompt",
                code="context_length_exceeded",
            )

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)
