"""How the Hopper kernel for products with quantized weights widens integers, in registers, to what tensor cores take.

A bfloat16 whose upper byte is zero is its lower byte times 2**-133: up to 127 as a subnormal number, above that with the
exponent that has the same steps. So a number that is moved to where it is never negative (by flipping its sign bit) needs
nothing but to be spread over 16 bits and one fused multiply-add, which moves it back and rounds once; for 4 bits that
multiplies with the group's scale as well.

Weights reach threads in vectors of 32 bits, and the tensor cores' layout has two neighbours of a row in a thread. 8-bit ones
change places between threads, while they are narrow; 4-bit ones are stored so that each thread's vector has what it
needs (see `int4.py`), and mostly where it needs it: those in the upper half of a byte count 16 times as much, which their
factor takes back.

What this gives is smaller than the weights by powers of two, which the products are multiplied with at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array

INT8_EXPONENT = 6  # 2**133 itself is no bfloat16, but 2**127 is
INT4_EXPONENT = 24  # room for scales up to 2**18 above one, and far below

_SPREAD = 133


def widen_int8(narrow: Array, *, on_device: bool) -> Array:
    """int8 [outputs, inputs], in the layout WGMMA_UPCAST_2X, to bfloat16 of 2**-INT8_EXPONENT times that, in WGMMA."""
    if not on_device:
        return narrow.astype(jnp.bfloat16) * jnp.bfloat16(2.0**-INT8_EXPONENT)
    return _on_device(narrow.shape, _widen_int8, plgpu.Layout.WGMMA_UPCAST_2X)(narrow)


class Int4Factors(NamedTuple):
    """What the scales of a group's outputs make of numbers of 0 .. 15 that were spread; bfloat16 [outputs].

    Attributes:
        low: factors of those that were a byte's lower half.
        high: of those that were its upper half.
        offset: what is added then.
    """

    low: Array
    high: Array
    offset: Array


def int4_factors(scales: Array) -> Int4Factors:
    """Of bfloat16 scales [outputs]; exact, being powers of two times these."""
    wide = scales.astype(jnp.float32)
    low, high, offset = (
        (wide * jnp.float32(by)).astype(jnp.bfloat16)
        for by in (2.0 ** (_SPREAD - INT4_EXPONENT), 2.0 ** (_SPREAD - INT4_EXPONENT - 4), -8 * 2.0**-INT4_EXPONENT)
    )
    return Int4Factors(low, high, offset)


def widen_int4(narrow: Array, factors: Int4Factors, *, on_device: bool) -> Array:
    """int4 [outputs, inputs], in the layout WGMMA_UPCAST_4X and the order of `int4.py`, times scales.

    Where it is not on a device the numbers are in their plain order.

    Returns:
        bfloat16 of 2**-INT4_EXPONENT times the products, each rounded once, in WGMMA.
    """
    if not on_device:
        scales = lax.broadcast_in_dim(factors.offset.astype(jnp.float32) / -8, narrow.shape, [0])
        return (narrow.astype(jnp.float32) * scales).astype(jnp.bfloat16)
    wide = [lax.broadcast_in_dim(numbers, narrow.shape, [0]) for numbers in factors]
    layouts = (plgpu.Layout.WGMMA_UPCAST_4X, *[plgpu.Layout.WGMMA] * len(wide))
    return _on_device(narrow.shape, _widen_int4, *layouts)(narrow, *wide)


def _on_device(shape: tuple[int, ...], widen: Callable[..., Any], *layouts: Any) -> Callable[..., Array]:
    """`widen` on registers, for arrays in `layouts`."""
    result = plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=layouts, return_type=result)(widen)


def _widen_int8(_: Any, narrow: Any) -> Any:
    """A vector's four numbers and those of the thread beside it become each one's four of two tiles."""
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(narrow.shape), object)
    # Bytes 0, 1 of the even thread's vector, then of the odd one's; 2, 3 of both in the odd thread. The second byte of the
    # first pair stands third, so that a mask takes the pair apart from the other.
    order = arith.select(_bit_is_clear(1), utils.c(0x5140, _i32()), utils.c(0x3726, _i32()))
    factor, offset = _constant(0x7F007F00), _constant(0xC000C000)  # 2**127 and -2, twice
    for index, register in np.ndenumerate(narrow.registers):
        word = utils.bitcast(register, _i32())
        word = utils.prmt(word, utils.shfl_bfly(word, 1), order)
        for tile in range(2):
            pair = _ptx(
                f"{{ .reg .b32 s; shr.u32 s, $1, {8 * tile}; lop3.b32 s, s, 0x00ff00ff, 0x00800080, 0x6a;"
                " fma.rn.bf16x2 $0, s, $2, $3; }",
                word,
                factor,
                offset,
            )
            registers[index[0], 2 * index[1] + tile, *index[2:-1]] = _as_pair(pair)
    return _in_wgmma_layout(registers)


def _widen_int4(_: Any, narrow: Any, low: Any, high: Any, offset: Any) -> Any:
    """A vector's eight numbers become a thread's eight of four tiles: those of tile i begin at bits 4 i and 16 + 4 i."""
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(narrow.shape), object)
    for index, register in np.ndenumerate(narrow.registers):
        word = utils.bitcast(register, _i32())
        upper = _ptx("shr.u32 $0, $1, 8;", word)
        for tile in range(4):
            place = (index[0], 4 * index[1] + tile, *index[2:])
            bits = 4 * (tile % 2)
            pair = _ptx(
                f"{{ .reg .b32 s; lop3.b32 s, $1, {0x000F000F << bits}, {0x00080008 << bits}, 0x6a;"
                " fma.rn.bf16x2 $0, s, $2, $3; }",
                word if tile < 2 else upper,
                *(utils.bitcast(factor.registers[place], _i32()) for factor in (high if tile % 2 else low, offset)),
            )
            registers[place] = _as_pair(pair)
    return _in_wgmma_layout(registers)


def _bit_is_clear(bit: int) -> Any:
    """Of a thread's number."""
    masked = arith.andi(utils.thread_idx(), utils.c(bit, _i32()))
    return arith.cmpi(arith.CmpIPredicate.eq, masked, utils.c(0, _i32()))


def _ptx(code: str, *operands: Any) -> Any:
    """One 32-bit register from others, by PTX without side effects."""
    return llvm.inline_asm(_i32(), list(operands), code, ",".join(["=r", *["r"] * len(operands)]))


def _constant(value: int) -> Any:
    return llvm.ConstantOp(_i32(), ir.IntegerAttr.get(_i32(), value)).result


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _as_pair(register: Any) -> Any:
    return utils.bitcast(register, ir.VectorType.get((2,), ir.BF16Type.get()))


def _in_wgmma_layout(registers: np.ndarray) -> Any:
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
