"""Steps that cross to other hosts: their runners see there what the first host's runner sees."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.device_batch import Bucket, Sizes, pack
from jaxserve.engine.host_pages import PageCopy
from jaxserve.engine.processor_state import slot_processors
from jaxserve.engine.request import Request
from jaxserve.engine.schedule import DecodeRow, PrefillChunk, ScheduledBatch
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.step_wire import StepDecoder, encode_step
from jaxserve.engine.token_masks import is_constrained
from jaxserve.sampling_params import SamplingParams
from tests.engine.scheduler_harness import Harness, make_limits

VOCAB_SIZE = 2000


class Rule:
    """A constraint that cannot cross, nor be asked there."""

    is_complete = False
    is_final = False
    batch = None

    def __reduce__(self) -> Any:
        raise TypeError("a rule is no plain data")

    def start(self) -> Rule:
        return self

    def accept(self, token_id: int) -> None: ...

    def write_mask(self, mask: np.ndarray) -> None: ...

    def forced_run(self, most: int) -> tuple[int, ...]:
        return ()

    def look_ahead(self, drafts: Any, masks: np.ndarray) -> list[bool]:
        return []


def sequence(sampling: SamplingParams, *, index: int = 0, outputs: int = 0) -> Sequence:
    prompt = tuple(range(3, 12))
    return Sequence(
        request=Request("request-1", prompt, sampling, arrival_time=1.0, cache_salt="secret"),
        index=index,
        seed=2**64 - 3,
        stop_token_ids=frozenset({1, 7}),
        max_output_tokens=9,
        constraint=None if sampling.constraint is None else sampling.constraint.start(),
        token_ids=[*prompt, *range(100, 100 + outputs)],
    )


def chunk(some: Sequence, slot: int) -> PrefillChunk:
    tokens = tuple(some.token_ids[4:])
    return PrefillChunk(some, slot, 4, tokens, (5, 0, 2), samples=True, output_index=some.num_output_tokens)


def test_random_traffic_is_packed_alike() -> None:
    rng = random.Random(7)
    harness = Harness(make_limits(page_size=4, pages=20, tokens=12), host_pages=8)
    for number in range(30):
        prompt = [rng.randrange(20) for _ in range(rng.randrange(1, 20))]
        harness.add(prompt, max_tokens=rng.randrange(1, 12), seed=rng.randrange(2**64))
        for _ in range(rng.randrange(6)):
            harness.step()
        if rng.random() < 0.2:
            harness.abort(f"request-{number}")
    harness.run()
    limits = harness.limits
    sizes = Sizes(limits.max_num_seqs, limits.pages_for(limits.longest_sequence), limits.num_pages, limits.page_size)
    bucket = Bucket(limits.max_num_seqs, limits.max_prefill_rows, limits.max_num_batched_tokens)
    decoder = StepDecoder()
    assert sum(len(batch.copies) for batch in harness.runner.launched) > 10
    for batch in harness.runner.launched:
        there = decoder.decode_step(encode_step(batch))
        assert there.copies == batch.copies
        assert [tuple(row[1:]) for row in there.decode] == [tuple(row[1:]) for row in batch.decode]
        assert np.array_equal(pack(there, bucket, sizes), pack(batch, bucket, sizes))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, logprobs=2),
        SamplingParams(
            frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.5, logit_bias=((5, -2.0),), min_tokens=3,
            max_tokens=9,
        ),
        SamplingParams(constraint=Rule()),
    ],
)  # fmt: skip
def test_a_slot_stands_for_its_sequence_from_its_prefill_on(sampling: SamplingParams) -> None:
    some = sequence(sampling, outputs=2)
    decoder = StepDecoder()
    there = decoder.decode_step(encode_step(ScheduledBatch((), (chunk(some, 3),)))).prefill[0]
    row = DecodeRow(some, 3, new_page=6, new_page_index=3, num_drafts=2)
    step = decoder.decode_step(encode_step(ScheduledBatch((row,), (), (PageCopy(True, 4, 9),), num_drafts=2)))
    assert step.decode[0].sequence is there.sequence
    assert (step.decode[0][1:], step.num_drafts, step.copies) == (row[1:], 2, (PageCopy(True, 4, 9),))
    assert is_constrained(step) == (sampling.constraint is not None)
    for name in ("temperature", "top_p", "top_k", "min_p", "logprobs", "changes_logits"):
        assert getattr(there.sequence.request.sampling, name) == getattr(sampling, name)
    here, over_there = (slot_processors(one, 3, 64, VOCAB_SIZE).arrays() for one in (some, there.sequence))
    assert all(np.array_equal(one, other) for one, other in zip(here, over_there, strict=True))


def test_what_a_drafter_is_shown_crosses_too() -> None:
    some = sequence(SamplingParams(), outputs=2)
    decoder = StepDecoder()
    decoder.decode_step(encode_step(ScheduledBatch((), (chunk(some, 3),))))
    row = DecodeRow(some, 3, -1, -1, num_drafts=2)
    missed = PrefillChunk(some, 3, 2, tuple(some.token_ids[2:7]), (5, 0, 2), samples=False, output_index=0)
    batch = ScheduledBatch((row,), (), num_drafts=2, catch_up=((missed,), (missed, missed)))
    there = decoder.decode_step(encode_step(batch))
    assert [len(group) for group in there.catch_up] == [1, 2]
    for found in there.catch_up[1]:
        assert (found.slot, found.start, found.token_ids, found.pages) == (3, 2, missed.token_ids, (5, 0, 2))
        assert not found.samples
    for is_shown in (False, True):
        batch = ScheduledBatch((), (chunk(some, 0),), is_shown=is_shown)
        assert decoder.decode_step(encode_step(batch)).is_shown == is_shown


def test_a_prompt_s_log_probabilities_are_told_once() -> None:
    sampling = SamplingParams(prompt_logprobs=1)
    first, second = sequence(sampling), sequence(sampling, index=1)
    told = sequence(sampling)
    told.prompt_logprobs = [None] * 9
    for some, expected in ((first, True), (second, False), (told, False)):
        there = StepDecoder().decode_step(encode_step(ScheduledBatch((), (chunk(some, 0),)))).prefill[0]
        assert there.sequence.wants_prompt_logprobs == some.wants_prompt_logprobs == expected
        assert there.sequence.token_ids == some.token_ids


def test_a_step_that_only_decodes_is_small_whatever_its_sequences_hold() -> None:
    some = sequence(SamplingParams(), outputs=100_000)
    rows = tuple(DecodeRow(some, slot, -1, -1) for slot in range(64))
    assert len(encode_step(ScheduledBatch(rows, ()))) < 64 * 16 + 100
