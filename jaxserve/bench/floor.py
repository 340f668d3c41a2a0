"""The least time that a decode step can take: every weight and every live page read once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.config import ModelConfig
from jaxserve.models.kv_cache import kv_bytes_per_token
from jaxserve.models.params import ParamSpec, param_specs

# Bytes a second that reading a large array once was measured to reach, by jax's name of the device.
MEASURED_BANDWIDTH = {"NVIDIA H100 80GB HBM3": 3.09e12}


def weight_bytes_per_step(config: ModelConfig, dtype: jnp.dtype) -> int:
    """Bytes of weights that a step reads: all but an embedding table that is not the head as well."""
    specs = param_specs(config)
    head = specs.embedding if specs.lm_head is None else specs.lm_head
    read = jax.tree.leaves((specs.layers, head), is_leaf=lambda leaf: isinstance(leaf, ParamSpec))
    return sum(spec.size * spec.element_type(dtype).itemsize for spec in read)


def step_floor_ms(
    config: ModelConfig,
    dtype: jnp.dtype,
    device_kind: str,
    *,
    batch: int,
    context: float,
    num_devices: int,
    cache_dtype: jnp.dtype | None = None,
) -> float | None:
    """Milliseconds of a decode step of `batch` sequences with `context` tokens each; None for an unmeasured device."""
    bandwidth = MEASURED_BANDWIDTH.get(device_kind)
    if bandwidth is None:
        return None
    cache = batch * context * kv_bytes_per_token(config, dtype if cache_dtype is None else cache_dtype)
    return (weight_bytes_per_step(config, dtype) + cache) / (bandwidth * num_devices) * 1e3
