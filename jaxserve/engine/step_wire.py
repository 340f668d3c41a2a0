"""What a step's decision is on its way to other hosts: bytes that hold just what their runners look at.

A sequence crosses with its prefill chunks; from then on its slot stands for it. So a step that only decodes takes 16 bytes
a row, whatever its sequences hold.
"""

from __future__ import annotations

import dataclasses
import pickle
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from jaxserve.engine.host_pages import PageCopy
from jaxserve.engine.request import Request
from jaxserve.engine.schedule import DecodeRow, PrefillChunk, ScheduledBatch
from jaxserve.engine.sequence import Sequence

_ROW_FIELDS = len(DecodeRow._fields) - 1  # all but the sequence


@dataclass(frozen=True)
class Constrained:
    """Stands for the constraint of a sequence: the masks come from the host that knows it."""

    is_complete: bool = False
    is_final: bool = False
    batch: None = None

    def accept(self, token_id: int) -> None:
        raise TypeError(f"token {token_id} is for the host that schedules")

    def write_mask(self, mask: np.ndarray) -> None:
        raise TypeError(f"a mask of {len(mask)} words is for the host that schedules")

    def forced_run(self, most: int) -> tuple[int, ...]:
        raise TypeError(f"what is forced, {most} tokens at most, is for the host that schedules")

    def look_ahead(self, drafts: Collection[int], masks: np.ndarray) -> list[bool]:
        raise TypeError(f"the masks of {len(drafts)} drafts are for the host that schedules")


def encode_step(batch: ScheduledBatch) -> bytes:
    """A step's decision."""
    columns = list(zip(*batch.decode, strict=True))[1:]  # all but the sequences
    decode = array("i", chain.from_iterable(columns)).tobytes()
    prefill = [_chunk_fields(chunk) for chunk in batch.prefill]
    copies = [tuple(copy) for copy in batch.copies]
    catch_up = [[_chunk_fields(chunk) for chunk in group] for group in batch.catch_up]
    step = decode, batch.num_drafts, prefill, copies, batch.is_shown, catch_up
    return pickle.dumps(step, pickle.HIGHEST_PROTOCOL)


class StepDecoder:
    """Makes steps of bytes again. It must be given every step, since slots stand for the sequences that got them last."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}  # by slot

    def decode_step(self, data: bytes) -> ScheduledBatch:
        """What `encode_step` was given, as far as a runner looks at it."""
        decode, num_drafts, prefill, copies, is_shown, catch_up = pickle.loads(data)
        chunks = tuple(self._chunk(*fields) for fields in prefill)
        table = np.frombuffer(decode, np.int32).reshape(_ROW_FIELDS, -1).T.tolist()
        return ScheduledBatch(
            decode=tuple(DecodeRow(self._sequences[row[0]], *row) for row in table),
            prefill=chunks,
            copies=tuple(PageCopy(*copy) for copy in copies),
            num_drafts=num_drafts,
            is_shown=is_shown,
            catch_up=tuple(tuple(self._chunk(*fields) for fields in group) for group in catch_up),
        )

    def _chunk(
        self,
        slot: int,
        start: int,
        token_ids: bytes,
        pages: bytes,
        samples: bool,
        output_index: int,
        sequence: tuple[Any, ...],
    ) -> PrefillChunk:
        self._sequences[slot] = _sequence(slot, *sequence)
        return PrefillChunk(
            sequence=self._sequences[slot],
            slot=slot,
            start=start,
            token_ids=tuple(_ints(token_ids)),
            pages=tuple(_ints(pages)),
            samples=samples,
            output_index=output_index,
        )


def _chunk_fields(chunk: PrefillChunk) -> tuple[Any, ...]:
    sequence = chunk.sequence
    sampling = sequence.request.sampling
    # What is known of a prompt's log probabilities stays where it is told.
    prompt_logprobs = sampling.prompt_logprobs if sequence.wants_prompt_logprobs else None
    described = (
        dataclasses.replace(sampling, constraint=None, prompt_logprobs=prompt_logprobs),
        sequence.seed,
        sequence.constraint is not None,
        sequence.stop_token_ids,
        sequence.max_output_tokens,
        sequence.num_prompt_tokens,
        _bytes(sequence.token_ids),
    )
    return (
        chunk.slot, chunk.start, _bytes(chunk.token_ids), _bytes(chunk.pages), chunk.samples, chunk.output_index, described
    )  # fmt: skip


def _sequence(
    slot: int,
    sampling: Any,
    seed: int,
    is_constrained: bool,
    stop_token_ids: frozenset[int],
    max_output_tokens: int,
    num_prompt_tokens: int,
    token_ids: bytes,
) -> Sequence:
    tokens = _ints(token_ids)
    return Sequence(
        request=Request(f"slot-{slot}", tuple(tokens[:num_prompt_tokens]), sampling, arrival_time=0.0),
        index=0,  # the choice that reports log probabilities of the prompt
        seed=seed,
        stop_token_ids=stop_token_ids,
        max_output_tokens=max_output_tokens,
        constraint=Constrained() if is_constrained else None,
        token_ids=tokens,
        slot=slot,
    )


def _bytes(numbers: Iterable[int]) -> bytes:
    return array("i", numbers).tobytes()


def _ints(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()
