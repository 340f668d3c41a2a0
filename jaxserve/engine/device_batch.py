"""How a scheduled step crosses to the device: one packed int32 vector for each step, unpacked by offsets inside jit.

One transfer a step costs less than a dozen small ones. Floats travel as their bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxserve.engine.schedule import ScheduledBatch

_ALIGNMENT = 64  # int32 elements: 256 bytes


@dataclass(frozen=True)
class Bucket:
    """Padded sizes of a step; each has its own compiled program.

    Attributes:
        num_drafts: drafts that each decode row brings at most, beside its last token; only in steps without prefill.
    """

    decode_rows: int
    prefill_rows: int
    prefill_tokens: int
    num_drafts: int = 0

    @property
    def decode_tokens(self) -> int:
        """Tokens of the decode rows: one row's after the other's."""
        return self.decode_rows * (self.num_drafts + 1)

    @property
    def rows(self) -> int:
        """Tokens that get logits: those of the decode rows, then the last one of each prefill row."""
        return self.decode_tokens + self.prefill_rows

    def __str__(self) -> str:
        drafts = f"x{self.num_drafts + 1}" if self.num_drafts else ""
        return f"decode {self.decode_rows}{drafts} + prefill {self.prefill_rows}x{self.prefill_tokens}"


@dataclass(frozen=True)
class Sizes:
    """Sizes that every bucket shares."""

    max_num_seqs: int
    pages_per_seq: int
    num_pages: int
    page_size: int

    @property
    def longest(self) -> int:
        """Tokens that the page table of one sequence has room for."""
        return self.pages_per_seq * self.page_size


def field_shapes(bucket: Bucket, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Name and shape of each packed field, in order."""
    decode, rows, tokens = bucket.decode_rows, bucket.prefill_rows, bucket.prefill_tokens
    return {
        "decode_slots": (decode,),  # max_num_seqs: padding
        "decode_new_page_indices": (decode,),  # pages_per_seq: none
        "decode_new_pages": (decode,),
        "decode_num_drafts": (decode if bucket.num_drafts else 0,),
        "prefill_token_ids": (tokens,),
        "prefill_query_starts": (rows + 1,),
        "prefill_starts": (rows,),  # tokens of the row that are in the cache already
        "prefill_slots": (rows,),  # max_num_seqs: padding
        "prefill_samples": (rows,),  # 1: the chunk ends with the last known token
        "prefill_output_indices": (rows,),
        "prefill_seeds": (rows, 2),
        "prefill_top_k": (rows,),
        "prefill_processed": (rows,),  # 1: penalties or biases change the logits
        "prefill_seeded": (rows,),  # 1: the request brought its seed
        "prefill_float_bits": (rows, 3),  # temperature, top_p, min_p
        "prefill_page_table": (rows, sizes.pages_per_seq),
    }


@functools.cache  # a fraction of what packing a step that decodes takes, instead of most of it
def _offsets(bucket: Bucket, sizes: Sizes) -> tuple[Mapping[str, tuple[int, tuple[int, ...]]], int]:
    """Offset and shape of each field, and the length of the whole vector.

    Every field begins at a multiple of 256 bytes: XLA hands kernels views into the vector, which must be so aligned.
    """
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    offset = 0
    for name, shape in field_shapes(bucket, sizes).items():
        places[name] = offset, shape
        offset += -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
    return places, offset


def packed_size(bucket: Bucket, sizes: Sizes) -> int:
    return _offsets(bucket, sizes)[1]


def views(packed: np.ndarray, bucket: Bucket, sizes: Sizes) -> dict[str, np.ndarray]:
    """The fields of a packed vector on the host, to be written."""
    places, _ = _offsets(bucket, sizes)
    return {name: packed[offset : offset + math.prod(shape)].reshape(shape) for name, (offset, shape) in places.items()}


def pack(batch: ScheduledBatch, bucket: Bucket, sizes: Sizes) -> np.ndarray:
    """The step as one int32 vector [packed_size], padded to its bucket."""
    packed = np.zeros(packed_size(bucket, sizes), np.int32)
    fields = views(packed, bucket, sizes)
    _fill_decode(fields, batch, sizes)
    if bucket.prefill_rows:
        _fill_prefill(fields, batch, sizes)
    return packed


def _fill_decode(fields: Mapping[str, np.ndarray], batch: ScheduledBatch, sizes: Sizes) -> None:
    count = len(batch.decode)
    slots, indices = fields["decode_slots"], fields["decode_new_page_indices"]
    slots[count:] = sizes.max_num_seqs
    indices[:] = sizes.pages_per_seq
    if count:
        slots[:count] = [row.slot for row in batch.decode]
        if batch.num_drafts:
            fields["decode_num_drafts"][:count] = [row.num_drafts for row in batch.decode]
        for position, row in enumerate(batch.decode):
            if row.new_page >= 0:
                indices[position] = row.new_page_index
                fields["decode_new_pages"][position] = row.new_page


def _fill_prefill(fields: Mapping[str, np.ndarray], batch: ScheduledBatch, sizes: Sizes) -> None:
    fields["prefill_slots"][:] = sizes.max_num_seqs
    starts = fields["prefill_query_starts"]
    tokens, floats = fields["prefill_token_ids"], fields["prefill_float_bits"].view(np.float32)
    end = 0
    for row, chunk in enumerate(batch.prefill):
        sampling = chunk.sequence.request.sampling
        tokens[end : end + len(chunk.token_ids)] = chunk.token_ids
        end += len(chunk.token_ids)
        starts[row + 1] = end
        fields["prefill_starts"][row] = chunk.start
        fields["prefill_slots"][row] = chunk.slot
        fields["prefill_samples"][row] = chunk.samples
        fields["prefill_output_indices"][row] = chunk.output_index
        fields["prefill_seeds"][row] = np.array([chunk.sequence.seed], np.uint64).view(np.int32)
        fields["prefill_top_k"][row] = min(max(sampling.top_k, 0), np.iinfo(np.int32).max)
        fields["prefill_processed"][row] = sampling.changes_logits
        fields["prefill_seeded"][row] = sampling.seed is not None
        floats[row] = (sampling.temperature, sampling.top_p, sampling.min_p)
        fields["prefill_page_table"][row, : len(chunk.pages)] = chunk.pages
    starts[len(batch.prefill) + 1 :] = end


def unpack(packed: Array, bucket: Bucket, sizes: Sizes) -> dict[str, Array]:
    """Inverse of `pack`, inside jit: each field at its static offset."""
    places, _ = _offsets(bucket, sizes)
    return {
        name: lax.slice(packed, (offset,), (offset + math.prod(shape),)).reshape(shape)
        for name, (offset, shape) in places.items()
    }


def as_float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def as_unsigned(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.uint32)
