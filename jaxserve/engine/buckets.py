"""Which batch shapes are compiled, and which of them serves a step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from jaxserve.engine.device_batch import Bucket
from jaxserve.engine.schedule import ScheduledBatch
from jaxserve.sampling_params import SamplingMode

# Products of fewer tokens take no less time: reading the weights decides it.
_SMALLEST_PREFILL = 64
_SMALLEST_HALVED = 4  # drafts
_TILE = 32
# Prompt tokens beside those who decode, from which on each costs as much as any: padding is halved below.
_LARGE_PIECE = 256
_SMALLEST_DECODE = 8  # above a single row, on a GPU: tensor cores take rows in eights
# Of what a drafter is shown, which it takes in as part of a step and in a small part of its time.
_SMALLEST_SHOWN_DECODE, _SMALLEST_SHOWN_PREFILL = 64, 256


@dataclass(frozen=True)
class Buckets:
    """Padded sizes, ascending.

    Attributes:
        decode_rows: of steps that only decode.
        mixed_decode_rows: of steps that prefill as well; none: nobody ever decodes in them.
        prefill_tokens: of steps that prefill.
        prefill_rows: of steps that prefill; one size.
        prefill_only_tokens: prefill tokens of steps in which nobody decodes; none: such steps pad decode rows as well.
        sample_rows: rows of logits that sampling programs take; a forward pass pads its logits to one of these.
        sampling_modes: kinds of sampling program, cheapest first; the last one serves everything.
        masked_modes: those that there are with masks too, for steps in which a row has a constraint; the same holds.
        draft_lengths: numbers of drafts that each row of a step may bring, ascending; none: the engine does not speculate.
        drafting_rows: decode rows of steps with drafts.
        rare_drafting_rows: the same, of steps that bring fewer drafts than the most, or that `is_rare` is said of; among
            `drafting_rows`, the largest one too; none: all of these.
        verify_modes: kinds of sampling that drafts are verified by, as `sampling_modes`.
        shown_decode_rows, shown_prefill_tokens: of steps that prefill, as a drafter is shown them; none: as they are.
    """

    decode_rows: tuple[int, ...]
    mixed_decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    prefill_rows: int
    sample_rows: tuple[int, ...]
    sampling_modes: tuple[SamplingMode, ...]
    masked_modes: tuple[SamplingMode, ...] = ("full",)
    draft_lengths: tuple[int, ...] = ()
    drafting_rows: tuple[int, ...] = ()
    rare_drafting_rows: tuple[int, ...] = ()
    verify_modes: tuple[SamplingMode, ...] = ("full",)
    shown_decode_rows: tuple[int, ...] = ()
    shown_prefill_tokens: tuple[int, ...] = ()
    prefill_only_tokens: tuple[int, ...] = ()

    def all(self) -> list[Bucket]:
        decode = [Bucket(rows, 0, 0) for rows in self.decode_rows]
        decode += [Bucket(rows, 0, 0, length) for length in self.draft_lengths[:-1] for rows in self._rare_rows]
        decode += [Bucket(rows, 0, 0, length) for length in self.draft_lengths[-1:] for rows in self.drafting_rows]
        mixed = [
            Bucket(rows, self.prefill_rows, tokens) for tokens in self.prefill_tokens for rows in self.mixed_decode_rows
        ]
        return decode + mixed + [Bucket(0, self.prefill_rows, tokens) for tokens in self.prefill_only_tokens]

    def sample_rows_for(self, bucket: Bucket) -> int:
        """Rows of logits that a bucket's forward pass gives."""
        if bucket.num_drafts:
            return bucket.rows
        return _smallest(self.sample_rows, bucket.rows, "rows of logits")

    def verifications(self, bucket: Bucket) -> list[tuple[SamplingMode, bool]]:
        """How drafts of a step of this size may be verified: kinds of sampling, each without or with masks."""
        every: list[tuple[SamplingMode, bool]] = [
            *((mode, False) for mode in self.verify_modes),
            *((mode, True) for mode in self.masked_modes),
        ]
        return every if bucket.decode_rows in self._rare_rows else [kind for kind in every if not self.is_rare(*kind)]

    def is_rare(self, mode: SamplingMode, masked: bool) -> bool:
        """Whether drafts are verified so in steps of few sizes: `for_batch` wants to know it."""
        return masked or mode == self.verify_modes[-1]

    def shown_for(self, bucket: Bucket) -> Bucket:
        """The sizes in which a step without drafts is shown to a drafter."""
        if not (bucket.prefill_rows and self.shown_prefill_tokens):
            return bucket
        return Bucket(
            _smallest(self.shown_decode_rows, bucket.decode_rows, "decode rows for the drafter"),
            bucket.prefill_rows,
            _smallest(self.shown_prefill_tokens, bucket.prefill_tokens, "prefill tokens for the drafter"),
        )

    @property
    def _rare_rows(self) -> tuple[int, ...]:
        return self.rare_drafting_rows or self.drafting_rows

    def for_batch(self, batch: ScheduledBatch, *, is_rare: bool = False) -> Bucket:
        """The smallest bucket that holds a step.

        Args:
            is_rare: its drafts, if it has any, are to be verified in a way that only few sizes have.

        Raises:
            ValueError: if none does; the scheduler's limits must be those that the buckets were made for.
        """
        rows = len(batch.decode)
        if batch.num_drafts:
            is_rare = is_rare or batch.num_drafts != self.draft_lengths[-1]
            sizes = self._rare_rows if is_rare else self.drafting_rows
            return Bucket(_smallest(sizes, rows, "rows with drafts"), 0, 0, batch.num_drafts)
        if not batch.prefill:
            return Bucket(_smallest(self.decode_rows, rows, "decode rows"), 0, 0)
        if len(batch.prefill) > self.prefill_rows:
            raise ValueError(f"{len(batch.prefill)} prefill chunks exceed the {self.prefill_rows} that were compiled")
        return self.for_prompts(rows, batch.num_tokens - rows)

    def for_prompts(self, decode_rows: int, prefill_tokens: int) -> Bucket:
        """The smallest bucket that holds so many tokens of prompts beside those who decode.

        Raises:
            ValueError: as `for_batch`.
        """
        if not decode_rows and self.prefill_only_tokens:
            return Bucket(0, self.prefill_rows, _smallest(self.prefill_only_tokens, prefill_tokens, "prefill tokens"))
        return Bucket(
            _smallest(self.mixed_decode_rows, decode_rows, "decode rows beside prefill"),
            self.prefill_rows,
            _smallest(self.prefill_tokens, prefill_tokens, "prefill tokens"),
        )


def make_buckets(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_prefill_rows: int,
    *,
    few_programs: bool,
    has_single_row: bool = True,
    num_speculative_tokens: int = 0,
) -> Buckets:
    """Powers of two up to each limit, and the limit itself: every size is a program that a start has to compile.

    Where there may be many programs, a step in which nobody decodes has its own, without a row for those who do. It has
    sizes between the powers of two, since padding is what the first token waits for, and so have the smaller pieces of
    prompts that ride along with those who decode. Speculation needs programs of its own: pieces of prompts have fewer sizes
    then, and so have steps with drafts that are rare, and steps with prompts as a drafter is shown them.

    Args:
        few_programs: coarser steps between sizes, where compiling takes longer than padding costs (a CPU).
        has_single_row: a single sequence has a program of its own, which pays where products of one row have better kernels
            than those of eight.
        num_speculative_tokens: drafts of a row at most; 0: the engine does not speculate.
    """
    lengths = draft_lengths(num_speculative_tokens, few_programs=few_programs)
    thins = bool(lengths) and not few_programs
    prefill_tokens = _growing(
        min(_SMALLEST_PREFILL, max_num_batched_tokens), max_num_batched_tokens, 4 if few_programs else 2
    )
    halves = () if few_programs else _halves(prefill_tokens)
    riding = [half for half in halves if half < _LARGE_PIECE and not (thins and half < 2 * _SMALLEST_PREFILL)]
    decode_rows = _growing(1, max_num_seqs, 4) if few_programs else _decode_rows(max_num_seqs)
    mixed_decode_rows = _mixed_decode_rows(max_num_seqs, few_programs, 4 if thins else 2)
    drafting_rows = _drafting_rows(decode_rows, max_num_batched_tokens, lengths)
    most_rows = max(max_num_seqs, max(mixed_decode_rows, default=0) + max_prefill_rows)
    return Buckets(
        decode_rows=decode_rows if has_single_row or few_programs else decode_rows[1:] or decode_rows,
        mixed_decode_rows=mixed_decode_rows,
        prefill_tokens=_merged(prefill_tokens, riding),
        prefill_rows=max_prefill_rows,
        sample_rows=tuple(sorted({1, most_rows}))
        if few_programs
        else tuple(sorted({min(_SMALLEST_DECODE, most_rows), min(32, most_rows), most_rows})),
        sampling_modes=("greedy", "filtered", "full") if few_programs else ("greedy", "random", "filtered", "full"),
        masked_modes=("full",) if few_programs else ("filtered", "full") if lengths else ("random", "filtered", "full"),
        draft_lengths=lengths,
        drafting_rows=drafting_rows,
        rare_drafting_rows=drafting_rows[::-1][::2][::-1] if thins else (),
        verify_modes=("greedy", "full") if few_programs else ("greedy", "filtered", "full"),
        shown_decode_rows=_shown_decode_rows(mixed_decode_rows) if thins else (),
        shown_prefill_tokens=_shown_prefill_tokens(max_num_batched_tokens) if thins else (),
        prefill_only_tokens=()
        if few_programs
        else _merged(prefill_tokens, [half for half in halves if half % _SMALLEST_PREFILL == 0]),
    )


def draft_lengths(num_speculative_tokens: int, *, few_programs: bool) -> tuple[int, ...]:
    """Numbers of drafts that are compiled: the one that is asked for, and half of it where that makes a difference."""
    if not num_speculative_tokens:
        return ()
    if few_programs or num_speculative_tokens < _SMALLEST_HALVED:
        return (num_speculative_tokens,)
    return num_speculative_tokens // 2, num_speculative_tokens


def _drafting_rows(
    decode_rows: tuple[int, ...], max_num_batched_tokens: int, lengths: tuple[int, ...]
) -> tuple[int, ...]:
    """Rows of a step with drafts: as without, as long as all drafts fit the step's tokens.

    Raises:
        ValueError: not even one row's drafts do.
    """
    if not lengths:
        return ()
    rows = tuple(size for size in decode_rows if size * (lengths[-1] + 1) <= max_num_batched_tokens)
    if not rows:
        raise ValueError(
            f"num_speculative_tokens={lengths[-1]} must be below max_num_batched_tokens={max_num_batched_tokens}: raise "
            "--max-num-batched-tokens, or draft fewer tokens"
        )
    return rows


def _decode_rows(max_num_seqs: int) -> tuple[int, ...]:
    return tuple(sorted({1, *_growing(min(_SMALLEST_DECODE, max_num_seqs), max_num_seqs, 2)}))


def _mixed_decode_rows(max_num_seqs: int, few_programs: bool, factor: int) -> tuple[int, ...]:
    most = max_num_seqs - 1  # one slot at least prefills
    if few_programs:
        return (most,)
    if most == 0:
        return ()
    # Multiples of eight: the prefill rows that follow must start where kernels may read from, at multiples of 256 bytes.
    return _growing(min(16, -(-most // 8) * 8), -(-most // 8) * 8, factor)


def _shown_decode_rows(mixed_decode_rows: tuple[int, ...]) -> tuple[int, ...]:
    """Steps without a decode row take the smallest size as well: for a drafter, rows of padding cost little."""
    if not mixed_decode_rows:
        return (0,)
    return _growing(min(_SMALLEST_SHOWN_DECODE, mixed_decode_rows[-1]), mixed_decode_rows[-1], 4)


def _shown_prefill_tokens(max_num_batched_tokens: int) -> tuple[int, ...]:
    return _growing(min(_SMALLEST_SHOWN_PREFILL, max_num_batched_tokens), max_num_batched_tokens, 2)


def _growing(first: int, last: int, factor: int) -> tuple[int, ...]:
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= factor
    return (*sizes, last)


def _halves(sizes: tuple[int, ...]) -> list[int]:
    """The middle between each size and the next, where rows of it make whole tiles of products."""
    return [(low + high) // 2 for low, high in pairwise(sizes) if (low + high) // 2 % _TILE == 0]


def _merged(sizes: tuple[int, ...], more: list[int]) -> tuple[int, ...]:
    return tuple(sorted({*sizes, *more}))


def _smallest(sizes: tuple[int, ...], needed: int, what: str) -> int:
    for size in sizes:
        if size >= needed:
            return size
    raise ValueError(f"{needed} {what} exceed the largest compiled size {sizes[-1]}")
