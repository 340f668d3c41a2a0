"""Barriers between all thread blocks of a kernel, for Hopper in Pallas Mosaic GPU; all blocks must be resident.

Counters lie in global memory, one for each barrier, used once a launch; others count who of a few has done his part, so
that the last one can go on alone. Whoever passes a barrier sees what the others
stored before they arrived, by plain loads and by the copy engine alike: a release and an acquire at the scope of the
device order the former, a proxy fence on either side the latter.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.utils import SemaphoreRef, memref_ptr  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref

BARRIERS = 16  # of a launch; the last one counts who has left
GROUP_COUNTERS = 1008
COUNTERS = BARRIERS + GROUP_COUNTERS


def arrive(counter_ref, *, copies: bool = True) -> None:
    """The warpgroup has stored what it had to; adds one to the counter.

    Args:
        copies: whether the copy engine may read or have written what is stored; else all go by plain stores and loads.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(_, counter):
        if copies:
            utils.inline_ptx("fence.proxy.async;", has_side_effects=True)  # pyright: ignore[reportAttributeAccessIssue]
        mgpu.warpgroup_barrier()
        SemaphoreRef(memref_ptr(counter)).signal(1, memory_scope="gpu")

    signal(counter_ref)  # pyright: ignore[reportCallIssue]


def wait(counter_ref, arrivals: int, *, copies: bool = True) -> None:
    """Holds the warpgroup until the counter stands at `arrivals`; `copies` as in `arrive`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def await_counter(_, counter):
        SemaphoreRef(memref_ptr(counter)).wait(arrivals, decrement=False, memory_scope="gpu")
        if copies:
            utils.inline_ptx("fence.proxy.async;", has_side_effects=True)  # pyright: ignore[reportAttributeAccessIssue]

    await_counter(counter_ref)  # pyright: ignore[reportCallIssue]


def leave(counters_ref, leavers: int) -> None:
    """To be called by everyone who waited, after the last wait: the last to leave zeroes all barriers for the next."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def zero_if_last(_, counters):
        mgpu.warpgroup_barrier()
        stores = " ".join(f"@last st.relaxed.gpu.global.b32 [$0+{4 * i}], zero;" for i in range(BARRIERS))
        with utils.single_thread(utils.ThreadSubset.WARPGROUP):
            utils.inline_ptx(  # pyright: ignore[reportAttributeAccessIssue]
                "{ .reg .pred last; .reg .b32 left, zero; mov.b32 zero, 0;"
                f" atom.acq_rel.gpu.global.add.u32 left, [$0+{4 * (BARRIERS - 1)}], 1;"
                f" setp.eq.u32 last, left, {leavers - 1}; {stores} }}",
                memref_ptr(counters),
                has_side_effects=True,
            )

    zero_if_last(counters_ref)  # pyright: ignore[reportCallIssue]


@plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(), plgpu.RefType()),
    return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
)
def count_in(_: Any, counter: Any, arrival: Any) -> Any:
    """The warpgroup has stored its part; adds one to the counter [1] and returns what it was.

    Whoever comes later sees what was stored before, by plain loads, and what any thread of the warpgroup loads afterwards
    it loads after that. `arrival` is int32 [1] of the warpgroup's own in shared memory.
    """
    int32 = ir.IntegerType.get_signless(32)
    first = mgpu.c(0, ir.IndexType.get())
    mgpu.warpgroup_barrier()
    with mgpu.single_thread(mgpu.ThreadSubset.WARPGROUP):
        add = "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;"
        before = mgpu.utils.inline_ptx(add, memref_ptr(counter), result_types=int32, has_side_effects=True)  # pyright: ignore[reportAttributeAccessIssue] - new in jax 0.11
        memref.store(before, arrival, [first])
    mgpu.warpgroup_barrier()
    return mgpu.FragmentedArray.splat(memref.load(arrival, [first]), (), is_signed=True)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
def reset(_: Any, counter: Any) -> None:
    """Zeroes a counter [1] for the next launch; by the last one who counted himself in."""
    with mgpu.single_thread(mgpu.ThreadSubset.WARPGROUP):
        store = "st.relaxed.gpu.global.b32 [$0], 0;"
        mgpu.utils.inline_ptx(store, memref_ptr(counter), has_side_effects=True)  # pyright: ignore[reportAttributeAccessIssue] - new in jax 0.11
