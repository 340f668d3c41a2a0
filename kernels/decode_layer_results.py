"""The second half of a decode layer's phase: parts of sums become results, and the next phase's x."""

import dataclasses
import functools
import math
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array

from jaxserve.kernels import grid_barrier
from jaxserve.kernels.decode_layer_plan import RESULT_COLUMNS, Phase, Problem

WARPS, LANES = 4, 32


@dataclasses.dataclass(frozen=True)
class Worker:
    """A warpgroup, where it is, and what it shares with others."""

    problem: Problem
    block: Any
    warpgroup: Any
    smem: dict[str, Any]
    barriers: dict[str, Any]
    counters_ref: Any

    @property
    def number(self) -> Any:
        return self.block * self.problem.config.compute_warpgroups + self.warpgroup

    def tell_all(self, index: int) -> None:
        """What this warpgroup has stored is there for whoever has waited for `index`."""
        if self.problem.on_device:
            grid_barrier.arrive(self.counters_ref.at[index])
        else:
            plgpu.barrier_arrive(self.barriers["grid"].at[index])

    def wait_for_all(self, index: int) -> None:
        """Waits until every compute warpgroup of every block has told all."""
        if self.problem.on_device:
            grid_barrier.wait(self.counters_ref.at[index], self.problem.workers)
        else:
            plgpu.barrier_wait(self.barriers["grid"].at[index])

    def leave(self) -> None:
        if self.problem.on_device:
            grid_barrier.leave(self.counters_ref, self.problem.workers + self.problem.blocks)


def _layout(rows: int, columns: int) -> Any:
    """How [rows, columns] lies in a warpgroup's registers: warps share out the rows, so that no sum of a row leaves one.

    Columns go to vectors of up to four elements, as long as every thread has some, and to lanes; lanes that are left
    take rows, and if there are none they hold copies.
    """
    vector = 4
    while vector > 1 and (columns % vector or rows * columns < vector * WARPS * LANES):
        vector //= 2
    lane_columns = math.gcd(columns // vector, LANES)
    lane_rows = math.gcd(rows // WARPS, LANES // lane_columns)
    copies = LANES // (lane_columns * lane_rows)
    lane_tile = (lane_rows, lane_columns * vector)
    layout = mgpu.TiledLayout(
        mgpu.fragmented_array.Tiling(((WARPS * lane_rows, lane_tile[1]), lane_tile, (1, vector))),
        (-6, -5),
        (mgpu.fragmented_array.Replicated(copies), -4, -3) if copies > 1 else (-4, -3),
        -1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _load(ref, layout) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue] (jax 0.10)


def _spread(vector: Array, shape: tuple[int, int], axis: int, layout) -> Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (axis,)), layout)


def _columns(tile) -> Any:
    return pl.ds(pl.multiple_of(tile * RESULT_COLUMNS, RESULT_COLUMNS), RESULT_COLUMNS)


def start_residual(problem: Problem, worker: Worker, residual_ref) -> None:
    """Starts fetching this worker's tiles of the residual."""
    phase = problem.phases[0]
    for index in range(problem.rounds(phase)):
        tile = worker.number + index * problem.workers

        @pl.when(tile < phase.result_tiles)
        def _(index=index, tile=tile):
            plgpu.copy_gmem_to_smem(
                residual_ref.at[pl.ds(0, problem.padded_rows), _columns(tile)],
                worker.smem["residual"].at[worker.warpgroup, index],
                worker.barriers["residual"].at[worker.warpgroup * problem.rounds(phase) + index],
                oob_mode=plgpu.OOBFillMode.ZEROS,
            )


def finish_phase(problem: Problem, index: int, worker: Worker, refs: dict[str, Any]) -> None:
    """Tells of this warpgroup's parts, waits for all others', and makes the results that it owns."""
    phase = problem.phases[index]
    worker.tell_all(2 * index)
    if phase.name in ("gate_up", "qkv"):
        _load_scale(problem, worker, refs["squares"].at[0 if phase.name == "gate_up" else 1])
    worker.wait_for_all(2 * index)
    rounds, at_once = problem.rounds(phase), problem.rounds_at_once(phase)
    for first in range(0, rounds, at_once):
        some = range(first, min(first + at_once, rounds))
        tiles = [worker.number + number * problem.workers for number in some]
        # All loads are under way before the first is needed.
        sums = [_add_parts(problem, phase, refs["parts"], tile) for tile in tiles]
        for number, tile, values in zip(some, tiles, sums, strict=True):

            @pl.when(tile < phase.result_tiles)
            def _(number=number, tile=tile, values=values):
                _finish_tile(problem, phase, worker, refs, number, tile, values)


def _load_scale(problem: Problem, worker: Worker, squares_ref) -> None:
    """Leaves each row's factor of the norm in shared memory."""
    layout = _layout(*squares_ref.shape)
    mean = jnp.sum(_load(squares_ref, layout), axis=1) / problem.hidden
    worker.smem["scale"].at[worker.warpgroup][...] = lax.rsqrt(mean + problem.eps)


def _add_parts(problem: Problem, phase: Phase, parts_ref, tile) -> list[Array]:
    """A tile of the sums, [padded_rows, RESULT_COLUMNS]; of gate and up, if the phase has both."""
    layout = _layout(problem.padded_rows, RESULT_COLUMNS)
    # A worker with fewer tiles than others loads its last one again: a load that is not needed costs no branch.
    tile = jnp.minimum(tile, phase.result_tiles - 1)
    tiles_of_group = phase.group_results // RESULT_COLUMNS
    group = lax.div(tile, jnp.int32(tiles_of_group))
    place = lax.rem(tile, jnp.int32(tiles_of_group))
    first_unit = group * phase.steps
    first, last = [phase.owner(unit, _divide) for unit in (first_unit, first_unit + phase.steps - 1)]
    sums = []
    for part in range(2 if phase.is_swiglu else 1):
        columns = _columns(place + part * tiles_of_group)
        parts = []
        for owner in range(phase.max_owners):
            block = jnp.minimum(first + owner, last)
            segment = group - lax.div(phase.start(block, _divide), jnp.int32(phase.steps))
            values = _load(parts_ref.at[block, segment, :, columns], layout)
            if owner:  # the first one is always there
                values = values * (first + owner <= last).astype(jnp.float32)
            parts.append(values)
        sums.append(functools.reduce(jnp.add, parts))
    return sums


def _divide(a, b):
    return lax.div(a, jnp.int32(b))


def _finish_tile(
    problem: Problem, phase: Phase, worker: Worker, refs: dict[str, Any], number: int, tile, sums: list[Array]
) -> None:
    """Residual, scale, activation and rounding, and whatever the next phase needs of the tile."""
    shape = (problem.padded_rows, RESULT_COLUMNS)
    layout = _layout(*shape)
    if phase.name in ("output", "down"):
        _finish_residual(problem, phase, worker, refs, number, tile, sums[0])
        return
    scale = _load(worker.smem["scale"].at[worker.warpgroup], layout.reduce((1,)))
    scaled = [values * _spread(scale, shape, 0, layout) for values in sums]
    if phase.is_swiglu:
        gate, up = scaled
        refs["activated"].at[:, _columns(tile)][...] = (gate * lax.logistic(gate) * up).astype(jnp.bfloat16)
    else:
        _store(problem, worker, refs["qkv"], tile, scaled[0].astype(jnp.bfloat16))


def _finish_residual(
    problem: Problem, phase: Phase, worker: Worker, refs: dict[str, Any], number: int, tile, values: Array
) -> None:
    """Adds the residual; leaves the sum for the next time, and for the norm after it."""
    shape = (problem.padded_rows, RESULT_COLUMNS)
    layout = _layout(*shape)
    is_first = phase.name == "output"
    if is_first:
        plgpu.barrier_wait(worker.barriers["residual"].at[worker.warpgroup * problem.rounds(phase) + number])
    kept = worker.smem["residual"].at[worker.warpgroup, number]
    x = (values + _load(kept, layout).astype(jnp.float32)).astype(jnp.bfloat16)
    if is_first:
        kept[...] = x
    else:
        _store(problem, worker, refs["x"], tile, x)
        if problem.qkv is None:
            return
    norm, place = ("mlp_norm", 0) if is_first else ("next_norm", 1)
    wide = x.astype(jnp.float32)
    weights = _load(refs[norm].at[_columns(tile)], layout.reduce((0,))).astype(jnp.float32)
    refs["normed"].at[place, :, _columns(tile)][...] = (wide * _spread(weights, shape, 1, layout)).astype(jnp.bfloat16)
    refs["squares"].at[place, :, tile][...] = jnp.sum(wide * wide, axis=1)


def _store(problem: Problem, worker: Worker, out_ref, tile, values: Array) -> None:
    """Stores a tile of a result of the kernel; the copy leaves out rows past the result's end."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staging = worker.smem["out"].at[worker.warpgroup]
    staging[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, out_ref.at[pl.ds(0, problem.padded_rows), _columns(tile)])
