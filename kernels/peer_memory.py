"""Memory of each device that the kernels of the others write to: where it lies, and what is laid out in it.

Devices of one process can reach each other's memory by its address. jax's own way to give a kernel its peers' addresses
(`plgpu.remote_ref`) has XLA hand them over anew, and launch a barrier between all devices, before every launch. Here each
device has one array that stays where it is for as long as the process serves; its address is read once, and every kernel
gets a table of the addresses as an ordinary array: it launches like any other kernel, also within a CUDA graph.

A device's memory holds, for each thread block of an exchange, a counter of its exchanges and twice (for exchanges of
even and odd number) a slot from each device. A slot that holds nothing has all bits set: `peer_exchange` says why.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

EMPTY = 0xFFFFFFFF  # a word of a slot that holds nothing: as float32 a NaN, as two bfloat16 or float16 two of them
ALIGNMENT = 128  # bytes: of the counters' end, and of slots


@dataclasses.dataclass(frozen=True)
class PeerLayout:
    """What lies where in every device's memory.

    Attributes:
        ranks: devices that exchange, a power of two.
        max_rows: thread blocks of an exchange, each of which sends a row to each device.
        slot_bytes: of the longest row.
    """

    ranks: int
    max_rows: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if self.ranks < 2 or self.ranks.bit_count() > 1:
            raise ValueError(f"{self.ranks=} must be a power of two, 2 or more")
        if self.max_rows < 1:
            raise ValueError(f"{self.max_rows=} must be 1 or more")
        if self.slot_bytes < ALIGNMENT or self.slot_bytes % ALIGNMENT:
            raise ValueError(f"{self.slot_bytes=} must be a multiple of {ALIGNMENT}")

    @property
    def counter_bytes(self) -> int:
        """An int32 for each row."""
        return -(-4 * self.max_rows // ALIGNMENT) * ALIGNMENT

    @property
    def words(self) -> int:
        """Four-byte words of a device's memory."""
        return (self.counter_bytes + 2 * self.max_rows * self.ranks * self.slot_bytes) // 4

    @property
    def table_words(self) -> int:
        """Four-byte words of a device's row of the table: addresses of eight bytes."""
        return 2 * self.ranks


@functools.partial(jax.tree_util.register_dataclass, data_fields=["table", "memory"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class PeerMemory:
    """The memory of all devices of a mesh axis and the table of its addresses; inside `jax.shard_map` one device's part.

    To be kept for as long as a program that got the table may run, and never to be donated: a program knows the memory
    by its address alone. The calls of one program that exchange through it must depend on each other, so that XLA runs
    them in one order on all devices. The program has a collective of XLA's as well, which makes the devices wait for each
    other once it is ready on all, and its first run ends before another is launched: no device then loads anything while
    its kernel waits for another device, for which CUDA might wait in turn.

    Attributes:
        table: int32 [ranks, table_words], a row for each device.
        memory: uint32 [ranks, words], a row for each device.
    """

    table: jax.Array
    memory: jax.Array
    layout: PeerLayout


def empty_memory(layout: PeerLayout) -> jax.Array:
    """What a device's memory holds before the first exchange: counters of zero and empty slots; uint32 [words]."""
    # Compared in words: bytes of the memory of many devices and long rows are beyond what an int32 counts.
    return jnp.where(jnp.arange(layout.words) < layout.counter_bytes // 4, jnp.uint32(0), jnp.uint32(EMPTY))


def address_table(addresses: Sequence[int]) -> np.ndarray:
    """The table for memory at these addresses, by rank: int32 [ranks, table_words], whose pairs are eight-byte integers.

    A device's row begins with its own; at place i is that of the device whose rank differs in the bits of i.
    """
    ranks = range(len(addresses))
    return np.asarray([[addresses[rank ^ place] for place in ranks] for rank in ranks], "<u8").view("<i4")


def make_peer_memory(mesh: Mesh, axis: str, layout: PeerLayout) -> PeerMemory:
    """Takes memory on every device of a mesh with one axis and exchanges the addresses.

    Raises:
        ValueError: the mesh has another number of devices, other axes, or devices of other processes, whose memory has
            no address here.
    """
    if mesh.axis_names != (axis,) or mesh.size != layout.ranks:
        raise ValueError(f"{dict(mesh.shape)} must be {layout.ranks} devices on the axis {axis!r}")
    devices = list(mesh.devices.flat)
    if any(device.process_index != devices[0].process_index for device in devices):
        raise ValueError(f"{devices} belong to several processes; peer memory takes those of one")
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    fill = jax.jit(lambda: jnp.tile(empty_memory(layout)[None], (layout.ranks, 1)), out_shardings=sharding)
    # Every device's memory is filled before any device gets to know of it.
    memory = jax.block_until_ready(fill())
    by_device = {shard.device: shard.data.unsafe_buffer_pointer() for shard in memory.addressable_shards}
    table = jax.device_put(address_table([by_device[device] for device in devices]), sharding)
    return PeerMemory(table=table, memory=memory, layout=layout)
