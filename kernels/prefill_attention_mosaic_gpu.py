"""Prefill attention for Hopper GPUs: warp-specialised flash attention over KV pages, written in Pallas Mosaic GPU.

One CUDA block computes one query tile of one KV head: `tile_tokens` consecutive tokens of one row, times as many of
the KV head's query heads as fill the tile. Which row and which tokens follows from `query_starts` inside the kernel,
so ragged rows cost no padding beyond their last tile. One warpgroup copies KV pages to shared memory through the page
table with the copy engine, one copy a page and head; the others multiply. Each of these issues the products for one
KV block's values and the next block's scores together, and computes the softmax while the other warpgroup's products
run (after Shah et al., "FlashAttention-3", 2024).

Rows of a tile are ordered [head, token]. Tiles start at multiples of 8 tokens, as the layout in shared memory wants
it; a row's first and last tile may hold tokens of its neighbours, whose results are dropped.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxserve.kernels.prefill_attention_compute import WARPGROUP_ROWS, Options, compute_tile
from jaxserve.kernels.prefill_attention_copy import RAW_STAGES, copy_and_widen_tile, copy_tile
from jaxserve.kernels.prefill_attention_tiles import TOKEN_ALIGNMENT, column_group, locate_tile

_MAX_ROWS = 64
_LONG_ROW = 4096  # tokens from which on sharing out a row's KV saves more than it costs rows that are short (1 us)
_MULTIPROCESSORS = 132  # of an H100 and an H200; a CUDA block's shared memory leaves no room for another beside it
# Tokens times query heads from which on two computing warpgroups a CUDA block are as fast as one or faster: with fewer,
# an H100 has multiprocessors to spare, and one warpgroup makes twice as many blocks.
_MANY_QUERIES = 12_288


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How the kernel cuts its work: a CUDA block has `compute_warpgroups` x 64 tile rows and one copying warpgroup.

    Attributes:
        kv_block: KV positions that one product takes.
        stages: KV blocks in shared memory.
        cuts_kv: several CUDA blocks share the KV of a tile where there are multiprocessors to spare: a small piece of a
            prompt behind a long context would keep few of them busy. With one computing warpgroup only.
    """

    compute_warpgroups: int
    kv_block: int
    stages: int
    cuts_kv: bool = False

    def __post_init__(self) -> None:
        if self.compute_warpgroups not in (1, 2):
            raise ValueError(f"{self.compute_warpgroups=} must be 1 or 2")
        if self.kv_block % 64 or self.kv_block < 64:
            raise ValueError(f"{self.kv_block=} must be a positive multiple of 64")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2")
        if self.cuts_kv and self.compute_warpgroups != 1:
            raise ValueError(f"{self.cuts_kv=} goes with one computing warpgroup, not {self.compute_warpgroups=}")


def default_config(q: Float[Array, "tokens q_heads head_dim"], kv_dtype: jnp.dtype, longest: int = 0) -> TuningConfig:
    """Pick what was fastest on an H100 or an H200 among what fits into its shared memory.

    Args:
        longest: tokens of the longest row that there may be.
    """
    tokens, q_heads, head_dim = q.shape
    if head_dim > 128:
        return TuningConfig(compute_warpgroups=1, kv_block=64, stages=2)
    compute_warpgroups = 2 if tokens * q_heads >= _MANY_QUERIES else 1
    cuts_kv = compute_warpgroups == 1 and longest >= _LONG_ROW
    if kv_dtype == jnp.float8_e4m3fn:
        return TuningConfig(compute_warpgroups, kv_block=64, stages=3, cuts_kv=cuts_kv)
    if compute_warpgroups == 1:
        return TuningConfig(compute_warpgroups, kv_block=64, stages=4, cuts_kv=cuts_kv)
    return TuningConfig(compute_warpgroups, kv_block=128, stages=2)


def unsupported_reason(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    rows: int,
    scale: float,
) -> str | None:
    """Say why the kernel can't take these arguments, or None if it can."""
    head_dim, page_size = q.shape[2], k_pages.shape[2]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q is {q.dtype}, the tensor cores take bfloat16 or float16"
    if k_pages.dtype not in (q.dtype, jnp.float8_e4m3fn):
        return f"the KV cache is {k_pages.dtype} and q {q.dtype}"
    if head_dim % 32 or head_dim > 256:
        return f"{head_dim=} is not a multiple of 32 up to 256"
    if head_dim > 128 and k_pages.dtype != q.dtype:
        return f"{head_dim=} with a {k_pages.dtype} KV cache does not fit into shared memory"
    kv_block = default_config(q, k_pages.dtype).kv_block
    if page_size % 8 or kv_block % page_size:
        return f"{page_size=} is not a multiple of 8 that divides {kv_block}"
    if rows > _MAX_ROWS:
        return f"{rows=} is above {_MAX_ROWS}"
    if scale <= 0.0:
        return f"{scale=} is not positive"
    return None


def prefill_attention_mosaic_gpu(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    layer: Int32[Array, ""],
    page_table: Int32[Array, "rows pages_per_seq"],
    query_starts: Int32[Array, "rows+1"],
    kv_lens: Int32[Array, "rows"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: Float[Array, ""] | None = None,
    v_scale: Float[Array, ""] | None = None,
    config: TuningConfig | None = None,
    counts: bool = True,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Compute what `prefill_attention` documents, from arguments that it and `unsupported_reason` have passed.

    `counts=False` is for JAX's interpreter, which has no atomics and runs one CUDA block after the other.
    """
    tokens, q_heads, head_dim = q.shape
    out_dtype = q.dtype
    config = config or default_config(q, k_pages.dtype, page_table.shape[1] * k_pages.shape[2])
    if k_pages.dtype == jnp.float8_e4m3fn:
        q = q.astype(jnp.float16)  # float8 widens to this in one instruction
    tile_heads = math.gcd(q_heads // k_pages.shape[3], 8)
    tile_tokens = config.compute_warpgroups * WARPGROUP_ROWS // tile_heads
    padded_tokens = max(-(-tokens // TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT, tile_tokens)
    if padded_tokens > tokens:
        q = jnp.pad(q, ((0, padded_tokens - tokens), (0, 0), (0, 0)))
    # Each row, and the padding behind the last, may start up to 7 tokens early and end with a tile that is not full.
    rows = page_table.shape[0]
    tiles = (padded_tokens + (rows + 1) * (TOKEN_ALIGNMENT - 1)) // tile_tokens + rows + 1
    groups_of_heads = q_heads // tile_heads
    options = Options(
        tile_tokens=tile_tokens, tile_heads=tile_heads, scale=scale, window=window, softcap=softcap, tiles=tiles,
        groups_of_heads=groups_of_heads,
        blocks_at_once=_MULTIPROCESSORS // groups_of_heads if config.cuts_kv else 0, counts=counts,
    )  # fmt: skip
    scratch = _scratch_types(config, tile_heads, head_dim, k_pages.shape[2], q.dtype, k_pages.dtype)
    out_type, counters = [jax.ShapeDtypeStruct(q.shape, q.dtype)], []
    if options.blocks_at_once:
        blocks = tiles * groups_of_heads
        out_type += [
            jax.ShapeDtypeStruct((blocks, WARPGROUP_ROWS, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((blocks, 2, WARPGROUP_ROWS), jnp.float32),  # maximum and total
        ]
        counters = [jax.new_ref(jnp.zeros((blocks,), jnp.int32))]  # XLA zeroes those of all layers at once
        scratch["arrival"] = plgpu.SMEM((1,), jnp.int32)
    kernel = plgpu.kernel(
        functools.partial(_prefill_attention_kernel, options=options),
        out_type=tuple(out_type),
        grid=(tiles, groups_of_heads),  # the last axis runs fastest
        grid_names=("tile", "heads"),
        num_threads=config.compute_warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="prefill_attention",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    scales = jnp.stack([jnp.float32(1.0) if s is None else s for s in (k_scale, v_scale)])
    out, *_ = kernel(q, k_pages, v_pages, layer[None], page_table, query_starts, kv_lens, scales, *counters)
    return out[:tokens].astype(out_dtype)


def _scratch_types(
    config: TuningConfig, tile_heads: int, head_dim: int, page_size: int, dtype: jnp.dtype, kv_dtype: jnp.dtype
) -> dict[str, Any]:
    tile_rows = config.compute_warpgroups * WARPGROUP_ROWS
    pages_per_block = config.kv_block // page_size
    is_widened = dtype != kv_dtype

    def block(shape: tuple[int, ...], block_dtype: jnp.dtype) -> Any:
        columns = column_group(head_dim)
        swizzle = plgpu.find_swizzle(columns * jnp.finfo(block_dtype).bits)
        transforms = (plgpu.TilingTransform((TOKEN_ALIGNMENT, columns)), plgpu.SwizzleTransform(swizzle))
        return plgpu.SMEM(shape, block_dtype, transforms=transforms)

    kv_shape = (config.kv_block, head_dim)
    ready = plgpu.Barrier(num_arrivals=1 if is_widened else pages_per_block, num_barriers=config.stages)
    free = plgpu.Barrier(num_arrivals=config.compute_warpgroups, num_barriers=config.stages)
    scratch = {
        "q_smem": block((tile_rows, head_dim), dtype),
        "out_smem": plgpu.SMEM((tile_rows, head_dim), dtype),
        "k_smem": block((config.stages, *kv_shape), dtype),
        "v_smem": block((config.stages, *kv_shape), dtype),
        "q_ready": plgpu.Barrier(num_arrivals=tile_heads),
        "k_ready": ready,
        "v_ready": ready,
        "k_free": free,
        "v_free": free,
    }
    if is_widened:
        raw_ready = plgpu.Barrier(num_arrivals=pages_per_block, num_barriers=RAW_STAGES)
        scratch |= {
            "raw_k_smem": block((RAW_STAGES, *kv_shape), kv_dtype),
            "raw_v_smem": block((RAW_STAGES, *kv_shape), kv_dtype),
            "raw_k_ready": raw_ready,
            "raw_v_ready": raw_ready,
        }
    return scratch


def _prefill_attention_kernel(
    q_ref,  # [tokens, q_heads, head_dim]
    k_pages_ref,  # [layers, pages, page_size, kv_heads, head_dim]
    v_pages_ref,
    layer_ref,  # [1]
    page_table_ref,  # [rows, pages_per_seq]
    query_starts_ref,  # [rows + 1]
    kv_lens_ref,  # [rows]
    scales_ref,  # [2] float32, of keys and values
    *refs,  # where KV is cut: counters [blocks] int32; out [tokens, q_heads, head_dim]; where it is: what parts come to
    options: Options,
    **scratch,
) -> None:
    if options.blocks_at_once:
        counters_ref, out_ref, parts_ref, part_rows_ref = refs
        scratch |= {"counters_ref": counters_ref, "parts_ref": parts_ref, "part_rows_ref": part_rows_ref}
    else:
        (out_ref,) = refs
    tile = locate_tile(
        query_starts_ref,
        kv_lens_ref,
        tokens=q_ref.shape[0],
        tile_tokens=options.tile_tokens,
        kv_block=scratch["k_smem"].shape[1],
        window=options.window,
        tiles=options.tiles,
        blocks_at_once=options.blocks_at_once,
    )
    compute_warpgroups = scratch["q_smem"].shape[0] // WARPGROUP_ROWS
    warpgroup = lax.axis_index("warpgroup")
    is_widened = k_pages_ref.dtype != q_ref.dtype
    # Three warpgroups start with 168 registers a thread each. With two, all have what they can use.
    copy_registers, compute_registers = (56, 224) if is_widened else (40, 232)

    @pl.when(warpgroup == compute_warpgroups)
    def _():
        if compute_warpgroups == 2:
            plgpu.set_max_registers(copy_registers, action="decrease")
        copy = copy_and_widen_tile if is_widened else copy_tile
        pl.when(tile.exists)(
            functools.partial(copy, q_ref, k_pages_ref, v_pages_ref, layer_ref, page_table_ref, tile, **scratch)
        )

    @pl.when(warpgroup < compute_warpgroups)
    def _():
        if compute_warpgroups == 2:
            plgpu.set_max_registers(compute_registers, action="increase")
        pl.when(tile.exists)(functools.partial(compute_tile, out_ref, scales_ref, tile, options, **scratch))
