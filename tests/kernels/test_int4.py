"""Where 4-bit numbers have their bits, in groups of every kind of length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.int4 import pack_int4, unpack_int4

INTERLEAVED, IN_ORDER = (32, 64, 96, 128), (16, 6)


def numbers_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-8, 8, shape).astype(np.int8)


@pytest.mark.parametrize("group_length", [*INTERLEAVED, *IN_ORDER])
def test_numbers_come_back_and_numpy_packs_the_same_bytes(group_length: int) -> None:
    numbers = numbers_of(2, 5, 4 * group_length)
    packed = pack_int4(jnp.asarray(numbers), group_length)
    assert packed.shape == (2, 5, 2 * group_length) and packed.dtype == jnp.uint8
    np.testing.assert_array_equal(unpack_int4(packed, group_length), numbers)
    on_the_host = pack_int4(numbers, group_length)
    assert isinstance(on_the_host, np.ndarray)
    np.testing.assert_array_equal(on_the_host, packed)


@pytest.mark.parametrize("group_length", INTERLEAVED)
def test_each_word_of_a_run_has_what_one_thread_of_a_product_takes(group_length: int) -> None:
    numbers = numbers_of(3, 4 * group_length)
    packed = np.asarray(pack_int4(jnp.asarray(numbers), group_length))
    words = packed.view("<u4").reshape(3, -1, 4)
    runs = numbers.reshape(3, -1, 32).view(np.uint8) & 15
    places = set()
    for word in range(4):
        for pair in range(4):
            for half in range(2):
                bit = 4 * pair + 16 * half
                np.testing.assert_array_equal((words[..., word] >> bit) & 15, runs[..., 8 * pair + 2 * word + half])
                places.add((word, bit))
    assert len(places) == 32


@pytest.mark.parametrize("group_length", [*INTERLEAVED, *IN_ORDER])
def test_what_xla_takes_the_bytes_for_is_in_order_only_where_nothing_is_interleaved(group_length: int) -> None:
    numbers = jnp.asarray(numbers_of(3, 4 * group_length))
    pairs = jax.lax.bitcast_convert_type(pack_int4(numbers, group_length), jnp.int4)
    as_they_lie = np.asarray(pairs.astype(jnp.int8)).reshape(numbers.shape)
    assert np.array_equal(as_they_lie, numbers) == (group_length in IN_ORDER)
    if group_length in INTERLEAVED:
        places = [8 * (k % 8 // 2) + 4 * (k % 2) + k // 8 for k in range(32)]
        assert sorted(places) == list(range(32))
        np.testing.assert_array_equal(as_they_lie.reshape(-1, 32)[:, places], numbers.reshape(-1, 32))


def test_the_even_number_of_a_pair_is_in_the_low_half() -> None:
    packed = pack_int4(jnp.asarray([[-8, -7, 0, 1, 6, 7]], jnp.int8), 6)
    assert packed.tolist() == [[0x98, 0x10, 0x76]]


@pytest.mark.parametrize("size", [3, 33])
@pytest.mark.parametrize("group_length", [32, 6])
def test_an_odd_number_of_numbers_is_refused(size: int, group_length: int) -> None:
    with pytest.raises(ValueError, match=f"last axis of {size} numbers must be even"):
        pack_int4(jnp.zeros((2, size), jnp.int8), group_length)


def test_a_part_of_a_run_is_refused() -> None:
    message = "last axis of 48 numbers must be a multiple of 32: groups of 64 have runs of that"
    with pytest.raises(ValueError, match=message):
        pack_int4(jnp.zeros((2, 48), jnp.int8), 64)
    with pytest.raises(ValueError, match=message):
        unpack_int4(jnp.zeros((2, 24), jnp.uint8), 64)
