"""Signed 4-bit numbers, two in a byte: the even place in the low half, the odd one in the high half.

Which number has which place goes by the length of a group, the inputs that share a scale:

* A multiple of 32: each run of 32 consecutive numbers is interleaved. Number k = 8t + 2q + h of a run (t and q 0 .. 3, h
  0 or 1) has place i = 8q + 4h + t. The little-endian word q of a run's four 32-bit words then has numbers 8t + 2q and
  8t + 2q + 1 at bits 4t and 16 + 4t. That is what one thread of a Hopper warpgroup takes of 32 inputs: thread q of four
  neighbours holds inputs 2q, 2q + 1, 2q + 8 and 2q + 9 of each 16 of the product's left operand. It reads one word and
  widens pairs of numbers as they lie, and threads exchange nothing.
* Any other: in order, which is that of `lax.bitcast_convert_type(packed, jnp.int4)`. Interleaved numbers are not in it.

Runs are never cut: not by groups, which they divide, and so not by devices, over which no group reaches.
"""

from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int8, UInt8

RUN_LENGTH = 32  # numbers that are interleaved with one another

_AnyArray = TypeVar("_AnyArray", Array, np.ndarray)


def pack_int4(values: Int8[_AnyArray, "*rows size"], group_length: int) -> UInt8[_AnyArray, "*rows half"]:
    """Packs numbers of -8 .. 7 along the last axis, in the order that groups of `group_length` of them have.

    Raises:
        ValueError: the last axis is odd, or is no whole number of runs where these are interleaved.
    """
    *rows, size = values.shape
    _check(size, group_length)
    unsigned = values.view(np.uint8)
    if group_length % RUN_LENGTH:
        pairs = unsigned.reshape(*rows, size // 2, 2)
        return (pairs[..., 0] & 15) | (pairs[..., 1] << 4)
    # A byte has numbers of two neighbouring t, which lie eight apart: [*rows, runs, pair of t, which of the two, 2q + h].
    pairs = unsigned.reshape(*rows, size // RUN_LENGTH, 2, 2, 8)
    packed = (pairs[..., 0, :] & 15) | (pairs[..., 1, :] << 4)
    return packed.swapaxes(-1, -2).reshape(*rows, size // 2)


def unpack_int4(packed: UInt8[Array, "*rows half"], group_length: int) -> Int8[Array, "*rows size"]:
    """The inverse of `pack_int4`."""
    *rows, half = packed.shape
    _check(2 * half, group_length)
    signed = lax.bitcast_convert_type(packed, jnp.int8)
    axis = -1
    if group_length % RUN_LENGTH == 0:
        signed = signed.reshape(*rows, 2 * half // RUN_LENGTH, 8, 2)
        signed = signed.swapaxes(-1, -2)  # [*rows, runs, pair of t, 2q + h]
        axis = -2
    low, high = (signed << jnp.int8(4)) >> jnp.int8(4), signed >> jnp.int8(4)  # shifts to the right keep the sign
    return jnp.stack([low, high], axis).reshape(*rows, 2 * half)


def _check(size: int, group_length: int) -> None:
    if size % 2:
        raise ValueError(f"the last axis of {size} numbers must be even: two share a byte")
    if group_length % RUN_LENGTH == 0 and size % RUN_LENGTH:
        raise ValueError(
            f"the last axis of {size} numbers must be a multiple of {RUN_LENGTH}: groups of {group_length} have runs of that"
        )
