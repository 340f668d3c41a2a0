"""Every step that the scheduler may decide has a compiled shape, whatever the limits are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.buckets import Buckets, make_buckets
from jaxserve.engine.request import Request
from jaxserve.engine.schedule import DecodeRow, PrefillChunk, ScheduledBatch
from jaxserve.engine.sequence import Sequence
from jaxserve.sampling_params import SamplingMode, SamplingParams

COSTS: tuple[SamplingMode, ...] = ("greedy", "random", "filtered", "full")
SEQUENCE = Sequence(
    request=Request("request", (1,), SamplingParams(), arrival_time=0.0),
    index=0,
    seed=0,
    stop_token_ids=frozenset(),
    max_output_tokens=1,
)


def step(decode_rows: int, chunk_lengths: list[int], num_drafts: int = 0) -> ScheduledBatch:
    return ScheduledBatch(
        decode=tuple(DecodeRow(SEQUENCE, slot, -1, -1) for slot in range(decode_rows)),
        prefill=tuple(
            PrefillChunk(SEQUENCE, slot, 0, (1,) * length, (), True, 0)
            for slot, length in enumerate(chunk_lengths, start=decode_rows)
        ),
        num_drafts=num_drafts,
    )


@st.composite
def limits_and_steps(draw: st.DrawFn) -> tuple[dict[str, Any], list[tuple[int, list[int]]]]:
    """Limits as the configuration allows them, and steps that keep to them."""
    max_num_seqs = draw(st.integers(1, 70))
    max_num_batched_tokens = draw(st.integers(max_num_seqs, max_num_seqs + 300))
    max_prefill_rows = draw(st.integers(1, min(max_num_seqs, 16)))
    limits = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_prefill_rows": max_prefill_rows,
        "few_programs": draw(st.booleans()),
        "num_speculative_tokens": draw(st.integers(0, min(8, max_num_batched_tokens - 1))),
    }
    steps = [(draw(st.integers(1, max_num_seqs)), []), (max_num_seqs, [])]
    chunks = draw(st.integers(1, max_prefill_rows))
    decode_rows = draw(st.integers(0, max_num_seqs - chunks))
    budget = max_num_batched_tokens - decode_rows
    last = draw(st.integers(1, budget - chunks + 1))
    steps.append((decode_rows, [1] * (chunks - 1) + [last]))
    steps.append((max_num_seqs - 1, [max_num_batched_tokens - max_num_seqs + 1]))
    steps.append((0, [max_num_batched_tokens]))
    return limits, steps


@given(limits_and_steps())
def test_every_step_has_a_bucket_that_holds_it(case: tuple[dict[str, Any], list[tuple[int, list[int]]]]) -> None:
    limits, steps = case
    buckets = make_buckets(**limits)
    compiled = buckets.all()
    assert len(set(compiled)) == len(compiled)
    for decode_rows, chunks in steps:
        bucket = buckets.for_batch(step(decode_rows, chunks))
        assert bucket in compiled
        assert bucket.decode_rows >= decode_rows
        assert bucket.prefill_rows >= len(chunks)
        assert bucket.prefill_tokens >= sum(chunks)
    for bucket in compiled:
        logits = buckets.sample_rows_for(bucket)
        assert logits == bucket.rows if bucket.num_drafts else bucket.rows <= logits in buckets.sample_rows
        # No shape is larger than what a step may have, but that GPU kernels want decode rows beside prefill in eights.
        most = limits["max_num_seqs"]
        assert bucket.decode_rows <= (most if limits["few_programs"] or not bucket.prefill_rows else -(-most // 8) * 8)
        assert bucket.prefill_tokens <= limits["max_num_batched_tokens"]


@given(
    st.integers(1, 300),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from(COSTS),
    st.booleans(),
)
def test_every_step_with_drafts_has_a_bucket_and_its_verification(
    max_num_seqs: int, num_drafts: int, few_programs: bool, mode: SamplingMode, masked: bool
) -> None:
    buckets = make_buckets(
        max_num_seqs, 2048, min(16, max_num_seqs), few_programs=few_programs, num_speculative_tokens=num_drafts
    )
    modes = buckets.masked_modes if masked else buckets.verify_modes
    served: SamplingMode = next(kind for kind in modes if COSTS.index(kind) >= COSTS.index(mode))
    for length in buckets.draft_lengths:
        for rows in {1, buckets.drafting_rows[-1] // 2 + 1, buckets.drafting_rows[-1]}:
            bucket = buckets.for_batch(step(rows, [], length), is_rare=buckets.is_rare(served, masked))
            assert bucket in buckets.all()
            assert bucket.decode_rows >= rows
            assert bucket.num_drafts == length
            assert (served, masked) in buckets.verifications(bucket)
            assert (served, False) in buckets.verifications(bucket)  # a step with constraints may have no masks


def test_drafts_that_are_verified_as_most_are_pad_no_more_rows_than_steps_without() -> None:
    buckets = make_buckets(64, 2048, 16, few_programs=False, num_speculative_tokens=5)
    for rows in range(1, 65):
        for mode in ("greedy", "filtered"):
            assert (mode, False) in buckets.verifications(buckets.for_batch(step(rows, [], 5)))
        assert buckets.for_batch(step(rows, [], 5)).decode_rows == buckets.for_batch(step(rows, [])).decode_rows
        rare = buckets.for_batch(step(rows, [], 2))
        assert rare == buckets.for_batch(step(rows, [], 2), is_rare=True)
        assert rare.decode_rows <= max(16, 4 * rows)


@given(limits_and_steps())
def test_a_drafter_is_shown_every_step_with_prompts_whole(case: tuple[dict[str, Any], list[Any]]) -> None:
    limits, _ = case
    limits |= {"num_speculative_tokens": 1, "max_num_batched_tokens": 512}
    buckets = make_buckets(**limits)
    for bucket in buckets.all():
        shown = buckets.shown_for(bucket)
        assert shown.decode_rows >= bucket.decode_rows
        assert shown.prefill_rows == bucket.prefill_rows
        assert bucket.prefill_tokens <= shown.prefill_tokens <= max(256, 2 * bucket.prefill_tokens)
        assert shown == bucket or bucket.prefill_rows


def test_speculation_needs_fewer_sizes_of_steps_with_prompts() -> None:
    plain = buckets_of(64, 2048, 16)
    drafting = make_buckets(64, 2048, 16, few_programs=False, num_speculative_tokens=3)

    def with_prompts(buckets: Buckets) -> int:
        return sum(bucket.prefill_rows > 0 for bucket in buckets.all())

    shown = {drafting.shown_for(bucket) for bucket in drafting.all() if bucket.prefill_rows}
    assert with_prompts(drafting) + len(shown) < with_prompts(plain)


def buckets_of(max_num_seqs: int, max_num_batched_tokens: int, max_prefill_rows: int) -> Buckets:
    return make_buckets(max_num_seqs, max_num_batched_tokens, max_prefill_rows, few_programs=False)


def test_padding_at_most_doubles_a_step_that_is_not_small() -> None:
    buckets = buckets_of(64, 2048, 16)
    assert buckets.for_batch(step(1, [])).decode_rows == 1
    for rows in range(5, 65):
        assert buckets.for_batch(step(rows, [])).decode_rows < 2 * rows
    for tokens in range(33, 2048, 7):
        assert buckets.for_batch(step(0, [tokens])).prefill_tokens < 2 * tokens


def test_a_step_in_which_nobody_decodes_has_no_decode_rows_and_at_most_a_third_of_padding() -> None:
    buckets = buckets_of(64, 2048, 16)
    for tokens in range(129, 2048, 7):
        bucket = buckets.for_batch(step(0, [tokens]))
        assert bucket.decode_rows == 0
        assert bucket.prefill_tokens <= 1.5 * tokens


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_single_sequence_may_do_without_a_program_of_its_own(num_drafts: int) -> None:
    options: dict[str, Any] = {"few_programs": False, "num_speculative_tokens": num_drafts}
    with_one, without = (make_buckets(64, 2048, 16, **options, has_single_row=single) for single in (True, False))
    assert without.decode_rows == with_one.decode_rows[1:]
    assert without.for_batch(step(1, [])).decode_rows == 8
    assert without.drafting_rows == with_one.drafting_rows  # each brings several tokens
    assert make_buckets(1, 64, 1, **options, has_single_row=False).decode_rows == (1,)


def test_few_programs_are_fewer() -> None:
    few = make_buckets(16, 256, 4, few_programs=True)
    many = make_buckets(16, 256, 4, few_programs=False)
    assert len(few.all()) + len(few.sample_rows) < len(many.all()) + len(many.sample_rows)


def test_one_sequence_and_one_token() -> None:
    buckets = buckets_of(1, 1, 1)
    assert [(bucket.decode_rows, bucket.prefill_tokens) for bucket in buckets.all()] == [(1, 0), (0, 1)]


@pytest.mark.parametrize(
    ("too_much", "message"),
    [
        (step(10, []), "10 decode rows exceed the largest compiled size 9"),
        (step(9, [1]), "9 decode rows beside prefill exceed the largest compiled size 8"),
        (step(0, [17]), "17 prefill tokens exceed the largest compiled size 16"),
        (step(0, [1, 1, 1]), "3 prefill chunks exceed the 2"),
    ],
)
def test_a_step_beyond_the_limits_is_an_error(too_much: ScheduledBatch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        buckets_of(9, 16, 2).for_batch(too_much)
