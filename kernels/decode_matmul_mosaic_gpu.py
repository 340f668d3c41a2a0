"""Products of a few rows with a large weight matrix, for Hopper in Pallas Mosaic GPU.

Such a product takes as long as its weights take to be read, so everything here serves the stream of weights. A thread
block owns 64 or 128 columns of the weights. Its memory warpgroup fetches their tiles, and the tiles of x beside them,
through a ring in shared memory; its compute warpgroup multiplies. The weights' columns are the rows of the tensor
cores' result (they want 64 of them), and x's rows, padded to 8, are its columns, so that few rows cost little.

Where the columns alone make too few thread blocks to draw the whole bandwidth, a cluster of blocks shares them and
each block multiplies one part of k. The blocks leave their float32 results in memory (in practice: in L2), wait for
each other, and each one adds up some of the rows, always in the same order: results are reproducible to the bit. They
go there and back by plain stores and loads: the copy engine's are ordered by neither fence nor barrier of a cluster.

With programmatic dependent launch this kernel starts while the one before it still runs. Where the caller promises
that the weights don't depend on that one, it fills its ring with weights before it waits for the other's results.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.kernels.decode_matmul_finish import (
    ROW_ALIGNMENT,
    TILE,
    has_rows,
    join,
    launch,
    out_columns,
    rank_rows,
    round_up,
)

# A row of a weight tile is 128 bytes, the widest swizzle.
BLOCK_K = 64
MAX_ROWS = 128
MAX_SPLIT = 4
MIN_STAGES = 2

# A cluster splits k until there are this many thread blocks. Measured on an H100, whose 132 multiprocessors more would
# fill better: the exchange between the blocks costs more than that gains.
_ENOUGH_BLOCKS = 48
# Two blocks fit into a multiprocessor's shared memory: this kernel's and, ahead of its turn, the next one's. Where there
# are more blocks than multiprocessors, more do (as long as they find registers), so that few wait for a last round.
_RING_BYTES = 104 * 1024
_SHORT_RING_BYTES = 52 * 1024
_MULTIPROCESSORS = 132
_MAX_STAGES = 8


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How a product is cut: `split` thread blocks share the k dimension, each keeps `stages` tiles in flight."""

    split: int
    stages: int

    def __post_init__(self) -> None:
        if self.split not in (1, 2, 4):
            raise ValueError(f"{self.split=} must be 1, 2 or 4")
        if self.stages < MIN_STAGES:
            raise ValueError(f"{self.stages=} must be at least {MIN_STAGES}")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything that is static: one compiled kernel belongs to one of these."""

    rows: int
    k: int
    columns: int  # of the result
    is_swiglu: bool
    has_residual: bool
    prefetches_weights: bool
    out_dtype: jnp.dtype
    config: TuningConfig
    interpret: Any

    @property
    def on_device(self) -> bool:
        return self.interpret is None

    @property
    def split(self) -> int:
        return self.config.split

    @property
    def padded_rows(self) -> int:
        return round_up(self.rows, ROW_ALIGNMENT)

    @property
    def tiles(self) -> int:
        """Weight tiles that a thread block multiplies side by side."""
        return tiles_per_block(self.columns, self.is_swiglu)

    @property
    def out_columns(self) -> int:
        """Columns of the result that a thread block, or a cluster of them, owns."""
        return TILE if self.is_swiglu else self.tiles * TILE

    @property
    def rows_per_rank(self) -> int:
        """Rows of the result that each block of a cluster adds up and stores; the last blocks may have none."""
        return round_up(-(-self.padded_rows // self.config.split), ROW_ALIGNMENT)

    @property
    def steps(self) -> int:
        return self.k // (BLOCK_K * self.config.split)

    @property
    def copies_per_step(self) -> int:
        return self.tiles + 1


def tiles_per_block(columns: int, is_swiglu: bool) -> int:
    """Gate and up, or two neighbours where the columns allow it: x is then fetched half as often."""
    return 2 if is_swiglu or columns % (2 * TILE) == 0 else 1


def choose_config(rows: int, k: int, columns: int, *, is_swiglu: bool) -> TuningConfig:
    """Picks by shape alone, so that every start compiles the same program."""
    tiles = tiles_per_block(columns, is_swiglu)
    blocks = columns // (TILE if is_swiglu else tiles * TILE)
    split = 1
    while split < MAX_SPLIT and blocks * split < _ENOUGH_BLOCKS and k % (2 * split * BLOCK_K) == 0:
        split *= 2
    stage_bytes = 2 * BLOCK_K * (tiles * TILE + round_up(rows, ROW_ALIGNMENT))
    shares = blocks * split > _MULTIPROCESSORS and rows <= 64
    ring_bytes = _SHORT_RING_BYTES if shares else _RING_BYTES
    return TuningConfig(split, stages=max(MIN_STAGES, min(ring_bytes // stage_bytes, _MAX_STAGES)))


def unsupported_reason(x: Array, w: Array, out_dtype: jnp.dtype) -> str | None:
    """Why the kernel can't take x [rows, k] and w [k, parts, columns], or None if it can."""
    rows, k = x.shape
    columns = w.shape[2]
    if jax.__version_info__ >= (0, 12):
        return f"jax {jax.__version__} wants stores of whole cache lines, which the kernel does not make; 0.11 does not"
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
        return f"x is {x.dtype} and w {w.dtype}, both must be bfloat16"
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        return f"{out_dtype=} is neither bfloat16 nor float32"
    if not 1 <= rows <= MAX_ROWS:
        return f"{rows=} is not in 1..{MAX_ROWS}"
    if k % BLOCK_K or columns % TILE:
        return f"{k=} must be a multiple of {BLOCK_K} and {columns=} of {TILE}"
    return None


def _fetch(problem: Problem, block, rank, x_ref, w_ref, residual_ref, smem, barriers) -> None:
    """The memory warpgroup: weights, perhaps ahead of everything; x and residual after the kernel before this one."""
    stages, steps = problem.config.stages, problem.steps
    first_step = rank * steps

    def k_range(step):
        return pl.ds(pl.multiple_of((first_step + step) * BLOCK_K, BLOCK_K), BLOCK_K)

    def fetch_weights(step, slot):
        for tile in range(problem.tiles):
            part, column = (tile, block * TILE) if problem.is_swiglu else (0, (block * problem.tiles + tile) * TILE)
            columns = pl.ds(pl.multiple_of(column, TILE), TILE)
            plgpu.copy_gmem_to_smem(
                w_ref.at[k_range(step), part, columns], smem["w"].at[slot, tile], barriers["ready"].at[slot]
            )

    def fetch_x(step, slot):
        # The box of the copy is as tall as the padded rows; what lies outside of x reads as zero.
        plgpu.copy_gmem_to_smem(
            x_ref.at[pl.ds(0, problem.padded_rows), k_range(step)],
            smem["x"].at[slot],
            barriers["ready"].at[slot],
            oob_mode=plgpu.OOBFillMode.ZEROS,
        )

    ahead = min(stages, steps)
    if problem.prefetches_weights:
        for step in range(ahead):
            fetch_weights(step, step)
    if problem.on_device:
        # In this order: what a dependent kernel fetches before its own wait was complete before this kernel ran.
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
    for step in range(ahead):
        if not problem.prefetches_weights:
            fetch_weights(step, step)
        fetch_x(step, step)
    if problem.has_residual:

        @pl.when(has_rows(problem, rank))
        def _():
            plgpu.copy_gmem_to_smem(
                residual_ref.at[rank_rows(problem, rank), out_columns(problem, block)],
                smem["out"],
                barriers["residual"],
                oob_mode=plgpu.OOBFillMode.ZEROS,
            )

    def refill(step, carry):
        slot = lax.rem(step, stages)
        plgpu.barrier_wait(barriers["consumed"].at[slot])
        fetch_weights(step, slot)
        fetch_x(step, slot)
        return carry

    lax.fori_loop(ahead, steps, refill, None)
    for slot in range(ahead):  # no barrier may be left with an arrival that nobody saw
        plgpu.barrier_wait(barriers["consumed"].at[slot])


def _multiply(problem: Problem, smem, barriers) -> list[Array]:
    """The compute warpgroup's part of k: one [TILE, padded_rows] float32 result for each weight tile."""
    stages = problem.config.stages

    def body(*accumulators):
        def step(i, carry):
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(barriers["ready"].at[slot])
            x = smem["x"].at[slot].transpose((1, 0))  # [BLOCK_K, padded_rows]
            for tile, accumulator in enumerate(accumulators):
                plgpu.wgmma(accumulator, smem["w"].at[slot, tile].transpose((1, 0)), x)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(barriers["consumed"].at[slot])
            return carry

        lax.fori_loop(0, problem.steps, step, None)
        return [accumulator[...] for accumulator in accumulators]

    accumulator = plgpu.ACC((TILE, problem.padded_rows), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(body, *[accumulator] * problem.tiles)


def _scratch(problem: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shared memory and barriers of a thread block."""
    split, stages, tiles = problem.config.split, problem.config.stages, problem.tiles
    transforms = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
    smem: dict[str, Any] = {
        "out": plgpu.SMEM((problem.rows_per_rank, problem.out_columns), problem.out_dtype),
    }
    barriers: dict[str, Any] = {
        "ready": plgpu.Barrier(num_arrivals=problem.copies_per_step, num_barriers=stages),
        "consumed": plgpu.Barrier(num_barriers=stages),
    }
    smem["w"] = plgpu.SMEM((stages, tiles, BLOCK_K, TILE), jnp.bfloat16, transforms=transforms)
    smem["x"] = plgpu.SMEM((stages, problem.padded_rows, BLOCK_K), jnp.bfloat16, transforms=transforms)
    if split > 1:
        barriers["exchanged"] = plgpu.ClusterBarrier(collective_axes=("rank",))
    if problem.has_residual:
        barriers["residual"] = plgpu.Barrier()
    return smem, barriers


def _kernel(problem: Problem, x: Array, w: Array, residual: Array | None) -> Array:
    split = problem.config.split

    def decode_matmul(*refs, smem, barriers):
        x_ref, w_ref = refs[:2]
        residual_ref = refs[2] if problem.has_residual else None
        out_ref, parts_ref = refs[2 + problem.has_residual :]
        block = lax.axis_index("block")
        rank = lax.axis_index("rank") if split > 1 else jnp.int32(0)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _compute():
            results = _multiply(problem, smem, barriers)
            if problem.on_device:
                plgpu.griddepcontrol_wait()  # long over; what this warpgroup writes must be ordered by it as well
            join(problem, block, rank, results, out_ref, parts_ref, smem, barriers)

        @pl.when(warpgroup == 1)
        def _memory():
            _fetch(problem, block, rank, x_ref, w_ref, residual_ref, smem, barriers)

    scratch, barrier_scratch = _scratch(problem)
    arrays = (x, w) if residual is None else (x, w, residual)
    return launch(problem, decode_matmul, scratch, barrier_scratch, arrays)


# The inner jit lets all layers of a program share one lowered kernel; a call site costs nothing then.
@functools.partial(jax.jit, static_argnames=("is_swiglu", "out_dtype", "prefetch_weights", "config", "interpret"))
def decode_matmul_mosaic_gpu(
    x: Float[Array, "rows k"],
    w: Float[Array, "k parts columns"],
    residual: Float[Array, "rows columns"] | None = None,
    *,
    is_swiglu: bool,
    out_dtype: jnp.dtype,
    prefetch_weights: bool = False,
    config: TuningConfig | None = None,
    interpret: Any = None,
) -> Float[Array, "rows columns"]:
    """Computes what `decode_matmul` (one part) and `decode_matmul_swiglu` (gate and up) document.

    `config=None` takes `choose_config`'s; `interpret` takes `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    rows, k = x.shape
    columns = w.shape[2]
    if rows > ROW_ALIGNMENT and rows % ROW_ALIGNMENT:
        # The copy engine fills up fewer rows than a tile has, but not the last of several tiles.
        x = jnp.pad(x, ((0, -rows % ROW_ALIGNMENT), (0, 0)))
    config = choose_config(rows, k, columns, is_swiglu=is_swiglu) if config is None else config
    if k % (BLOCK_K * config.split):
        raise ValueError(f"{k=} must be a multiple of {BLOCK_K} times {config.split=}")
    problem = Problem(
        rows, k, columns, is_swiglu, residual is not None, prefetch_weights, jnp.dtype(out_dtype), config, interpret
    )
    return _kernel(problem, x, w, residual)
