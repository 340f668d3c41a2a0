"""Which cut the Hopper kernel for products with quantized weights takes: the one that should take the fewest cycles."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from jaxserve.kernels.quantized_matmul_plan import (
    MIN_STAGES,
    MULTIPROCESSORS,
    ROW_BYTES,
    SHARED_BYTES,
    X_DTYPES,
    Form,
    Problem,
    TuningConfig,
    block_k,
)

# Those that `choose_config` considers: no others have been measured.
_CHOSEN_SPLITS = (1, 2, 4, 8)
_CHOSEN_SHARED_BYTES = SHARED_BYTES - 1024  # which leaves a little for barriers
_MAX_STAGES = 16
# Few rows are limited by how many warps hide each other's latencies: four, wherever the registers suffice.
_UNITS_AND_TURNS = ((4, 1), (3, 1), (2, 2), (2, 1), (1, 4), (1, 3), (1, 2))
# Clusters of so many thread blocks that run at once, one block on a multiprocessor, as an H200's driver says
# (cuOccupancyMaxActiveClusters): a cluster stays in one of the processor's parts, which have 18, 16 or 14 multiprocessors.
_CLUSTERS_AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
# A Hopper card's, for `_expected_cycles`: all multiprocessors together...
_MEMORY_BYTES_PER_CYCLE = 2300
_L2_BYTES_PER_CYCLE = 4200
# ... and each of them, where 1 to 4 warpgroups compute; instructions are counted for each thread.
_BLOCK_BYTES_PER_CYCLE = 32
_INSTRUCTIONS_PER_CYCLE = (28, 58, 70, 76)
_MULTIPLICATIONS_PER_CYCLE = 2048
_ALONE = 0.4  # of the shorter one of widening and multiplying, what the other one does not hide
_FEW_STAGES_FACTOR = 1.1
_SHORT_ROWS_FACTOR = 1.1
_ROUND_CYCLES = 2000
_JOIN_CYCLES = 2000  # of a cluster
_COUNTED_JOIN_CYCLES = 6000  # where blocks meet by a counter in memory instead
_JOIN_BLOCK_CYCLES = 500  # of each block, either way
_ADD_TURNS_CYCLES = 500
# Of a thread for each weight: what it takes to widen it, mostly.
_INSTRUCTIONS: dict[Form, float] = {"float8": 1.2, "float8-wide": 2.4, "int8": 3.1, "int4": 1.95}


def choose_config(
    form: Form,
    rows: int,
    k: int,
    columns: int,
    *,
    is_swiglu: bool,
    has_residual: bool = False,
    group_length: int = 128,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    multiprocessors: int = MULTIPROCESSORS,
) -> TuningConfig:
    """Picks by shape alone, so that every start compiles the same program: the cut that should take the fewest cycles.

    Args:
        multiprocessors: of the card. Where there are fewer than of an H100 or H200, blocks that share k are always a
            cluster: others would wait for blocks that find no room.
    """
    arguments = (form, rows, k, columns, group_length, is_swiglu, has_residual, jnp.dtype(out_dtype))
    best: tuple[float, TuningConfig] | None = None
    ways_to_meet = (True, False) if multiprocessors >= MULTIPROCESSORS else (True,)
    for split, (units, turns), row_bytes, clustered in itertools.product(
        _CHOSEN_SPLITS, _UNITS_AND_TURNS, (ROW_BYTES, ROW_BYTES // 2), ways_to_meet
    ):
        tuning = TuningConfig(
            split, max(MIN_STAGES, turns), units, turns=turns, row_bytes=row_bytes, clustered=clustered
        )
        try:
            smallest = Problem(*arguments, tuning, None)
        except ValueError:  # does not go into the shape
            continue
        stages = _most_stages(smallest)
        cycles = _expected_cycles(smallest, stages)
        if row_bytes < ROW_BYTES:
            cycles *= _SHORT_ROWS_FACTOR
        if best is None or cycles < best[0]:
            best = cycles, dataclasses.replace(tuning, stages=stages)
    if best is None:
        raise ValueError(f"no cut fits {form} products of {rows=} {k=} {columns=} {is_swiglu=}")
    return best[1]


def _most_stages(problem: Problem) -> int:
    """That fit into shared memory; the problem has the fewest that its cut allows."""
    turns = problem.turns
    stages = min((_CHOSEN_SHARED_BYTES - problem.fixed_bytes) // problem.stage_bytes, _MAX_STAGES) // turns * turns
    while stages > problem.config.stages and problem.shared_bytes(stages) > SHARED_BYTES:
        stages -= turns
    return max(stages, problem.config.stages)


def _expected_cycles(problem: Problem, stages: int) -> float:
    """Of a kernel with so many stages in the place of the tuning's, without what all cuts have in common."""
    blocks = problem.columns // problem.block_columns * problem.split
    clustered = problem.config.clustered
    rounds = -(-blocks // (problem.split * _CLUSTERS_AT_ONCE[problem.split])) if clustered else 1
    join = (_JOIN_CYCLES if clustered else _COUNTED_JOIN_CYCLES) + problem.split * _JOIN_BLOCK_CYCLES
    parts_bytes = problem.block_columns * problem.parts * problem.padded_rows * 4
    join += 2 * parts_bytes / _BLOCK_BYTES_PER_CYCLE  # there and back
    weights = problem.block_columns * problem.parts * problem.k // problem.split  # of a block
    weight_bytes = weights * ROW_BYTES // block_k(problem.form)
    x_bytes = problem.padded_rows * problem.k // problem.split * jnp.dtype(X_DTYPES[problem.form]).itemsize
    issued = weights * _INSTRUCTIONS[problem.form] / _INSTRUCTIONS_PER_CYCLE[problem.warpgroups - 1]
    multiplied = weights * problem.padded_rows / _MULTIPLICATIONS_PER_CYCLE
    return (
        max(
            blocks * weight_bytes / _MEMORY_BYTES_PER_CYCLE,
            blocks * (weight_bytes + x_bytes) / _L2_BYTES_PER_CYCLE,
            rounds * (weight_bytes + x_bytes) / _BLOCK_BYTES_PER_CYCLE,
            rounds
            * (max(issued, multiplied) + _ALONE * min(issued, multiplied))
            * (1 if stages >= 3 * problem.turns else _FEW_STAGES_FACTOR),
        )
        + (rounds - 1) * _ROUND_CYCLES
        + (join if problem.split > 1 else 0)
        + (_ADD_TURNS_CYCLES if problem.turns > 1 else 0)
    )
