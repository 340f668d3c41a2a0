"""Causal attention of prompt chunks over the paged KV cache: ragged rows, one after the other, in one call."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.kernels.hopper import takes_kernel
from jaxserve.kernels.lowered_once import LoweredOnce
from jaxserve.kernels.prefill_attention_mosaic_gpu import prefill_attention_mosaic_gpu, unsupported_reason
from jaxserve.kernels.prefill_attention_xla import prefill_attention_xla

_QUERY_DTYPES = ("float32", "bfloat16", "float16")
_KV_DTYPES = (*_QUERY_DTYPES, "float8_e4m3fn")

_hopper_kernel = LoweredOnce(prefill_attention_mosaic_gpu, static_argnames=("scale", "window", "softcap"))


def prefill_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    layer: Int32[Array, ""] | int,
    page_table: Int32[Array, "rows pages_per_seq"],
    query_starts: Int32[Array, "rows+1"],
    kv_lens: Int32[Array, "rows"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: Float[Array, ""] | float | None = None,
    v_scale: Float[Array, ""] | float | None = None,
    implementation: Literal["mosaic_gpu", "xla"] | None = None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Attend from the newest tokens of several rows to all of each row's KV up to and including each token.

    Row r's queries are q[query_starts[r] : query_starts[r + 1]]. Their K and V are already in the cache: query i of
    row r sits at position kv_lens[r] - (query_starts[r + 1] - query_starts[r]) + i and sees the positions up to its
    own. A row without queries is padding; tokens from query_starts[-1] on are padding too and give zeros. Page slots
    and cache entries that no live position needs may hold anything, NaN and page ids out of range included.

    Args:
        q: queries, float32, bfloat16 or float16. Query head h reads KV head h // (q_heads / kv_heads).
        k_pages: keys of the whole cache, in q's dtype or float8_e4m3fn.
        v_pages: values, same shape and dtype as k_pages.
        layer: which layer of the cache to read.
        page_table: ids of each row's pages, in order of position.
        query_starts: where each row's queries start, ascending from 0, and where the last row's end.
        kv_lens: length of each row's KV, this chunk included; at least the row's number of queries.
        scale: factor on the scores, usually head_dim ** -0.5.
        window: see at most this many positions, the query's own included (sliding-window attention).
        softcap: bound the scores as softcap * tanh(score / softcap) (Gemma 2, 2024).
        k_scale: what a stored key is multiplied by, for float8 caches.
        v_scale: what a stored value is multiplied by, for float8 caches.
        implementation: "mosaic_gpu" is the Hopper kernel, "xla" runs anywhere; None takes the Hopper kernel where the
            device and the shapes allow it. A GPU that has to do without logs the reason once, at WARNING.

    Returns:
        The attention output, same shape and dtype as q.

    Raises:
        ValueError: shapes, dtypes or parameters that do not fit together.
        NotImplementedError: implementation="mosaic_gpu" for a case that the kernel does not cover.
    """
    _validate(q, k_pages, v_pages, page_table, query_starts, kv_lens, window, softcap)
    layer = jnp.asarray(layer, jnp.int32)
    k_scale = None if k_scale is None else jnp.asarray(k_scale, jnp.float32)
    v_scale = None if v_scale is None else jnp.asarray(v_scale, jnp.float32)
    takes_hopper = takes_kernel(
        "prefill_attention", implementation, lambda: unsupported_reason(q, k_pages, page_table.shape[0], scale)
    )
    attend = _hopper_kernel if takes_hopper else prefill_attention_xla
    return attend(
        q, k_pages, v_pages, layer, page_table, query_starts, kv_lens,
        scale=scale, window=window, softcap=softcap, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


def _validate(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    query_starts: Array,
    kv_lens: Array,
    window: int | None,
    softcap: float | None,
) -> None:
    if q.ndim != 3 or k_pages.ndim != 5:
        raise ValueError(
            f"{q.shape=} must be [tokens, q_heads, head_dim] and {k_pages.shape=} "
            "[layers, pages, page_size, kv_heads, head_dim]"
        )
    if v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            f"v_pages is {v_pages.dtype}{v_pages.shape} but k_pages {k_pages.dtype}{k_pages.shape}; they must match"
        )
    _, q_heads, head_dim = q.shape
    kv_heads = k_pages.shape[3]
    if head_dim != k_pages.shape[4]:
        raise ValueError(f"{head_dim=} of q differs from {k_pages.shape[4]} of the cache")
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads=} must be a multiple of {kv_heads=}")
    if q.dtype.name not in _QUERY_DTYPES:
        raise ValueError(f"{q.dtype=} must be one of {_QUERY_DTYPES}")
    if k_pages.dtype.name not in _KV_DTYPES:
        raise ValueError(f"{k_pages.dtype=} must be one of {_KV_DTYPES}")
    if page_table.ndim != 2:
        raise ValueError(f"{page_table.shape=} must be [rows, pages_per_seq]")
    rows = page_table.shape[0]
    if query_starts.shape != (rows + 1,) or kv_lens.shape != (rows,):
        raise ValueError(f"{query_starts.shape=} must be ({rows + 1},) and {kv_lens.shape=} ({rows},) for {rows} rows")
    for name, array in (("page_table", page_table), ("query_starts", query_starts), ("kv_lens", kv_lens)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {array.dtype}, must be int32")
    if window is not None and window < 1:
        raise ValueError(f"{window=} must be at least 1, or None for no window")
    if softcap is not None and softcap <= 0.0:
        raise ValueError(f"{softcap=} must be above 0, or None for no cap")
