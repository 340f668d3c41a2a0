"""Rotary embedding of queries and keys, and the write of keys and values to the paged cache, in one op."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.kernels.hopper import takes_kernel
from jaxserve.kernels.rope_write_kv_mosaic_gpu import rope_write_kv_mosaic_gpu, unsupported_reason
from jaxserve.kernels.rope_write_kv_xla import rope_write_kv_xla

Implementation = Literal["mosaic_gpu", "xla"]

CACHE_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn)


def rope_write_kv(
    qkv: Float[Array, "tokens kv_heads width head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    layer: Int32[Array, ""] | int,
    cosines: Float[Array, "tokens half"],
    sines: Float[Array, "tokens half"],
    pages: Int32[Array, " tokens"],
    offsets: Int32[Array, " tokens"],
    *,
    k_scale: Float[Array, ""] | None = None,
    v_scale: Float[Array, ""] | None = None,
    implementation: Implementation | None = None,
) -> tuple[
    Float[Array, "tokens heads head_dim"],
    Float[Array, "layers pages page_size kv_heads head_dim"],
    Float[Array, "layers pages page_size kv_heads head_dim"],
]:
    """Applies rotary embeddings (arXiv:2104.09864) to queries and keys and stores each token's key and value.

    The caches are updated in place where the caller has no further use for the old ones (donated, or a value that the
    program made itself); otherwise XLA copies them first.

    Args:
        qkv: each KV head's `width - 2` query heads, then its key, then its value, none of them rotated.
        k_pages, v_pages: the whole cache, all layers; bfloat16, float16, float32 or float8_e4m3fn.
        layer: which layer's pages to write. A run-time value: one compiled kernel serves every layer.
        cosines, sines: float32 [tokens, head_dim / 2], of each token's angles. The pair (i, i + head_dim / 2) is turned
            by angle i, in float32, and rounded to qkv's dtype.
        pages, offsets: where in the cache a token's key and value go, `0 <= offset < page_size`, no two tokens to one
            place. A page index outside the cache marks a padding token: nothing is written for it.
        k_scale, v_scale: float32 factors that readers multiply the cached values with (float8 caches), so `k / k_scale`
            is stored; None for 1. What float8 cannot hold becomes its largest number.
        implementation: None takes the Hopper kernel where it can run and else the plain XLA program; on a GPU the
            latter is logged once as a warning. A name asks for that one.

    Returns:
        The rotated queries [tokens, kv_heads * (width - 2), head_dim], k_pages and v_pages.

    Raises:
        ValueError: shapes or dtypes that contradict each other.
        NotImplementedError: `implementation="mosaic_gpu"` for shapes or a device that the kernel doesn't support.
    """
    _validate(qkv, k_pages, v_pages, cosines, sines, pages, offsets)
    layer = jnp.asarray(layer, jnp.int32)
    takes_hopper = takes_kernel("rope_write_kv", implementation, lambda: unsupported_reason(qkv, k_pages))
    write = rope_write_kv_mosaic_gpu if takes_hopper else rope_write_kv_xla
    return write(
        qkv, k_pages, v_pages, layer, cosines, sines, pages, offsets, k_scale=k_scale, v_scale=v_scale
    )  # fmt: skip


def _validate(qkv, k_pages, v_pages, cosines, sines, pages, offsets) -> None:
    if qkv.ndim != 4 or qkv.shape[2] < 3:
        raise ValueError(f"qkv must be [tokens, kv_heads, query heads a KV head + 2, head_dim], got {qkv.shape=}")
    if k_pages.ndim != 5:
        raise ValueError(f"k_pages must be [layers, pages, page_size, kv_heads, head_dim], got {k_pages.shape=}")
    if v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            f"k_pages and v_pages must agree, got {k_pages.shape=} {k_pages.dtype=}, {v_pages.shape=} {v_pages.dtype=}"
        )
    if k_pages.dtype not in CACHE_DTYPES:
        raise ValueError(f"{k_pages.dtype=} must be one of {[jnp.dtype(dtype).name for dtype in CACHE_DTYPES]}")
    tokens, kv_heads, _, head_dim = qkv.shape
    if k_pages.shape[3:] != (kv_heads, head_dim):
        raise ValueError(
            f"qkv and k_pages must have the same kv_heads and head_dim, got {qkv.shape=}, {k_pages.shape=}"
        )
    if head_dim % 2:
        raise ValueError(f"{head_dim=} must be even: the rotary embedding turns pairs")
    for name, table in (("cosines", cosines), ("sines", sines)):
        if table.shape != (tokens, head_dim // 2) or table.dtype != jnp.float32:
            raise ValueError(
                f"{name} must be float32 [tokens={tokens}, head_dim / 2={head_dim // 2}], got {table.shape} {table.dtype}"
            )
    for name, indices in (("pages", pages), ("offsets", offsets)):
        if indices.shape != (tokens,) or indices.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32 [tokens={tokens}], got {indices.shape} {indices.dtype}")
