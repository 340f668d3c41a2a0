"""The least time that a decode step can take: every weight and every live page read once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.models.kv_cache import kv_bytes_per_token
from jaxserve.models.param_spec import ParamSpec
from jaxserve.models.params import param_specs


@dataclass(frozen=True)
class Ceiling:
    """What a device was measured to reach.

    Attributes:
        bandwidth: bytes a second that reading a large array once reaches.
        matrix_rate: floating-point operations a second of a large matrix product, in the type that models run in there.
        origin: "table", or "measured": just now, in this process.
    """

    bandwidth: float
    matrix_rate: float
    origin: str


# By jax's name of the device; measured with jax 0.11.2, bfloat16 products.
MEASURED = {"NVIDIA H100 80GB HBM3": Ceiling(3.09e12, 790e12, "table")}
MEASURED_BANDWIDTH = {kind: ceiling.bandwidth for kind, ceiling in MEASURED.items()}

_ROUNDS = 5
_CPU_ROUNDS = 25  # others may have the machine for a while


def device_ceiling(device: jax.Device) -> Ceiling:  # pyright: ignore[reportInvalidTypeForm]
    """From the table, or measured in about a second where the device is not in it."""
    if device.device_kind in MEASURED:
        return MEASURED[device.device_kind]
    if device.platform == "cpu":
        # numpy's products use every core, which XLA's reductions on a CPU do not.
        matrix, vector = np.ones((8192, 8192), np.float32), np.ones(8192, np.float32)
        square = np.ones((1024, 1024), np.float32)
        read, multiply = (_best(work, _CPU_ROUNDS) for work in (lambda: matrix @ vector, lambda: square @ square))
        return Ceiling(matrix.nbytes / read, 2 * 1024**3 / multiply, "measured")
    with jax.default_device(device):
        values = jnp.ones(2**30, jnp.bfloat16)
        square = jnp.ones((8192, 8192), jnp.bfloat16)
        add, product = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32)), jax.jit(jnp.matmul)
        read = _best(lambda: jax.block_until_ready([add(values) for _ in range(4)])) / 4
        multiply = _best(lambda: jax.block_until_ready([product(square, square) for _ in range(4)])) / 4
    return Ceiling(values.nbytes / read, 2 * 8192**3 / multiply, "measured")


def _best(work: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Seconds of the fastest of some runs, after one that is not counted."""
    work()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def weight_bytes_per_step(config: ModelConfig, dtype: jnp.dtype) -> int:
    """Bytes of weights that a step reads: all but an embedding table that is not the head as well."""
    return sum(spec.num_bytes(dtype) for spec in _step_specs(config))


def num_step_weights(config: ModelConfig) -> int:
    """Weights that a token passes: all but an embedding table that is not the head as well."""
    # Not from the shapes of quantized weights, which hold several in an element and scales beside them.
    return sum(spec.size for spec in _step_specs(replace(config, quantization=None)))


def _step_specs(config: ModelConfig) -> list[ParamSpec]:
    specs = param_specs(config)
    head = specs.embedding if specs.lm_head is None else specs.lm_head
    return jax.tree.leaves((specs.layers, head), is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


def step_floor_ms(
    config: ModelConfig,
    dtype: jnp.dtype,
    device_kind: str,
    *,
    batch: float,
    context: float,
    num_devices: int,
    bandwidth: float | None = None,
    cache_dtype: jnp.dtype | None = None,
) -> float | None:
    """Milliseconds of a decode step of `batch` sequences with `context` tokens each.

    Args:
        bandwidth: bytes a second of one device; None: as `MEASURED` has it for the device kind.
        cache_dtype: of the KV cache; None: `dtype`.

    Returns:
        None where the bandwidth is not known.
    """
    bandwidth = bandwidth or MEASURED_BANDWIDTH.get(device_kind)
    if bandwidth is None:
        return None
    token_bytes = kv_bytes_per_token(config, dtype if cache_dtype is None else cache_dtype)
    cache = batch * attended_tokens(config, context) * token_bytes
    return (weight_bytes_per_step(config, dtype) + cache) / (bandwidth * num_devices) * 1e3


def attended_tokens(config: ModelConfig, context: float) -> float:
    """Tokens of this context that the next one looks at: all, or those of the sliding window."""
    return context if config.sliding_window is None else min(context, float(config.sliding_window))


def prompt_floor_ms(
    config: ModelConfig, dtype: jnp.dtype, ceiling: Ceiling, *, tokens: float, num_devices: int
) -> float:
    """Milliseconds that a prompt of so many tokens takes alone: every weight read once, or the operations where these take
    longer. Only the last token passes the head.
    """
    head = config.hidden_size * config.vocab_size
    seen = attended_tokens(config, tokens)
    pairs = (
        seen**2 / 2 + (tokens - seen) * seen
    )  # causal: each token with those before it, in the window if there is one
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    operations = 2 * (num_step_weights(config) - head) * tokens + 2 * head + attention
    seconds = max(weight_bytes_per_step(config, dtype) / ceiling.bandwidth, operations / ceiling.matrix_rate)
    return seconds / num_devices * 1e3


def operations_per_token(config: ModelConfig, context: float) -> float:
    """Floating-point operations that one token at this context takes: products with weights, and attention."""
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * attended_tokens(config, context)
    return 2 * num_step_weights(config) + attention
