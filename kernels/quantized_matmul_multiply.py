"""What the warpgroups that compute do in the Hopper kernel for products with quantized weights: their parts of the sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxserve.kernels.decode_matmul_finish import TILE
from jaxserve.kernels.quantized_matmul_plan import X_DTYPES, Problem
from jaxserve.kernels.quantized_matmul_widen import Int4Factors, int4_factors, widen_int4, widen_int8


def role(problem: Problem, warpgroup) -> tuple[Any, Any, Any]:
    """The unit that a compute warpgroup is of, which of its helpers it is, and the turn that it takes of these."""
    helpers = problem.helpers
    unit, helper = (warpgroup, 0) if helpers == 1 else (lax.div(warpgroup, helpers), lax.rem(warpgroup, helpers))
    return unit, helper, 0 if problem.turns == 1 else lax.rem(helper, problem.turns)


def own_tiles(problem: Problem, helper) -> list[Any]:
    """Of a unit's tiles, those that a helper multiplies."""
    return [helper // problem.turns] if problem.own_tiles < problem.tiles else list(range(problem.tiles))


def tile_outputs(problem: Problem, unit, tile) -> tuple[Any, Any]:
    """The part and the outputs of a unit's tile, counted from where the units are."""
    part, output = (tile, unit * TILE) if problem.is_swiglu else (0, (unit * problem.tiles + tile) * TILE)
    return part, pl.ds(pl.multiple_of(output, TILE), TILE)


def _narrow(problem: Problem, unit, tile, smem, slot) -> Any:
    """A weight tile [TILE, block_k]: in registers where it is to be widened there."""
    narrow = smem["w"].at[slot, *tile_outputs(problem, unit, tile)]
    if problem.form == "float8":
        return narrow
    layout = plgpu.Layout.WGMMA_UPCAST_4X if problem.form == "int4" else plgpu.Layout.WGMMA_UPCAST_2X
    return plgpu.load(narrow, layout=layout)  # pyright: ignore[reportCallIssue]


def _group_factors(problem: Problem, unit, tile, group: int, smem, slot) -> Int4Factors:
    """int4: what a group's scales are to `widen_int4`."""
    part, outputs = tile_outputs(problem, unit, tile)
    scales = plgpu.load(  # pyright: ignore[reportCallIssue]
        smem["scales"].at[slot, group, part, outputs], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
    )
    return int4_factors(scales)


def _issue(
    problem: Problem, warpgroup, slot, smem, accumulators, before_is_done: Callable[[], None] | None = None
) -> None:
    """Starts a step's products, which go to `accumulators` [TILE, padded_rows], one for each tile.

    The tensor cores multiply one slab of weights while the next is widened. Where weights are widened, `before_is_done` is
    called as soon as all products from before this step are.
    """
    unit, helper, _ = role(problem, warpgroup)
    tiles = own_tiles(problem, helper)
    narrow = [_narrow(problem, unit, tile, smem, slot) for tile in tiles]
    if problem.form == "float8":
        for accumulator, left in zip(accumulators, narrow, strict=True):
            plgpu.wgmma(accumulator, left, smem["x"].at[slot].transpose((1, 0)))
        return
    slabs_per_group = problem.block_k // problem.groups_per_step // problem.slab
    factors: list[Int4Factors] = []  # of each tile
    for slab in range(problem.block_k // problem.slab):
        inputs = slice(slab * problem.slab, (slab + 1) * problem.slab)
        x = smem["x"].at[slot, :, pl.ds(slab * problem.slab, problem.slab)].transpose((1, 0))
        if problem.form == "int4" and slab % slabs_per_group == 0:
            group = slab // slabs_per_group
            factors = [_group_factors(problem, unit, tile, group, smem, slot) for tile in tiles]
        for index, (weights, accumulator) in enumerate(zip(narrow, accumulators, strict=True)):
            left = weights[:, inputs]
            if problem.form == "int4":
                left = widen_int4(left, factors[index], on_device=problem.on_device)
            elif problem.form == "int8":
                left = widen_int8(left, on_device=problem.on_device)
            else:
                left = plgpu.layout_cast(left, plgpu.Layout.WGMMA).astype(X_DTYPES[problem.form])
            if not problem.on_device:  # the interpreter multiplies references only
                smem["wide"].at[warpgroup][...] = left
                left = smem["wide"].at[warpgroup]
            plgpu.wgmma(accumulator, left, x)
            plgpu.wgmma_wait(1)  # for the one before this: its registers are free
            if before_is_done is not None:
                before_is_done()
                before_is_done = None


def multiply(problem: Problem, warpgroup, smem, barriers) -> list[Array]:
    """A compute warpgroup's part of k: a [TILE, padded_rows] float32 result for each of its weight tiles."""
    turn = role(problem, warpgroup)[2]
    accumulator = plgpu.ACC((TILE, problem.padded_rows), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    accumulators = [accumulator] * problem.own_tiles

    steps, stages, turns = problem.steps // problem.turns, problem.config.stages, problem.turns

    def slot_after(slot):
        return jnp.where(slot >= stages - turns, slot - (stages - turns), slot + turns)

    def slot_before(slot):
        return jnp.where(slot < turns, slot + (stages - turns), slot - turns)

    def release(slot) -> None:
        plgpu.barrier_arrive(barriers["consumed"].at[slot])

    def in_place(*accumulators):
        def step(_, slot):
            plgpu.barrier_wait(barriers["ready"].at[slot])
            if problem.releases_late:
                _issue(problem, warpgroup, slot, smem, accumulators, lambda: release(slot_before(slot)))
            else:
                _issue(problem, warpgroup, slot, smem, accumulators)
                plgpu.wgmma_wait(0)
                release(slot)
            return slot_after(slot)

        end = lax.fori_loop(0, steps, step, jnp.int32(turn))
        if problem.releases_late:
            plgpu.wgmma_wait(0)
            release(slot_before(end))
        return [accumulator[...] for accumulator in accumulators]

    if problem.form != "float8":
        return pl.run_scoped(in_place, *accumulators)

    def step(_, carry):
        slot, totals = carry
        plgpu.barrier_wait(barriers["ready"].at[slot])

        def products(*accumulators):
            _issue(problem, warpgroup, slot, smem, accumulators)
            return [accumulator[...] for accumulator in accumulators]

        new_totals = jax.tree.map(jnp.add, totals, tuple(pl.run_scoped(products, *accumulators)))
        release(slot)
        return slot_after(slot), new_totals

    zeros = plgpu.layout_cast(jnp.zeros((TILE, problem.padded_rows), jnp.float32), plgpu.Layout.WGMMA)
    return list(lax.fori_loop(0, steps, step, (jnp.int32(turn), (zeros,) * problem.own_tiles))[1])
