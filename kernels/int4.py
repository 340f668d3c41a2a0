"""Signed 4-bit numbers, two in a byte: the even one in the low half, the odd one in the high half."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int8, UInt8


def pack_int4(values: Int8[Array, "*rows size"]) -> UInt8[Array, "*rows half"]:
    """Packs numbers of -8 .. 7, whose last axis must be even, in pairs along that axis.

    The bytes are those of a `jnp.int4` array as XLA and Mosaic GPU hold it: `lax.bitcast_convert_type(packed, jnp.int4)`
    gives the pairs without moving anything.
    """
    if values.shape[-1] % 2:
        raise ValueError(f"the last axis of {values.shape=} must be even: two numbers share a byte")
    unsigned = lax.bitcast_convert_type(values, jnp.uint8)
    return (unsigned[..., 0::2] & jnp.uint8(15)) | (unsigned[..., 1::2] << jnp.uint8(4))


def unpack_int4(packed: UInt8[Array, "*rows half"]) -> Int8[Array, "*rows size"]:
    """The inverse of `pack_int4`."""
    signed = lax.bitcast_convert_type(packed, jnp.int8)
    even, odd = (signed << jnp.int8(4)) >> jnp.int8(4), signed >> jnp.int8(4)  # shifts to the right keep the sign
    return jnp.stack([even, odd], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])
