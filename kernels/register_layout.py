"""How an array of any shape is dealt out to the registers of a warpgroup."""

import math
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu

WARPS, LANES = 4, 32  # of a warpgroup


def spread_layout(shape: tuple[int, ...]) -> Any:
    """How an array of any shape lies in a warpgroup's registers: a Pallas layout, whose type jax keeps private.

    The last axis goes to vectors of up to four elements (16 bytes of float32), as long as no thread is left without
    work, then to lanes, then to warps; what they do not need of it falls to the axes before. An array that is too small
    for all lanes or warps is held several times over.
    """
    vector = 4
    while vector > 1 and (shape[-1] % vector or math.prod(shape) < vector * WARPS * LANES):
        vector //= 2
    rest = [*shape[:-1], shape[-1] // vector]
    splits = []
    for free in (LANES, WARPS):
        split = [1] * len(shape)
        for axis in reversed(range(len(shape))):
            split[axis] = math.gcd(rest[axis], free)
            rest[axis] //= split[axis]
            free //= split[axis]
        splits.append((split, free))
    (lanes, lane_copies), (warps, warp_copies) = splits
    rank = len(shape)
    vector_tile = (*[1] * (rank - 1), vector)
    lane_tile = tuple(lane * element for lane, element in zip(lanes, vector_tile, strict=True))
    warp_tile = tuple(warp * element for warp, element in zip(warps, lane_tile, strict=True))
    # Tiled by these three, an array's last axes are `warps`, then `lanes`, then the vector's.
    layout = mgpu.TiledLayout(
        mgpu.fragmented_array.Tiling((warp_tile, lane_tile, vector_tile)),
        (mgpu.fragmented_array.Replicated(warp_copies), *range(-3 * rank, -2 * rank)),
        (mgpu.fragmented_array.Replicated(lane_copies), *range(-2 * rank, -rank)),
        -1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)
