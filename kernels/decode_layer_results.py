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
from jaxserve.kernels.decode_layer_plan import Phase, Problem

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

    def count_in(self, counter: Any) -> Any:
        """How many have counted themselves in before, in one of the counters of groups."""
        arrival = self.smem["arrival"].at[self.warpgroup]
        return grid_barrier.count_in(  # pyright: ignore[reportCallIssue] (the decorator passes the context)
            self._group_counter(counter), arrival
        )

    def reset(self, counter: Any) -> None:
        grid_barrier.reset(self._group_counter(counter))  # pyright: ignore[reportCallIssue]

    def _group_counter(self, counter: Any) -> Any:
        return self.counters_ref.at[pl.ds(grid_barrier.BARRIERS + counter, 1)]

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


def _divide(a, b):
    return lax.div(a, jnp.int32(b))


def segments(phase: Phase, block) -> tuple[Any, Any, Any, Any]:
    """A block's first unit, one past its last one, the group of the first, and the number of groups it has parts of."""
    start, end = [phase.start(number, _divide, jnp.minimum) for number in (block, block + 1)]
    first_group = _divide(start, phase.steps)
    count = jnp.where(end > start, _divide(end - 1, phase.steps) - first_group + 1, 0)
    return start, end, first_group, count


def _columns(phase: Phase, tile) -> Any:
    return pl.ds(pl.multiple_of(tile * phase.result_columns, phase.result_columns), phase.result_columns)


def load_scale(problem: Problem, worker: Worker, squares_ref) -> None:
    """Leaves each row's factor of the norm in shared memory, for the compute warpgroups."""
    layout = _layout(*squares_ref.shape)
    mean = jnp.sum(_load(squares_ref, layout), axis=1) / problem.hidden
    worker.smem["scale"][...] = lax.rsqrt(mean + problem.eps)
    plgpu.barrier_arrive(worker.barriers["scale"])


def finish_phase(problem: Problem, index: int, worker: Worker, refs: dict[str, Any]) -> None:
    """Makes the results that fall to this warpgroup, once all parts of their sums are there."""
    phase = problem.phases[index]
    if phase.name in ("gate_up", "qkv"):
        plgpu.barrier_wait(worker.barriers["scale"])
    if phase.cut.join == "last":
        _finish_groups(problem, index, worker, refs)
        return
    worker.tell_all(2 * index)
    worker.wait_for_all(2 * index)
    rounds, at_once = problem.rounds(phase), problem.rounds_at_once(phase)
    for first in range(0, rounds, at_once):
        tiles = [worker.number + number * problem.workers for number in range(first, min(first + at_once, rounds))]
        # All loads are under way before the first is needed. A worker with fewer tiles than others loads the last one
        # once more: a load that is not needed costs no branch.
        sums = [_add_parts(phase, refs["parts"], jnp.minimum(tile, phase.result_tiles - 1)) for tile in tiles]
        for tile, values in zip(tiles, sums, strict=True):

            @pl.when(tile < phase.result_tiles)
            def _(tile=tile, values=values):
                _finish_tile(problem, phase, worker, refs, tile, values)


def _finish_groups(problem: Problem, index: int, worker: Worker, refs: dict[str, Any]) -> None:
    """Counts in this warpgroup's parts, and finishes those groups whose last part was among them."""
    phase = problem.phases[index]
    _, _, first_group, count = segments(phase, worker.block)
    if not problem.on_device:  # no counters in the interpreter: everyone waits, and who has the last part finishes
        worker.tell_all(2 * index)
        worker.wait_for_all(2 * index)
    tiles = phase.warpgroup_results // phase.result_columns

    def finish_group(segment, carry):
        group = first_group + segment
        first, last = _owners(phase, group)
        if problem.on_device:
            counter = problem.first_group_counter(index) + group * phase.warpgroups + worker.warpgroup
            is_last = worker.count_in(counter) == last - first
        else:
            is_last = worker.block == last

        @pl.when(is_last)
        def _():
            if problem.on_device:
                worker.reset(counter)

            def finish(place, carry):
                tile = (group * phase.warpgroups + worker.warpgroup) * tiles + place
                _finish_tile(problem, phase, worker, refs, tile, _add_parts(phase, refs["parts"], tile))
                return carry

            lax.fori_loop(0, tiles, finish, None)

        return carry

    lax.fori_loop(0, count, finish_group, None)


def _owners(phase: Phase, group) -> tuple[Any, Any]:
    """The first and the last block that have parts of a group."""
    first_unit = group * phase.steps
    return phase.owner(first_unit, _divide), phase.owner(first_unit + phase.steps - 1, _divide)


def _add_parts(phase: Phase, parts_ref, tile) -> list[Array]:
    """A tile of the sums, [padded_rows, result_columns]; of gate and up, if the phase has both."""
    layout = _layout(phase.padded_rows, phase.result_columns)
    tiles = phase.warpgroup_results // phase.result_columns
    warpgroup, place = _divide(tile, tiles), lax.rem(tile, jnp.int32(tiles))
    group, warpgroup = _divide(warpgroup, phase.warpgroups), lax.rem(warpgroup, jnp.int32(phase.warpgroups))
    first, last = _owners(phase, group)
    sums = []
    for part in range(phase.parts):
        columns = _columns(phase, (warpgroup * phase.parts + part) * tiles + place)
        parts = []
        for owner in range(phase.max_owners):
            block = jnp.minimum(first + owner, last)
            segment = group - _divide(phase.start(block, _divide, jnp.minimum), phase.steps)
            values = _load(parts_ref.at[block, segment, :, columns], layout)
            if owner:  # the first one is always there
                values = values * (first + owner <= last).astype(jnp.float32)
            parts.append(values)
        sums.append(functools.reduce(jnp.add, parts))
    return sums


def _finish_tile(problem: Problem, phase: Phase, worker: Worker, refs: dict[str, Any], tile, sums: list[Array]) -> None:
    """Residual, scale, activation and rounding, and whatever the next phase needs of the tile."""
    shape = (problem.padded_rows, phase.result_columns)
    layout = _layout(*shape)
    if phase.name in ("output", "down"):
        _finish_residual(problem, phase, worker, refs, tile, sums[0])
        return
    scale = _load(worker.smem["scale"], layout.reduce((1,)))
    scaled = [values * _spread(scale, shape, 0, layout) for values in sums]
    if phase.is_swiglu:
        gate, up = scaled
        refs["activated"].at[:, _columns(phase, tile)][...] = (gate * lax.logistic(gate) * up).astype(jnp.bfloat16)
    else:
        _store(phase, worker, refs["qkv"], tile, scaled[0].astype(jnp.bfloat16))


def _finish_residual(problem: Problem, phase: Phase, worker: Worker, refs: dict[str, Any], tile, values: Array) -> None:
    """Leaves the residual stream for the next time, and for the norm after it; the first time it is in the sum."""
    shape = (problem.padded_rows, phase.result_columns)
    layout = _layout(*shape)
    kept = refs["after_attention"].at[:, _columns(phase, tile)]
    is_first = phase.name == "output"
    if is_first:
        x = values.astype(jnp.bfloat16)
        kept[...] = x
    else:
        x = (values + _load(kept, layout).astype(jnp.float32)).astype(jnp.bfloat16)
        _store(phase, worker, refs["x"], tile, x)
        if problem.qkv is None:
            return
    norm, place = ("mlp_norm", 0) if is_first else ("next_norm", 1)
    wide = x.astype(jnp.float32)
    weights = _load(refs[norm].at[_columns(phase, tile)], layout.reduce((0,))).astype(jnp.float32)
    normed = (wide * _spread(weights, shape, 1, layout)).astype(jnp.bfloat16)
    refs["normed"].at[place, :, _columns(phase, tile)][...] = normed
    refs[f"squares_{phase.name}"].at[:, tile][...] = jnp.sum(wide * wide, axis=1)


def _store(phase: Phase, worker: Worker, out_ref, tile, values: Array) -> None:
    """Stores a tile of a result of the kernel; the copy leaves out rows past the result's end."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staging = worker.smem[f"out_{phase.name}"].at[worker.warpgroup]
    staging[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, out_ref.at[pl.ds(0, phase.padded_rows), _columns(phase, tile)])
