"""The paged KV cache: one array each for keys and values, all layers together, so that one kernel serves every layer."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int32

from jaxserve.config import ModelConfig
from jaxserve.models.params import ParamSpec


@struct.dataclass
class KVCache:
    """Keys and values of every layer. A page holds `page_size` tokens of one sequence."""

    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"]
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"]


def kv_cache_specs(config: ModelConfig, num_pages: int, page_size: int) -> KVCache:
    """Declarations of the cache's arrays, for placement."""
    spec = ParamSpec(
        (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim),
        ("layers", "pages", "page_size", "kv_heads", "head_dim"),
        0.0,
    )
    return KVCache(k_pages=spec, v_pages=spec)  # pyright: ignore[reportArgumentType] - leaves are declarations here


def kv_bytes_per_token(config: ModelConfig, dtype: jnp.dtype) -> int:
    """Bytes of keys and values that one token takes over all layers and devices."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


def write_kv(
    cache: KVCache,
    layer: Int32[Array, ""],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    pages: Int32[Array, " tokens"],
    offsets: Int32[Array, " tokens"],
) -> KVCache:
    """Stores each token's key and value at (page, offset); a page index past the end is dropped (padding rows).

    The marker must be past the end: in JAX an index of -1 writes to the last page.
    """
    dtype = cache.k_pages.dtype
    if k.shape[0] == 1:
        # XLA rewrites a scatter of one update into a form that copies the whole cache; a second, dropped one avoids that.
        nowhere = jnp.full((1,), cache.k_pages.shape[1], pages.dtype)
        k, v, offsets = (jnp.concatenate([array, array]) for array in (k, v, offsets))
        pages = jnp.concatenate([pages, nowhere])
    return KVCache(
        k_pages=cache.k_pages.at[layer, pages, offsets].set(k.astype(dtype), mode="drop"),
        v_pages=cache.v_pages.at[layer, pages, offsets].set(v.astype(dtype), mode="drop"),
    )
