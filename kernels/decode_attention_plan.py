"""How the Hopper kernel of decode attention deals its work out: sizes, and which worker reads what."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

TILE_M = 64  # rows of a wgmma tile
LOWEST_SCORE = -1e30  # not -inf: differences of it must not be NaN


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How the kernel is cut.

    block_kv: KV tokens a step; a multiple of 64, and of the page size or a part of it.
    stages: blocks of K and of V in flight for each worker.
    workers_per_sm: pairs of a memory and a compute warpgroup in one thread block.
    thread_blocks: thread blocks in the grid, one an SM.
    separate_join: join the partial results of shared pairs in a second kernel, and not by the last worker of each.
    """

    block_kv: int = 64
    stages: int = 3
    workers_per_sm: int = 1
    thread_blocks: int = 132
    separate_join: bool = False

    def __post_init__(self):
        if self.block_kv < 64 or self.block_kv % 64:
            raise ValueError(f"{self.block_kv=} must be a multiple of 64")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2")
        if self.workers_per_sm not in (1, 2):
            raise ValueError(f"{self.workers_per_sm=} must be 1 or 2")
        if self.workers < 2:
            raise ValueError(f"{self.thread_blocks=} must give at least 2 workers")

    @property
    def workers(self) -> int:
        return self.thread_blocks * self.workers_per_sm


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is known when the kernel is traced."""

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    out_dtype: Any
    cache_dtype: Any
    scale: float
    window: int | None
    softcap: float | None
    has_scales: bool
    config: TuningConfig
    interpret: Any

    @property
    def padded_group(self) -> int:
        return -(-self.group // 8) * 8

    @property
    def copy_tokens(self) -> int:
        """Tokens a copy: a page, or the part of it that fits a block."""
        return min(self.page_size, self.config.block_kv)

    @property
    def copies_per_block(self) -> int:
        return self.config.block_kv // self.copy_tokens

    @property
    def is_float8(self) -> bool:
        return jnp.dtype(self.cache_dtype).itemsize == 1

    @property
    def dtype(self) -> Any:
        """What is multiplied; Hopper widens float8 to float16 only."""
        return jnp.float16 if self.is_float8 else self.out_dtype

    @property
    def on_device(self) -> bool:
        return self.interpret is None


# Shared memory of a thread block on Hopper, less what barriers, alignment and small buffers take.
SHARED_MEMORY = 227 * 1024 - 8 * 1024

# Bytes of K and V that an SM keeps in flight; more of them did not raise the bandwidth on an H100.
BYTES_IN_FLIGHT = 96 * 1024


_MANY_ROWS = 32


def choose_config(head_dim: int, group: int, cache_itemsize: int, rows: int = 1) -> TuningConfig:
    """The configuration for these shapes, from measurements on an H100 and an H200.

    Args:
        rows: sequences, a step's padding included.

    Raises:
        NotImplementedError: if the tiles of two stages don't fit in shared memory.
    """
    block_kv = 64
    stage = 2 * block_kv * head_dim * cache_itemsize
    query_tile, padded_group = 64 * head_dim * 2, -(-group // 8) * 8
    fixed = 2 * query_tile + padded_group * head_dim * 2  # queries and results
    if cache_itemsize == 1:
        fixed += 2 * block_kv * head_dim  # the widened block
    # Widening float8 makes the compute warpgroup the bottleneck, so such caches get two of them. Otherwise they pay where
    # there are many rows, each of which is begun and ended while the other worker goes on (64 of 400 tokens: 31.6 us, not
    # 34.8, on an H200), and cost time where there are few (8 of 330: 9.0, not 8.3).
    for workers_per_sm in (2, 1) if cache_itemsize == 1 or rows >= _MANY_ROWS else (1,):
        room = (SHARED_MEMORY // workers_per_sm - fixed) // stage
        stages = min(room, max(2, BYTES_IN_FLIGHT // workers_per_sm // stage))
        if stages >= 2:
            return TuningConfig(block_kv=block_kv, stages=stages, workers_per_sm=workers_per_sm)
    raise NotImplementedError(
        f"{head_dim=} with {group=} query heads a KV head needs more shared memory than an SM has"
    )


# Columns of Plan.rows; a worker's record is (begin, end, row) followed by the same columns of that row.
FIRST_UNIT, BLOCKS, FIRST_BLOCK, KV_LEN, NEXT_ROW = range(5)
ROW_COLUMNS = 5

TABLE_CHUNK = 128  # page ids that a worker keeps in shared memory

# A share of the work is enlarged by up to 1 / SLACK where that lets it end at the end of a (row, KV head) pair.
SLACK = 16


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rows", "workers", "table", "first_pages"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Plan:
    """The units of work, numbered row by row, head by head and block by block, and each worker's run of them.

    rows: first unit of the row, blocks a KV head, first block (later than 0 with a window), KV length, next row that
        has work (`batch` after the last one).
    workers: first unit, end of the run, row of the first unit, and that row's columns.
    table: the page table, its width a multiple of TABLE_CHUNK.
    first_pages: the chunk of the table that the worker starts in, so that it need not learn first where that lies.
    """

    rows: Int32[Array, "batch 5"]
    workers: Int32[Array, "workers 8"]
    table: Int32[Array, "batch padded_pages_per_seq"]
    first_pages: Int32[Array, "workers chunk"]


def make_plan(
    page_table: Int32[Array, "batch pages_per_seq"],
    kv_lens: Int32[Array, " batch"],
    kv_heads: int,
    page_size: int,
    window: int | None,
    config: TuningConfig,
) -> Plan:
    """Deals the blocks of all rows out to the workers in equal runs.

    Depends on nothing that changes from layer to layer, so that XLA computes it once a step.
    """
    batch = kv_lens.shape[0]
    first_block = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(kv_lens - window, 0) // config.block_kv
    blocks = (kv_lens + config.block_kv - 1) // config.block_kv - first_block
    ends = jnp.cumsum(blocks * kv_heads, dtype=jnp.int32)
    total = ends[-1]
    share = _share((total + config.workers - 1) // config.workers, blocks.max())
    row_ids = jnp.arange(batch, dtype=jnp.int32)
    has_work = jnp.where(blocks > 0, row_ids, batch)
    next_row = lax.cummin(jnp.concatenate([has_work[1:], jnp.full((1,), batch, jnp.int32)]), reverse=True)
    rows = jnp.stack([ends - blocks * kv_heads, blocks, first_block, kv_lens, next_row], axis=1)
    begins = jnp.minimum(jnp.arange(config.workers, dtype=jnp.int32) * share, total)
    # The row of a unit: as many rows end at or before it. Rows without work end where they begin, so never match.
    worker_rows = jnp.sum((begins[:, None] >= ends[None, :]).astype(jnp.int32), axis=1)
    worker_rows = jnp.minimum(worker_rows, batch - 1)
    run = jnp.stack([begins, jnp.minimum(begins + share, total), worker_rows], axis=1)
    workers = jnp.concatenate([run, rows[worker_rows]], axis=1)
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % TABLE_CHUNK)))
    first_unit, row_blocks, row_first_block = workers[:, 3], workers[:, 4], workers[:, 5]
    start = row_first_block + (begins - first_unit) % jnp.maximum(row_blocks, 1)
    chunk = start * config.block_kv // page_size // TABLE_CHUNK
    columns = chunk[:, None] * TABLE_CHUNK + jnp.arange(TABLE_CHUNK, dtype=jnp.int32)[None, :]
    first_pages = table.at[worker_rows[:, None], columns].get(mode="clip")
    return Plan(rows=rows, workers=workers, table=table, first_pages=first_pages)


def _share(share: Int32[Array, ""], longest: Int32[Array, ""]) -> Int32[Array, ""]:
    """The share, or a slightly larger one that cuts the longest row's blocks at its end or into equal parts."""
    share, longest = jnp.maximum(share, 1), jnp.maximum(longest, 1)
    whole = (share + longest - 1) // longest * longest
    parts = jnp.maximum(longest // share, 1)
    aligned = jnp.where(share >= longest, whole, (longest + parts - 1) // parts)
    return jnp.where(aligned - share <= share // SLACK, aligned, share)
