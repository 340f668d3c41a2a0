"""What the scheduler decides for one step, and what comes back from it: plain data between scheduler and runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxserve.engine.host_pages import PageCopy
from jaxserve.engine.sequence import Sequence


class DecodeRow(NamedTuple):  # and no dataclass: there is one for each token, and a tuple takes a third of the time
    """One more token for a sequence whose last token is on the device.

    Attributes:
        new_page: page that was added to the sequence for this token, or -1.
        new_page_index: its place in the sequence's page table, or -1.
        num_drafts: tokens that may be drafted to follow, in a step with drafts; there is room for all of them.
    """

    sequence: Sequence
    slot: int
    new_page: int
    new_page_index: int
    num_drafts: int = 0


@dataclass(frozen=True)
class PrefillChunk:
    """Known tokens `start .. start + length` of a sequence.

    Attributes:
        pages: every page of the sequence so far.
        samples: whether a token is drawn after the chunk, because it ends with the last known token.
        output_index: which output token that is.
    """

    sequence: Sequence
    slot: int
    start: int
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    samples: bool
    output_index: int

    @staticmethod
    def next_of(sequence: Sequence, length: int) -> PrefillChunk:
        """The next so many known tokens of a running sequence, for which it has pages."""
        start, end = sequence.num_computed, sequence.num_computed + length
        return PrefillChunk(
            sequence=sequence,
            slot=sequence.slot,
            start=start,
            token_ids=tuple(sequence.token_ids[start:end]),
            pages=tuple(sequence.pages),
            samples=end == len(sequence.token_ids),
            output_index=sequence.num_output_tokens,
        )


@dataclass(frozen=True)
class ScheduledBatch:
    """One step: decode rows and prefill chunks that run side by side.

    Attributes:
        copies: pages that go to host memory or come back from there, in this order, before the step.
        num_drafts: for which its program is made, at least that of each row; 0: a step without drafts.
        is_shown: whether a drafter that reads prompts is shown the step's, if it has any; and one that reads hidden states
            those of all its tokens.
        catch_up: tokens of decode rows that such a drafter has not seen, and is shown before the step, one group after the
            other; each fits a step.
    """

    decode: tuple[DecodeRow, ...]
    prefill: tuple[PrefillChunk, ...]
    copies: tuple[PageCopy, ...] = ()
    num_drafts: int = 0
    is_shown: bool = True
    catch_up: tuple[tuple[PrefillChunk, ...], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)

    @property
    def num_tokens(self) -> int:
        return len(self.decode) * (self.num_drafts + 1) + sum(len(chunk.token_ids) for chunk in self.prefill)


@dataclass(frozen=True)
class LogprobRows:
    """Log probabilities of rows of tokens: of each row's token, and of the most likely ones, descending."""

    tokens: np.ndarray  # [rows]
    top_ids: np.ndarray  # [rows, top]
    top: np.ndarray  # [rows, top]


@dataclass(frozen=True)
class DraftedTokens:
    """What the decode rows of a step bring to be verified.

    Attributes:
        token_ids: [rows, width]
        counts: [rows] how many of a row's tokens are drafts.
    """

    token_ids: np.ndarray
    counts: np.ndarray

    def of_row(self, row: int) -> tuple[int, ...]:
        return tuple(self.token_ids[row, : self.counts[row]].tolist())


@dataclass(frozen=True)
class SampledTokens:
    """Tokens of a step, in the order of its rows: decode rows, then prefill chunks.

    Attributes:
        token_ids: [rows, width]; width is 1 in a step without drafts.
        counts: [rows] how many of a row's tokens count; 0 for chunks that sample nothing.
        num_drafts: [rows] how many tokens were drafted; None in a step without drafts.
        logprobs: of each row's tokens, `width` rows for each, one row after the other; None where no row asked for them.
        prompt_logprobs: of the token after each token of the prefill chunks, one chunk after the other; None where no
            chunk's request asked for them.
    """

    token_ids: np.ndarray
    counts: np.ndarray
    num_drafts: np.ndarray | None = None
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
