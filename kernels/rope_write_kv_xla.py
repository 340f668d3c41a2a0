"""Rotary embedding and the write to the paged KV cache in plain XLA: the reference, the CPU path and the fall-back."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def rope_write_kv_xla(
    qkv: Float[Array, "tokens kv_heads width head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    layer: Int32[Array, ""],
    cosines: Float[Array, "tokens half"],
    sines: Float[Array, "tokens half"],
    pages: Int32[Array, " tokens"],
    offsets: Int32[Array, " tokens"],
    *,
    k_scale: Float[Array, ""] | None = None,
    v_scale: Float[Array, ""] | None = None,
) -> tuple[Array, Array, Array]:
    """Turns queries and keys and stores keys and values; arguments as in `rope_write_kv`, already validated."""
    tokens, kv_heads, width, head_dim = qkv.shape
    group = width - 2
    q = _turn(qkv[:, :, :group].reshape(tokens, kv_heads * group, head_dim), cosines, sines)
    k, v = _turn(qkv[:, :, group], cosines, sines), qkv[:, :, group + 1]
    k, v = to_cache_dtype(k, k_scale, k_pages.dtype), to_cache_dtype(v, v_scale, v_pages.dtype)
    # An index of -1 would write to the last page: every index that is no page goes past the end, where it is dropped.
    nowhere = jnp.int32(k_pages.shape[1])
    pages = jnp.where(pages < 0, nowhere, pages)
    if tokens == 1:
        # XLA rewrites a scatter of one update into a form that copies the whole cache; a second, dropped one avoids that.
        k, v, offsets = (jnp.concatenate([array, array]) for array in (k, v, offsets))
        pages = jnp.concatenate([pages, nowhere[None]])
    k_pages = k_pages.at[layer, pages, offsets].set(k, mode="drop")
    return q, k_pages, v_pages.at[layer, pages, offsets].set(v, mode="drop")


def to_cache_dtype(x: Array, scale: Array | None, dtype) -> Array:
    """x / scale as the cache holds it. Float8 has no infinity: what is too large becomes the largest number, not NaN."""
    if scale is not None:
        x = x.astype(jnp.float32) / scale
    if dtype == jnp.float8_e4m3fn:
        limit = float(jnp.finfo(dtype).max)
        x = jnp.clip(x.astype(jnp.float32), -limit, limit)
    return x.astype(dtype)


def _turn(x: Array, cosines: Array, sines: Array) -> Array:
    """x [tokens, heads, head_dim] with the pairs (i, i + head_dim / 2) turned, in float32; the result has x's dtype."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cosines, sines = cosines[:, None, :], sines[:, None, :]
    turned = jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return turned.astype(x.dtype)
