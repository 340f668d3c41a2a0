"""The paged KV cache: one array each for keys and values, all layers together, so that one kernel serves every layer."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

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
