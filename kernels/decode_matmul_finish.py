"""What the product kernels of a decode step do once a thread block has its part of the result, for Hopper.

Some thread blocks may share the k dimension. They leave their float32 results in memory (in practice: in L2), wait for
each other, and each one adds up some of the rows, always in the same order: results are reproducible to the bit. They go
there and back by plain stores and loads: the copy engine's are ordered by neither fence nor barrier of a cluster.

They are a cluster, or they wait by counters in memory. A cluster waits faster, but stays in one part of the processor, so
that clusters of four or eight blocks leave a tenth of the multiprocessors without work, and a few more than find room at
once take twice the time.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array

from jaxserve.kernels import grid_barrier

TILE = 64  # columns of a weight tile: one wgmma has 64 rows of result
ROW_ALIGNMENT = 8  # wgmma's columns, and the layout in shared memory


class SplitProduct(Protocol):
    """What is static about a product of rows with weights whose columns are the rows of the tensor cores' result."""

    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int:
        """Of the result."""
        ...

    @property
    def padded_rows(self) -> int: ...
    @property
    def rows_per_rank(self) -> int:
        """Rows of the result that each block of a cluster adds up and stores; the last blocks may have none."""
        ...

    @property
    def tiles(self) -> int:
        """Weight tiles that a computing warpgroup multiplies side by side."""
        ...

    @property
    def split(self) -> int:
        """Thread blocks that share k."""
        ...

    @property
    def out_columns(self) -> int:
        """Columns of the result that a computing warpgroup, or one of each block of a cluster, owns."""
        ...

    @property
    def is_swiglu(self) -> bool: ...
    @property
    def has_residual(self) -> bool: ...
    @property
    def out_dtype(self) -> jnp.dtype: ...
    @property
    def on_device(self) -> bool: ...
    @property
    def interpret(self) -> Any: ...


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def launch(
    problem: SplitProduct,
    body: Callable[..., None],
    smem: Any,
    barriers: Any,
    arrays: Sequence[Array],
    *,
    units: int = 1,
    warpgroups: int = 1,
    clustered: bool = True,
) -> Array:
    """Runs a kernel's body, which takes the arrays, the result and the parts (see `exchange`), over all columns.

    Args:
        units: computing warpgroups of a thread block that own `out_columns` each. Such a one is to the other functions
            here a block of its own: it gives them its number among those of all blocks as `block`, and parts of `smem`
            and `barriers` that are its own.
        warpgroups: that compute in a thread block; one more fetches.
        clustered: whether the blocks that share k are a cluster; else `join` wants counters.
    """
    split = problem.split
    in_cluster = split > 1 and clustered
    blocks = problem.columns // problem.out_columns
    # The last ranks' rows may end past the padded ones: what they read there goes nowhere.
    parts_shape = (blocks, split, problem.tiles, TILE, split * problem.rows_per_rank) if split > 1 else (1,)
    out, _ = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((problem.rows, problem.columns), problem.out_dtype),
            jax.ShapeDtypeStruct(parts_shape, jnp.float32),
        ),
        scratch_types={"smem": smem, "barriers": barriers},
        grid=(blocks // units, *(() if in_cluster or split == 1 else (split,))),
        grid_names=("block", *(() if in_cluster or split == 1 else ("rank",))),
        cluster=(split,) if in_cluster else (),
        cluster_names=("rank",) if in_cluster else (),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=problem.interpret,
    )(*arrays)
    return out


def join(
    problem: SplitProduct, block, rank, results: list[Array], out_ref, parts_ref, smem, barriers, counters_ref=None
) -> None:
    """From this block's results to the result's rows that it stores.

    Args:
        counters_ref: where the blocks that share k are no cluster: int32, zeros, one for each block that does not share.
    """
    if problem.split == 1:
        finish(problem, block, rank, results, out_ref, smem, barriers)
        return
    exchange(problem, block, rank, results, parts_ref, barriers, counters_ref)

    @pl.when(has_rows(problem, rank))
    def _():
        sums = add_parts(problem, block, rank, parts_ref)
        finish(problem, block, rank, sums, out_ref, smem, barriers)


def has_rows(problem: SplitProduct, rank):
    return rank * problem.rows_per_rank < problem.rows


def rank_rows(problem: SplitProduct, rank):
    return pl.ds(pl.multiple_of(rank * problem.rows_per_rank, ROW_ALIGNMENT), problem.rows_per_rank)


def out_columns(problem: SplitProduct, block):
    return pl.ds(pl.multiple_of(block * problem.out_columns, TILE), problem.out_columns)


def exchange(problem: SplitProduct, block, rank, results: list[Array], parts_ref, barriers, counters_ref=None) -> None:
    """Leaves this block's results for those that it shares k with, and waits until all of them have done so."""
    for tile, result in enumerate(results):
        parts_ref.at[block, rank, tile, :, pl.ds(0, problem.padded_rows)][...] = result
    if counters_ref is not None:
        grid_barrier.arrive(counters_ref.at[block], copies=False)
        grid_barrier.wait(counters_ref.at[block], problem.split, copies=False)
        return
    if problem.on_device:
        _order_global_memory()
    plgpu.barrier_arrive(barriers["exchanged"])
    plgpu.barrier_wait(barriers["exchanged"])
    if problem.on_device:
        _order_global_memory()


@plgpu.inline_mgpu()
def _order_global_memory(*_: Any) -> None:
    """Every thread's stores so far are done before any thread of the warpgroup goes on, and its loads come after.

    The barrier of a cluster orders shared memory alone, and one thread arrives at it for the warpgroup.
    """
    mgpu.utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)  # pyright: ignore[reportAttributeAccessIssue] (jax 0.10)
    mgpu.warpgroup_barrier()


def add_parts(problem: SplitProduct, block, rank, parts_ref) -> list[Array]:
    """The sums over the cluster, of this block's rows: [TILE, rows_per_rank] for each weight tile."""
    sums = []
    for tile in range(problem.tiles):
        parts = [
            plgpu.load(  # pyright: ignore[reportCallIssue]
                parts_ref.at[block, part, tile, :, rank_rows(problem, rank)],
                layout=plgpu.Layout.WGMMA,
                optimized=False,
            )
            for part in range(problem.split)
        ]
        sums.append(functools.reduce(jnp.add, parts))
    return sums


def finish(problem: SplitProduct, block, rank, results: list[Array], out_ref, smem, barriers) -> None:
    """Activation or residual in float32, one rounding, and the store."""
    # 16-bit elements are transposed by ldmatrix and stmatrix, others between registers.
    layout = plgpu.Layout.WGMMA if problem.out_dtype.itemsize == 2 else plgpu.Layout.WGMMA_TRANSPOSED
    if problem.has_residual:
        plgpu.barrier_wait(barriers["residual"])
    if problem.is_swiglu:
        gate, up = results
        # In this order it takes fewer registers: at 64 rows two thread blocks fit into a multiprocessor.
        results = [(gate * up) * lax.logistic(gate)]
    # What holds the result in shared memory may hold a part of its rows, where there is no residual.
    rows = smem["out"].shape[0]
    for start in range(0, problem.rows_per_rank, rows):
        for tile, result in enumerate(results):
            target = smem["out"].at[:, pl.ds(tile * TILE, TILE)].transpose((1, 0))  # [TILE, rows]
            part = result if rows == problem.rows_per_rank else result[:, start : start + rows]
            part = plgpu.layout_cast(part, layout)
            if problem.has_residual:
                part = part + plgpu.load(target, layout=layout, optimized=False).astype(jnp.float32)  # pyright: ignore[reportCallIssue]
            target[...] = part.astype(problem.out_dtype)
        plgpu.commit_smem()
        first = pl.multiple_of(rank * problem.rows_per_rank + start, ROW_ALIGNMENT)
        # Rows past the result's end are left out by the copy.
        plgpu.copy_smem_to_gmem(smem["out"], out_ref.at[pl.ds(first, rows), out_columns(problem, block)])
        plgpu.wait_smem_to_gmem(0)
