"""How the Hopper kernel for products with quantized weights widens integers, in registers, to what tensor cores take.

A bfloat16 whose upper byte is zero is its lower byte times 2**-133: up to 127 as a subnormal number, above that with the
exponent that has the same steps. So a number that is moved to where it is never negative (by flipping its sign bit) needs
nothing but to be spread over 16 bits and one fused multiply-add, which moves it back and rounds once; for 4 bits that
multiplies with the group's scale as well.

Weights reach threads in vectors of 32 bits and must change places between them before they are spread, which the tensor
cores' layout wants: it has two neighbours of a row in a thread. They do so while they are narrow.

What this gives is smaller than the weights by powers of two, which the products are multiplied with at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def widen_int4(narrow: Array, scales: Array, *, on_device: bool) -> Array:
    """int4 [outputs, inputs], in the layout WGMMA_UPCAST_4X, times bfloat16 scales [outputs].

    Returns:
        bfloat16 of 2**-INT4_EXPONENT times the products, each rounded once, in WGMMA.
    """
    wide = scales.astype(jnp.float32)
    if not on_device:
        product = narrow.astype(jnp.float32) * lax.broadcast_in_dim(wide, narrow.shape, [0])
        return (product * 2.0**-INT4_EXPONENT).astype(jnp.bfloat16)
    factors, offsets = (
        lax.broadcast_in_dim((wide * jnp.float32(by)).astype(jnp.bfloat16), narrow.shape, [0])
        for by in (2.0 ** (_SPREAD - INT4_EXPONENT), -8 * 2.0**-INT4_EXPONENT)
    )
    layouts = (plgpu.Layout.WGMMA_UPCAST_4X, plgpu.Layout.WGMMA, plgpu.Layout.WGMMA)
    return _on_device(narrow.shape, _widen_int4, *layouts)(narrow, factors, offsets)


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


def _widen_int4(_: Any, narrow: Any, factors: Any, offsets: Any) -> Any:
    """A vector's eight numbers and those of the three threads beside it become each one's eight of four tiles."""
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(narrow.shape), object)
    halves = arith.select(_bit_is_clear(2), utils.c(0x5410, _i32()), utils.c(0x3276, _i32()))
    # Byte i is then the pair of tile i.
    order = arith.select(_bit_is_clear(1), utils.c(0x6240, _i32()), utils.c(0x3715, _i32()))
    for index, register in np.ndenumerate(narrow.registers):
        word = utils.bitcast(register, _i32())
        word = utils.prmt(word, utils.shfl_bfly(word, 2), halves)
        word = utils.prmt(word, utils.shfl_bfly(word, 1), order)
        low = _ptx("lop3.b32 $0, $1, 0x0f0f0f0f, 0x08080808, 0x6a;", word)
        high = _ptx("{ .reg .b32 s; shr.u32 s, $1, 4; lop3.b32 $0, s, 0x0f0f0f0f, 0x08080808, 0x6a; }", word)
        for tile in range(4):
            place = (index[0], 4 * index[1] + tile, *index[2:])
            # Byte `tile` of the one and of the other, and above each the copies of its sign bit, which is zero.
            select = 0xC480 + 0x1111 * tile
            pair = _ptx(
                f"{{ .reg .b32 s; prmt.b32 s, $1, $2, {select}; fma.rn.bf16x2 $0, s, $3, $4; }}",
                low,
                high,
                *(utils.bitcast(numbers.registers[place], _i32()) for numbers in (factors, offsets)),
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
