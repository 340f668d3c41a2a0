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
        verify_modes: kinds of sampling that drafts are verified by, as `sampling_modes`.
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
    verify_modes: tuple[SamplingMode, ...] = ("full",)
    prefill_only_tokens: tuple[int, ...] = ()

    def all(self) -> list[Bucket]:
        decode = [Bucket(rows, 0, 0) for rows in self.decode_rows]
        decode += [Bucket(rows, 0, 0, length) for length in self.draft_lengths for rows in self.drafting_rows]
        mixed = [
            Bucket(rows, self.prefill_rows, tokens) for tokens in self.prefill_tokens for rows in self.mixed_decode_rows
        ]
        return decode + mixed + [Bucket(0, self.prefill_rows, tokens) for tokens in self.prefill_only_tokens]

    def sample_rows_for(self, bucket: Bucket) -> int:
        """Rows of logits that a bucket's forward pass gives."""
        if bucket.num_drafts:
            return bucket.rows
        return _smallest(self.sample_rows, bucket.rows, "rows of logits")

    def for_batch(self, batch: ScheduledBatch) -> Bucket:
        """The smallest bucket that holds a step.

        Raises:
            ValueError: if none does; the scheduler's limits must be those that the buckets were made for.
        """
        rows = len(batch.decode)
        if batch.num_drafts:
            return Bucket(_smallest(self.drafting_rows, rows, "rows with drafts"), 0, 0, batch.num_drafts)
        if not batch.prefill:
            return Bucket(_smallest(self.decode_rows, rows, "decode rows"), 0, 0)
        if len(batch.prefill) > self.prefill_rows:
            raise ValueError(f"{len(batch.prefill)} prefill chunks exceed the {self.prefill_rows} that were compiled")
        tokens = batch.num_tokens - rows
        if not rows and self.prefill_only_tokens:
            return Bucket(0, self.prefill_rows, _smallest(self.prefill_only_tokens, tokens, "prefill tokens"))
        return Bucket(
            _smallest(self.mixed_decode_rows, rows, "decode rows beside prefill"),
            self.prefill_rows,
            _smallest(self.prefill_tokens, tokens, "prefill tokens"),
        )


def make_buckets(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_prefill_rows: int,
    *,
    few_programs: bool,
    num_speculative_tokens: int = 0,
) -> Buckets:
    """Powers of two up to each limit, and the limit itself: every size is a program that a start has to compile.

    Where there may be many programs, a step in which nobody decodes has its own, without a row for those who do. It has
    sizes between the powers of two, since padding is what the first token waits for, and so have the smaller pieces of
    prompts that ride along with those who decode.

    Args:
        few_programs: coarser steps between sizes, where compiling takes longer than padding costs (a CPU).
        num_speculative_tokens: drafts of a row at most; 0: the engine does not speculate.
    """
    lengths = draft_lengths(num_speculative_tokens, few_programs=few_programs)
    prefill_tokens = _growing(
        min(_SMALLEST_PREFILL, max_num_batched_tokens), max_num_batched_tokens, 4 if few_programs else 2
    )
    halves = () if few_programs else _halves(prefill_tokens)
    decode_rows = _growing(1, max_num_seqs, 4) if few_programs else _decode_rows(max_num_seqs)
    mixed_decode_rows = _mixed_decode_rows(max_num_seqs, few_programs)
    most_rows = max(max_num_seqs, max(mixed_decode_rows, default=0) + max_prefill_rows)
    return Buckets(
        decode_rows=decode_rows,
        mixed_decode_rows=mixed_decode_rows,
        prefill_tokens=_merged(prefill_tokens, [half for half in halves if half < _LARGE_PIECE]),
        prefill_rows=max_prefill_rows,
        sample_rows=tuple(sorted({1, most_rows}))
        if few_programs
        else tuple(sorted({min(_SMALLEST_DECODE, most_rows), min(32, most_rows), most_rows})),
        sampling_modes=("greedy", "filtered", "full") if few_programs else ("greedy", "random", "filtered", "full"),
        masked_modes=("full",) if few_programs else ("filtered", "full"),
        draft_lengths=lengths,
        drafting_rows=_drafting_rows(decode_rows, max_num_batched_tokens, lengths),
        verify_modes=("greedy", "full") if few_programs else ("greedy", "filtered", "full"),
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


def _mixed_decode_rows(max_num_seqs: int, few_programs: bool) -> tuple[int, ...]:
    most = max_num_seqs - 1  # one slot at least prefills
    if few_programs:
        return (most,)
    if most == 0:
        return ()
    # Multiples of eight: the prefill rows that follow must start where kernels may read from, at multiples of 256 bytes.
    return _growing(min(16, -(-most // 8) * 8), -(-most // 8) * 8, 2)


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
