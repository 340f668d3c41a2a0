"""Barriers between all thread blocks of a kernel, for Hopper in Pallas Mosaic GPU; all blocks must be resident.

Counters lie in global memory, one for each barrier, used once a launch. Whoever passes a barrier sees what the others
stored before they arrived, by plain loads and by the copy engine alike: a release and an acquire at the scope of the
device order the former, a proxy fence on either side the latter.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.utils import SemaphoreRef, memref_ptr  # pyright: ignore[reportAttributeAccessIssue]

COUNTERS = 16  # of a launch; the last one counts who has left


def arrive(counter_ref) -> None:
    """The warpgroup has stored what it had to; adds one to the counter."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(_, counter):
        utils.inline_ptx("fence.proxy.async;", has_side_effects=True)  # pyright: ignore[reportAttributeAccessIssue]
        mgpu.warpgroup_barrier()
        SemaphoreRef(memref_ptr(counter)).signal(1, memory_scope="gpu")

    signal(counter_ref)  # pyright: ignore[reportCallIssue]


def wait(counter_ref, arrivals: int) -> None:
    """Holds the warpgroup until the counter stands at `arrivals`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def await_counter(_, counter):
        SemaphoreRef(memref_ptr(counter)).wait(arrivals, decrement=False, memory_scope="gpu")
        utils.inline_ptx("fence.proxy.async;", has_side_effects=True)  # pyright: ignore[reportAttributeAccessIssue]

    await_counter(counter_ref)  # pyright: ignore[reportCallIssue]


def leave(counters_ref, leavers: int) -> None:
    """To be called by everyone who waited, after the last wait: the last to leave zeroes all counters for the next."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def zero_if_last(_, counters):
        mgpu.warpgroup_barrier()
        stores = " ".join(f"@last st.relaxed.gpu.global.b32 [$0+{4 * i}], zero;" for i in range(COUNTERS))
        with utils.single_thread(utils.ThreadSubset.WARPGROUP):
            utils.inline_ptx(  # pyright: ignore[reportAttributeAccessIssue]
                "{ .reg .pred last; .reg .b32 left, zero; mov.b32 zero, 0;"
                f" atom.acq_rel.gpu.global.add.u32 left, [$0+{4 * (COUNTERS - 1)}], 1;"
                f" setp.eq.u32 last, left, {leavers - 1}; {stores} }}",
                memref_ptr(counters),
                has_side_effects=True,
            )

    zero_if_last(counters_ref)  # pyright: ignore[reportCallIssue]
