"""What the host packs is what the device unpacks: padded, with floats and 64-bit seeds bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.device_batch import Bucket, Sizes, as_float, as_unsigned, field_shapes, pack, packed_size, unpack
from jaxserve.engine.request import Request
from jaxserve.engine.schedule import DecodeRow, PrefillChunk, ScheduledBatch
from jaxserve.engine.sequence import Sequence
from jaxserve.sampling_params import SamplingParams

SIZES = Sizes(max_num_seqs=8, pages_per_seq=5, num_pages=40, page_size=4)
BUCKET = Bucket(decode_rows=4, prefill_rows=3, prefill_tokens=16)


def sequence(seed: int = 0, **sampling: Any) -> Sequence:
    request = Request("request", (1,), SamplingParams(**sampling), arrival_time=0.0)
    return Sequence(request=request, index=0, seed=seed, stop_token_ids=frozenset(), max_output_tokens=1)


def chunk(
    *tokens: int, slot: int = 0, start: int = 0, pages: tuple[int, ...] = (), samples: bool = True, output_index: int = 0,
    of: Sequence | None = None,
) -> PrefillChunk:  # fmt: skip
    return PrefillChunk(of or sequence(), slot, start, tokens, pages, samples, output_index)


def round_trip(batch: ScheduledBatch, bucket: Bucket = BUCKET) -> dict[str, np.ndarray]:
    packed = pack(batch, bucket, SIZES)
    assert packed.dtype == np.int32
    assert packed.shape == (packed_size(bucket, SIZES),)
    fields = jax.jit(unpack, static_argnums=(1, 2))(jnp.asarray(packed), bucket, SIZES)
    assert {name: field.shape for name, field in fields.items()} == field_shapes(bucket, SIZES)
    return {name: np.asarray(field) for name, field in fields.items()}


def test_decode_rows() -> None:
    rows = (DecodeRow(sequence(), 7, -1, -1), DecodeRow(sequence(), 0, 39, 2), DecodeRow(sequence(), 3, 0, 0))
    fields = round_trip(ScheduledBatch(rows, ()))
    assert fields["decode_slots"].tolist() == [7, 0, 3, SIZES.max_num_seqs]
    # Rows without a new page write it past the end of their table, which drops it.
    assert fields["decode_new_page_indices"].tolist() == [SIZES.pages_per_seq, 2, 0, SIZES.pages_per_seq]
    assert fields["decode_new_pages"][1:3].tolist() == [39, 0]
    assert fields["prefill_slots"].tolist() == [SIZES.max_num_seqs] * 3
    assert fields["prefill_query_starts"].tolist() == [0, 0, 0, 0]
    assert not fields["prefill_samples"].any()


def test_prefill_chunks() -> None:
    chunks = (
        chunk(11, 12, 13, slot=2, start=4, pages=(9, 8), samples=False),
        chunk(14, slot=5, start=0, pages=(7,), output_index=6),
    )
    fields = round_trip(ScheduledBatch((), chunks))
    assert fields["prefill_token_ids"].tolist() == [11, 12, 13, 14] + [0] * 12
    assert fields["prefill_query_starts"].tolist() == [0, 3, 4, 4]
    assert fields["prefill_starts"].tolist() == [4, 0, 0]
    assert fields["prefill_slots"].tolist() == [2, 5, SIZES.max_num_seqs]
    assert fields["prefill_samples"].tolist() == [0, 1, 0]
    assert fields["prefill_output_indices"].tolist() == [0, 6, 0]
    assert fields["prefill_page_table"][0, :2].tolist() == [9, 8]
    assert fields["prefill_page_table"][1, 0] == 7
    assert fields["decode_slots"].tolist() == [SIZES.max_num_seqs] * 4


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF])
def test_all_64_bits_of_a_seed(seed: int) -> None:
    fields = round_trip(ScheduledBatch((), (chunk(1, of=sequence(seed)),)))
    low, high = np.asarray(as_unsigned(jnp.asarray(fields["prefill_seeds"])))[0].tolist()
    assert (high << 32) | low == seed


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 0.7, 2.0])
@pytest.mark.parametrize(("top_p", "min_p"), [(0.0, 1.0), (1e-9, 1e-9), (1.0, 0.0), (0.95, 0.05)])
def test_floats_keep_their_bits(temperature: float, top_p: float, min_p: float) -> None:
    one = chunk(1, of=sequence(temperature=temperature, top_p=top_p, min_p=min_p))
    fields = round_trip(ScheduledBatch((), (one, one)))
    floats = np.asarray(as_float(jnp.asarray(fields["prefill_float_bits"])))
    np.testing.assert_array_equal(floats[:2], np.array([[temperature, top_p, min_p]] * 2, np.float32))


@pytest.mark.parametrize(
    ("top_k", "packed"), [(-1, 0), (0, 0), (1, 1), (50, 50), (2**31 - 1, 2**31 - 1), (10**12, 2**31 - 1)]
)
def test_top_k_of_any_size(top_k: int, packed: int) -> None:
    fields = round_trip(ScheduledBatch((), (chunk(1, of=sequence(top_k=top_k)),)))
    assert fields["prefill_top_k"][0] == packed


@pytest.mark.parametrize("bucket", [Bucket(1, 0, 0), Bucket(0, 1, 1), Bucket(3, 1, 16)], ids=str)
def test_buckets_without_one_part(bucket: Bucket) -> None:
    decode = (DecodeRow(sequence(), 1, -1, -1),) if bucket.decode_rows else ()
    prefill = (chunk(5, slot=2),) if bucket.prefill_rows else ()
    fields = round_trip(ScheduledBatch(decode, prefill), bucket)
    assert fields["decode_slots"].tolist() == [1, 8, 8][: bucket.decode_rows]
    assert fields["prefill_slots"].tolist() == [2][: bucket.prefill_rows]
