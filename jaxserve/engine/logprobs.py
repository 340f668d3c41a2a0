"""From rows of log probabilities to what a client is told. Host only."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Tokens

from jaxserve.engine.request import TokenLogprobs
from jaxserve.engine.schedule import LogprobRows, PrefillChunk
from jaxserve.engine.sequence import Sequence


def token_logprobs(token: int, rows: LogprobRows, row: int, num_top: int) -> TokenLogprobs:
    """One row: of its token, and of the `num_top` most likely ones (fewer, if the vocabulary is smaller)."""
    pairs = zip(rows.top_ids[row, :num_top].tolist(), rows.top[row, :num_top].tolist(), strict=True)
    return TokenLogprobs(token_id=token, logprob=float(rows.tokens[row]), top=tuple(pairs))


def told_logprobs(
    sequence: Sequence, tokens: Tokens[int], rows: LogprobRows, first: int
) -> tuple[TokenLogprobs, ...] | None:
    """What a sequence's request is told of its new tokens, whose rows begin with `first`; None: it does not ask."""
    wanted = sequence.request.sampling.logprobs
    if wanted is None:
        return None
    return tuple(token_logprobs(token, rows, first + place, wanted) for place, token in enumerate(tokens))


def told_of_prompt(sequence: Sequence, num_new: int) -> tuple[TokenLogprobs | None, ...] | None:
    """What its request is told of a sequence's prompt, with its first output; `num_new`: tokens that it has just got."""
    return tuple(sequence.prompt_logprobs) if sequence.num_output_tokens == num_new else None


def take_prompt_logprobs(chunks: Iterable[PrefillChunk], rows: LogprobRows) -> None:
    """Adds what a step's chunks tell of their sequences' prompts; rows are those of the chunks, one after the other."""
    first = 0
    for chunk in chunks:
        _take_prompt_logprobs(chunk, rows, first)
        first += len(chunk.token_ids)


def _take_prompt_logprobs(chunk: PrefillChunk, rows: LogprobRows, first: int) -> None:
    """Adds what a chunk tells of its sequence's prompt; rows from `first` on are the chunk's.

    The row of a token is about the one after it. After a preemption chunks come again: what is known is not added twice.
    """
    sequence = chunk.sequence
    if not sequence.wants_prompt_logprobs:
        return
    known = sequence.prompt_logprobs
    if not known:
        known.append(None)  # nothing stands before the first token
    num_top = sequence.request.sampling.prompt_logprobs or 0
    for position in range(len(known), min(chunk.start + len(chunk.token_ids) + 1, sequence.num_prompt_tokens)):
        row = first + position - 1 - chunk.start
        known.append(token_logprobs(sequence.token_ids[position], rows, row, num_top))
