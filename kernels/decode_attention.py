"""Attention of one query token a sequence over its paged KV cache: validation and the choice of implementation."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.kernels.decode_attention_mosaic_gpu import decode_attention_mosaic_gpu, unsupported_reason
from jaxserve.kernels.decode_attention_xla import decode_attention_xla
from jaxserve.kernels.hopper import takes_kernel
from jaxserve.kernels.lowered_once import LoweredOnce

Implementation = Literal["mosaic_gpu", "xla"]

CACHE_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn)

_hopper_kernel = LoweredOnce(decode_attention_mosaic_gpu, static_argnames=("scale", "window", "softcap"))


def decode_attention(
    q: Float[Array, "batch q_heads head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    layer: Int32[Array, ""] | int,
    page_table: Int32[Array, "batch pages_per_seq"],
    kv_lens: Int32[Array, "batch"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: Float[Array, ""] | None = None,
    v_scale: Float[Array, ""] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "batch q_heads head_dim"]:
    """Attends with the newest token of each sequence to the sequence's cached tokens, its own included.

    Row i's query stands at position `kv_lens[i] - 1` and sees the positions `0 .. kv_lens[i] - 1`, or with a window w
    the last w of them. Token t of row i lies in page `page_table[i, t // page_size]` at offset `t % page_size`.
    Query head h reads KV head `h // (q_heads // kv_heads)`.

    Args:
        q: the queries, with the rotary embedding applied.
        k_pages, v_pages: the whole cache, all layers; bfloat16, float16, float32 or float8_e4m3fn.
        layer: which layer's pages to read. A run-time value: one compiled kernel serves every layer.
        page_table: page ids. Entries past a row's length may hold anything, and so may the pages that no row reads
            (NaN included) and the tail of a row's last page.
        kv_lens: tokens in each row; 0 marks a padding row, whose output is zero.
        scale: factor on `q @ k`, mostly `head_dim ** -0.5`.
        window: sliding window in tokens, or None for all.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2, arXiv:2408.00118), or None.
        k_scale, v_scale: float32 factors that the cached values are multiplied with (float8 caches), or None for 1.
        implementation: None takes the Hopper kernel where it can run and else the plain XLA program; on a GPU the
            latter is logged once as a warning. A name asks for that one.

    Raises:
        ValueError: shapes, dtypes or options that contradict each other.
        NotImplementedError: `implementation="mosaic_gpu"` for shapes or a device that the kernel doesn't support.
    """
    _validate(q, k_pages, v_pages, page_table, kv_lens, window, softcap)
    layer = jnp.asarray(layer, jnp.int32)
    takes_hopper = takes_kernel("decode_attention", implementation, lambda: unsupported_reason(q, k_pages))
    attend = _hopper_kernel if takes_hopper else decode_attention_xla
    return attend(
        q, k_pages, v_pages, layer, page_table, kv_lens,
        scale=scale, window=window, softcap=softcap, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


def _validate(q, k_pages, v_pages, page_table, kv_lens, window: int | None, softcap: float | None) -> None:
    if q.ndim != 3:
        raise ValueError(f"q must be [batch, q_heads, head_dim], got {q.shape=}")
    if k_pages.ndim != 5:
        raise ValueError(f"k_pages must be [layers, pages, page_size, kv_heads, head_dim], got {k_pages.shape=}")
    if v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            f"k_pages and v_pages must agree, got {k_pages.shape=} {k_pages.dtype=}, {v_pages.shape=} {v_pages.dtype=}"
        )
    if k_pages.dtype not in CACHE_DTYPES:
        raise ValueError(f"{k_pages.dtype=} must be one of {[jnp.dtype(dtype).name for dtype in CACHE_DTYPES]}")
    batch, q_heads, head_dim = q.shape
    kv_heads = k_pages.shape[3]
    if k_pages.shape[4] != head_dim:
        raise ValueError(f"q and k_pages must have one head_dim, got {q.shape=}, {k_pages.shape=}")
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads=} must be a multiple of {kv_heads=}")
    if page_table.ndim != 2 or page_table.shape[0] != batch or page_table.dtype != jnp.int32:
        raise ValueError(
            f"page_table must be int32 [batch={batch}, pages_per_seq], got {page_table.shape=} {page_table.dtype=}"
        )
    if kv_lens.shape != (batch,) or kv_lens.dtype != jnp.int32:
        raise ValueError(f"kv_lens must be int32 [batch={batch}], got {kv_lens.shape=} {kv_lens.dtype=}")
    if window is not None and window < 1:
        raise ValueError(f"{window=} must be at least 1 token, or None for no window")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{softcap=} must be positive, or None for none")
