"""Tokens that a constraint leaves no choice about are appended without a step for each of them ("jump-forward").

While a step's forward pass runs, the host writes the mask of the token that it will draw, and finds out what must follow
that token. If that is a run, the sequence does not go on by decode rows: the run, from the token in flight on, is appended
to its known tokens at once, and the next step computes it as a chunk of prompt and draws the token after it. What is drawn
is the same as step by step, where each of these tokens would have been the only one in its mask; its random counter goes
by its place in the output.
"""

from __future__ import annotations

from collections.abc import Collection

from jaxserve.constraint import TokenConstraint
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.page_pool import PagePool
from jaxserve.engine.sequence import Sequence

_SHORTEST_RUN = 3  # saves two steps
_CHUNK_COST = (
    0.25  # by which a chunk makes a step of decode rows longer for each of them: measured 1.23 times, at 64 rows
)
_LONGEST_RUN = 64  # it is found while the device waits; more of it is found at its end


def forced_tokens(sequence: Sequence, constraint: TokenConstraint) -> tuple[int, ...]:
    """The run that a sequence may jump over, from the token on that the step in flight will draw; empty: none."""
    sampling = sequence.request.sampling
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        return ()  # each token's are found by the step that draws it
    room = sequence.max_output_tokens - sequence.num_output_tokens
    run = constraint.forced_run(min(_LONGEST_RUN, room))
    return run if len(run) >= _SHORTEST_RUN else ()


def choose_jumps(forced: Collection[Sequence], num_running: int, max_chunks: int, has_prompts: bool) -> list[Sequence]:
    """Who is to jump over its forced tokens in the next step: those with the longest runs; nobody where it is not worth it.

    Args:
        forced: sequences with forced tokens.
        num_running: sequences that take part in the step.
        max_chunks: that a step may have.
        has_prompts: whether there are prompts to be computed: they keep half of the chunks, and the step has some anyway.
    """
    longest = sorted(forced, key=lambda sequence: -len(sequence.forced_tokens))
    longest = longest[: max_chunks // 2 if has_prompts else max_chunks]
    saved = sum(len(sequence.forced_tokens) - 1 for sequence in longest)
    return longest if has_prompts or saved > _CHUNK_COST * num_running else []


def begin_jump(sequence: Sequence, limits: SchedulerLimits, pages: PagePool) -> tuple[int, ...]:
    """Prepares a sequence that decodes for its forced tokens, which it goes on to compute as a chunk.

    Returns:
        The tokens, to be appended; none where there is no run, or no page is free for it: it decodes then.
    """
    run, sequence.forced_tokens = sequence.forced_tokens, ()
    # Only the token that was masked last is in flight; where another step is, the masks were written for an earlier one.
    if not run or sequence.num_in_flight != 1 or sequence.num_known_in_flight:
        return ()
    missing = limits.pages_for(len(sequence.token_ids) + len(run)) - len(sequence.pages)
    if missing > 0:
        new = pages.allocate(missing)
        if new is None:
            return ()
        sequence.pages += new
    sequence.num_known_in_flight = 1
    sequence.is_decoding = False
    return run
