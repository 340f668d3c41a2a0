"""Sums of a row over devices that write to each other's memory, for Hopper in Pallas Mosaic GPU.

All of it is latency, so a row goes over once, and nothing follows it: no flag, no fence, no barrier. Every thread stores
its part of the row to the other devices and then reads, in its own device's memory, the place to which the thread of the
same number stores there, until no word of it is empty. What makes that right:

* A word (four bytes, aligned) is read as a whole or not at all, also within the 16 bytes that an instruction moves; each
  one is looked at by itself, so in which order they arrive does not matter. Stores and loads are relaxed at the scope of
  the system: they go to memory and not to a cache of the reader's. The words carry all that is handed over, so there is
  nothing else that an acquire would have to order.
* A row that holds the empty word (a NaN of one bit pattern) is sent with another NaN in its place.
* Who has read a word empties it, in the same thread: a slot is empty again when the kernel ends. The other device
  stores to it next in its second exchange from now (even and odd exchanges have different slots). It begins that one
  when it has read what this device sends in the next exchange, which this device begins when the kernel that emptied the
  slot is complete and its stores are performed in this device's memory, the only place where the word is held. So the
  word that comes then finds an empty slot, and no device can be more than one exchange ahead of another.
* Which exchange it is counts a counter in each device's own memory, one for each thread block: a block speaks only with
  the blocks of its number, so exchanges of few and of many rows may follow each other in any order, in any programs,
  launched as far ahead as one likes, as long as it is the same order on all devices. Nothing is ever set back.
* Blocks wait for those of other devices only, so it is enough that the devices launch the same kernels at some time.

Devices are numbered relative to each other, by the bits in which their ranks differ: so each is the same to the other,
and no rank enters the program. Sums are taken first over the lowest bit, then over the next: as an addition gives the
same in both orders, all devices get the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector
from jaxtyping import Array, Float

from jaxserve.kernels.peer_memory import EMPTY, PeerLayout

VECTOR = 8  # consecutive elements of a row that a thread holds
_NOT_EMPTY_NAN = 0x7FFFFFFF
_PIECE_WORDS = 4  # that one instruction moves
_MAX_WORDS_AT_ONCE = 96  # of a thread, that are waited for together


def row_layout(size: int) -> Any:
    """How a row lies in a warpgroup's registers: a Pallas layout, whose type jax keeps private."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=VECTOR)


def sum_over_devices(table_ref: Any, row: Any, own: Float[Array, " size"], layout: PeerLayout) -> Float[Array, " size"]:
    """The float32 sum of every device's `own`, in a warpgroup; each row by one thread block of each device.

    Args:
        table_ref: int32 [table_words], this device's row of `PeerMemory.table`.
        row: number of the row, below `layout.max_rows`; by it blocks of different devices find each other.
        own: in `row_layout`, of the dtype that is sent.
    """
    registers = row_layout(own.shape[0])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, registers),
        return_type=plgpu.ShapeDtypeStruct(own.shape, jnp.float32, layout=registers),
    )
    def exchange(_: Any, table: Any, row: Any, own: Any) -> Any:
        int64 = ir.IntegerType.get_signless(64)
        first = address_of(table)
        entries = [arith.addi(first, utils.c(8 * place, int64)) for place in range(layout.ranks)]
        # All of the table's loads are under way before the first is waited for.
        memories = [_ptx("ld.global.b64 $0, [$1];", entry, result_types=int64) for entry in entries]
        return Exchange(layout, memories, row.registers.flat[0], own).run()

    return exchange(table_ref, row, own)  # pyright: ignore[reportCallIssue]


def address_of(ref: Any) -> Any:
    """Of a reference's first element, as a 64-bit integer."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


class PairwiseSum:
    """Adds what comes from the devices, in the order of their places: neighbours first, then neighbouring pairs, and so on.

    Each addition is made as soon as both parts are there: rows of eight devices at once are more than a thread has
    registers for.
    """

    def __init__(self, own: Any) -> None:
        self._sums = [(1, own)]  # of how many devices, and the sum over these

    def add(self, part: Any) -> None:
        count, total = 1, part
        while self._sums and self._sums[-1][0] == count:
            total = self._sums.pop()[1] + total
            count *= 2
        self._sums.append((count, total))

    @property
    def total(self) -> Any:
        """Of all devices, whose number is a power of two."""
        [(_, total)] = self._sums
        return total


class Exchange:
    """The instructions of one exchange, in the order in which they are made.

    Args:
        memories: 64-bit addresses of the devices' memory, in the order of a table's row.
        row: its number, a 32-bit integer.
        own: this device's row, in registers.
    """

    def __init__(self, layout: PeerLayout, memories: Sequence[Any], row: Any, own: Any) -> None:
        self._layout = layout
        self._own = own
        self._int32, self._int64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        self._row = arith.extui(self._int64, row)
        self._memories = memories
        self._counter = self._plus(self._memories[0], self._times(self._row, 4))
        self._count = _ptx("ld.relaxed.gpu.global.b32 $0, [$1];", self._counter, result_types=self._int32)
        self._parity = arith.extui(self._int64, arith.andi(self._count, utils.c(1, self._int32)))

    def run(self) -> Any:
        """The float32 sum."""
        ranks = self._layout.ranks
        words = [word for register in self._own.registers.flat for word in self._words(register)]
        for other in range(1, ranks):
            self._send(words, self._slot(self._memories[other], other))
        at_once = max(1, _MAX_WORDS_AT_ONCE // len(words))
        sums = PairwiseSum(self._array(words))
        for first in range(1, ranks, at_once):
            others = range(first, min(first + at_once, ranks))
            for received in self._receive(others, len(words)):
                sums.add(self._array(received))
        self._count_exchange()
        return sums.total

    def _send(self, words: list[Any], slot: Any) -> None:
        empty, instead = (utils.c(_signed(value), self._int32) for value in (EMPTY, _NOT_EMPTY_NAN))
        for index, piece in enumerate(_pieces(words)):
            full = [arith.select(arith.cmpi(arith.CmpIPredicate.eq, word, empty), instead, word) for word in piece]
            _ptx("st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4};", self._place(slot, index), *full)

    def _receive(self, others: Sequence[int], count: int) -> list[list[Any]]:
        """The words of other devices, as soon as all are there."""
        empty = utils.c(_signed(EMPTY), self._int32)
        places = [
            self._place(self._slot(self._memories[0], other), index)
            for other in others
            for index in range(count // _PIECE_WORDS)
        ]
        loop = scf.WhileOp([self._int32] * (_PIECE_WORDS * len(places)), [])
        with ir.InsertionPoint(loop.before.blocks.append()):
            load, types = "ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];", [self._int32] * _PIECE_WORDS
            words = [word for place in places for word in _ptx(load, place, result_types=types)]
            largest = functools.reduce(arith.maxui, words)
            scf.condition(arith.cmpi(arith.CmpIPredicate.eq, largest, empty), words)
        with ir.InsertionPoint(loop.after.blocks.append(*[self._int32] * len(words))):
            scf.yield_([])
        for place in places:
            _ptx("st.relaxed.sys.global.v4.b32 [$0], {$1, $1, $1, $1};", place, empty)
        received = list(loop.results)
        return [received[first : first + count] for first in range(0, len(received), count)]

    def _count_exchange(self) -> None:
        """Once every thread has seen the old count."""
        mgpu.warpgroup_barrier()
        with mgpu.single_thread(mgpu.ThreadSubset.WARPGROUP):
            count = arith.addi(self._count, utils.c(1, self._int32))
            _ptx("st.relaxed.gpu.global.b32 [$0], $1;", self._counter, count)

    def _slot(self, memory: Any, other: int) -> Any:
        """Address, in some device's memory, of this row's slot from that device's `other`."""
        block = self._plus(self._times(self._parity, self._layout.max_rows), self._row)
        slot = self._plus(self._times(block, self._layout.ranks), other)
        offset = self._plus(self._times(slot, self._layout.slot_bytes), self._layout.counter_bytes)
        return self._plus(memory, offset)

    def _place(self, slot: Any, index: int) -> Any:
        """Address of this thread's piece of 16 bytes."""
        register, piece = divmod(index, self._pieces_of_register)
        thread = arith.extui(self._int64, arith.remui(utils.thread_idx(), utils.c(utils.WARPGROUP_SIZE, self._int32)))
        # Instructions move consecutive pieces: the threads of a warp follow each other in each.
        piece = self._plus(thread, (register * self._pieces_of_register + piece) * utils.WARPGROUP_SIZE)
        return self._plus(slot, self._times(piece, 4 * _PIECE_WORDS))

    @property
    def _pieces_of_register(self) -> int:
        return VECTOR * utils.bitwidth(self._own.mlir_dtype) // (32 * _PIECE_WORDS)

    def _words(self, register: Any) -> list[Any]:
        count = self._pieces_of_register * _PIECE_WORDS
        words = utils.bitcast(register, ir.VectorType.get((count,), self._int32))
        return [
            vector.extract(words, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))
            for index in range(count)
        ]

    def _array(self, words: list[Any]) -> Any:
        """These words as the row's elements, in float32."""
        count = self._pieces_of_register * _PIECE_WORDS
        registers = np.empty(self._own.registers.shape, object)
        for index in range(registers.size):
            packed = llvm.mlir_undef(ir.VectorType.get((count,), self._int32))
            for place, word in enumerate(words[index * count : (index + 1) * count]):
                position = ir.DenseI64ArrayAttr.get([place])
                packed = vector.insert(word, packed, dynamic_position=[], static_position=position)
            registers.flat[index] = utils.bitcast(packed, self._own.registers.flat[0].type)
        array = mgpu.FragmentedArray(_registers=registers, _layout=self._own.layout, _is_signed=None)
        return array.astype(ir.F32Type.get())

    def _constant(self, value: int) -> Any:
        return utils.c(value, self._int64)

    def _plus(self, left: Any, right: Any) -> Any:
        return arith.addi(left, self._constant(right) if isinstance(right, int) else right)

    def _times(self, left: Any, right: int) -> Any:
        return arith.muli(left, self._constant(right))


def _pieces(words: list[Any]) -> list[list[Any]]:
    return [words[first : first + _PIECE_WORDS] for first in range(0, len(words), _PIECE_WORDS)]


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _ptx(code: str, *arguments: Any, result_types: Any = None) -> Any:
    return utils.inline_ptx(code, *arguments, result_types=result_types, has_side_effects=True)  # pyright: ignore[reportAttributeAccessIssue] - new in jax 0.11
