"""Times each kernel by itself: microseconds, bytes, bandwidth and the share of the measured ceiling, by shape."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.floor import Ceiling
from jaxserve.config import ModelConfig
from jaxserve.kernels.add_rms_norm import add_rms_norm
from jaxserve.kernels.decode_attention import decode_attention
from jaxserve.kernels.prefill_attention import prefill_attention
from jaxserve.kernels.rope_write_kv import rope_write_kv
from jaxserve.models.linear import column_parallel, head_scores, row_parallel, swiglu
from jaxserve.models.quantization import quantize
from jaxserve.quantization_config import QuantizationConfig
from jaxserve.sharding.collectives import Collectives

_CACHE_BYTES = 400_000_000  # several times the last-level cache: the calls go round so much of weights or KV pages
_MOST_COPIES = 16
_REPETITIONS = 7

Step = Callable[[int, jax.Array, Any], tuple[jax.Array, Any]]
Product = Callable[[jax.Array, Any], Any]


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one shape.

    Attributes:
        num_bytes: that a call must read and write at least.
        operations: floating-point operations of a call.
        make: makes the first input, the arrays, and what a call does: `step(number, x, arrays) -> (next x, arrays)`. Each
            call's result decides the next one's input, so that the calls run one after the other as in a model.
    """

    kernel: str
    shape: str
    num_bytes: int
    operations: float
    make: Callable[[], tuple[jax.Array, Any, Step]]


@dataclass(frozen=True)
class KernelTime:
    """What a case took: seconds of one call; not a number where more calls took no longer than fewer (noise)."""

    case: KernelCase
    seconds: float

    @property
    def bandwidth(self) -> float:
        return self.case.num_bytes / self.seconds

    def floor(self, ceiling: Ceiling) -> float:
        """Seconds that a call takes at least: for its bytes, or for its operations where these take longer."""
        return max(self.case.num_bytes / ceiling.bandwidth, self.case.operations / ceiling.matrix_rate)


def time_kernel(case: KernelCase, *, calls: tuple[int, int]) -> KernelTime:
    """Two programs of different length are timed: what a program costs once is not in the difference."""
    x, arrays, step = case.make()
    fastest = []
    for count in calls:

        def run(x: jax.Array, arrays: Any, count: int = count) -> jax.Array:
            for number in range(count):
                x, arrays = step(number, x, arrays)
            return x

        program = jax.jit(run).lower(x, arrays).compile()
        jax.block_until_ready(program(x, arrays))
        times = []
        for _ in range(_REPETITIONS):
            started = time.perf_counter()
            jax.block_until_ready(program(x, arrays))
            times.append(time.perf_counter() - started)
        fastest.append(min(times))
    difference = fastest[1] - fastest[0]
    return KernelTime(case, difference / (calls[1] - calls[0]) if difference > 0 else math.nan)


def kernel_cases(
    config: ModelConfig,
    dtype: jnp.dtype,
    *,
    rows: Sequence[int],
    attention: Sequence[tuple[int, int]],
    prefill: Sequence[int],
    page_size: int,
    quantization: QuantizationConfig | None = None,
) -> Iterator[KernelCase]:
    """The kernels of a model's step.

    Args:
        rows: of the products and norms.
        attention: batch and tokens in the cache of each row, for decode attention.
        prefill: prompt tokens, for prefill attention and the KV write.
        quantization: of the layers' weights; None: they are of `dtype`.
    """
    head_dim, hidden = config.head_dim, config.hidden_size
    qkv = (config.num_heads + 2 * config.num_kv_heads) * head_dim
    products = (
        ("qkv", (hidden, qkv), partial(column_parallel, bias=None), quantization),
        ("output", (config.num_heads * head_dim, hidden), _row_parallel, quantization),
        ("gate-up", (hidden, 2, config.intermediate_size), partial(swiglu, bias=None), quantization),
        ("down", (config.intermediate_size, hidden), _row_parallel, quantization),
        ("head", (hidden, config.vocab_size), head_scores, None),
    )
    for name, shape, product, made_into in products:
        for count in rows:
            yield _product_case(name, count, shape, dtype, product, made_into)
    for count in rows:
        yield _norm_case(count, hidden, dtype)
    for batch, length in attention:
        yield _decode_attention_case(config, batch, length, dtype, page_size)
    for tokens in prefill:
        yield _prefill_attention_case(config, tokens, dtype, page_size)
    for tokens in (*rows, *prefill):
        yield _rope_write_case(config, tokens, dtype, page_size)


def _copies(num_bytes: int) -> int:
    return max(2, min(_MOST_COPIES, -(-_CACHE_BYTES // num_bytes)))


@partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32).astype(dtype) * jnp.asarray(0.02, dtype)


def _random(seed: int, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return _draw(jax.random.key(seed, impl="rbg"), shape, dtype)  # which compiles and runs in no time


def _row_parallel(x: jax.Array, weight: jax.Array) -> jax.Array:
    product = row_parallel(x, weight, None, Collectives(1))
    return product if product.ndim == 2 else product.sum(axis=0)  # in a step the norm that follows adds the parts up


def _product_case(
    name: str,
    rows: int,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    product: Product,
    quantization: QuantizationConfig | None,
) -> KernelCase:
    inputs, outputs, weights = shape[0], shape[-1], math.prod(shape)

    def weight() -> Any:
        dense = _random(1, shape, dtype)
        return dense if quantization is None else quantize(dense, 1, quantization)

    weight_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(weight)))
    num_bytes = weight_bytes + dtype.itemsize * rows * (inputs + outputs)

    def make() -> tuple[jax.Array, Any, Step]:
        first = jax.jit(weight)()
        copies = [jax.tree.map(partial(jnp.array, copy=True), first) for _ in range(_copies(weight_bytes))]

        def step(number: int, x: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
            out = product(x, arrays[number % len(arrays)])
            return x + out[:, :1].astype(dtype) * jnp.asarray(1e-3, dtype), arrays

        return _random(99, (rows, inputs), dtype), copies, step

    kind = "" if quantization is None else f" {quantization.name}"
    return KernelCase(f"product {name}{kind}", f"{rows} x {inputs} x {outputs}", num_bytes, 2.0 * rows * weights, make)


def _norm_case(rows: int, size: int, dtype: jnp.dtype) -> KernelCase:
    num_bytes = dtype.itemsize * (4 * rows + 1) * size  # two in, two out, and the norm's factors

    def make() -> tuple[jax.Array, Any, Step]:
        def step(number: int, x: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
            update, weight = arrays
            total, norm = add_rms_norm(x, update, weight, 1e-5)
            return norm, (total, weight)  # both results are used, so that XLA makes both

        return _random(3, (rows, size), dtype), (_random(4, (rows, size), dtype), jnp.ones((size,), dtype)), step

    return KernelCase("residual add and norm", f"{rows} x {size}", num_bytes, 0.0, make)


def _cache(config: ModelConfig, pages: int, dtype: jnp.dtype, page_size: int) -> tuple[jax.Array, jax.Array]:
    layer = pages * page_size * config.num_kv_heads * config.head_dim
    shape = (_copies(2 * layer * dtype.itemsize), pages, page_size, config.num_kv_heads, config.head_dim)
    return _random(1, shape, dtype), _random(2, shape, dtype)


def _decode_attention_case(
    config: ModelConfig, batch: int, length: int, dtype: jnp.dtype, page_size: int
) -> KernelCase:
    tokens = batch * length
    num_bytes = dtype.itemsize * config.head_dim * 2 * (tokens * config.num_kv_heads + batch * config.num_heads)

    def make() -> tuple[jax.Array, Any, Step]:
        pages = -(-length // page_size)
        caches = _cache(config, batch * pages, dtype, page_size)
        table = np.random.default_rng(0).permutation(batch * pages).astype(np.int32).reshape(batch, pages)

        def step(number: int, x: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
            (k_pages, v_pages), page_table, kv_lens = arrays
            out = decode_attention(
                x, k_pages, v_pages, number % k_pages.shape[0], page_table, kv_lens, scale=config.head_dim**-0.5
            )
            return x + out * jnp.asarray(1e-3, dtype), arrays

        x = _random(3, (batch, config.num_heads, config.head_dim), dtype)
        return x, (caches, jnp.asarray(table), jnp.full((batch,), length, jnp.int32)), step

    operations = 4.0 * tokens * config.num_heads * config.head_dim
    return KernelCase("decode attention", f"{batch} x {length}", num_bytes, operations, make)


def _prefill_attention_case(config: ModelConfig, tokens: int, dtype: jnp.dtype, page_size: int) -> KernelCase:
    num_bytes = dtype.itemsize * config.head_dim * 2 * tokens * (config.num_kv_heads + config.num_heads)

    def make() -> tuple[jax.Array, Any, Step]:
        pages = -(-tokens // page_size)
        caches = _cache(config, pages, dtype, page_size)
        table = np.random.default_rng(0).permutation(pages).astype(np.int32)[None]

        def step(number: int, x: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
            (k_pages, v_pages), page_table, starts, kv_lens = arrays
            out = prefill_attention(
                x, k_pages, v_pages, number % k_pages.shape[0], page_table, starts, kv_lens,
                scale=config.head_dim**-0.5,
            )  # fmt: skip
            return x + out * jnp.asarray(1e-3, dtype), arrays

        x = _random(3, (tokens, config.num_heads, config.head_dim), dtype)
        lengths = jnp.asarray([0, tokens], jnp.int32), jnp.asarray([tokens], jnp.int32)
        return x, (caches, jnp.asarray(table), *lengths), step

    operations = 2.0 * tokens * (tokens + 1) * config.num_heads * config.head_dim  # causal pairs only
    return KernelCase("prefill attention", f"{tokens}", num_bytes, operations, make)


def _rope_write_case(config: ModelConfig, tokens: int, dtype: jnp.dtype, page_size: int) -> KernelCase:
    width = config.num_heads // config.num_kv_heads + 2
    num_bytes = dtype.itemsize * 2 * tokens * config.num_kv_heads * width * config.head_dim

    def make() -> tuple[jax.Array, Any, Step]:
        pages = -(-tokens // page_size)
        caches = _cache(config, pages, dtype, page_size)
        places = np.arange(tokens, dtype=np.int32)
        angles = np.outer(places, 1.0 / 10000.0 ** np.linspace(0, 1, config.head_dim // 2)).astype(np.float32)

        def step(number: int, x: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
            (k_pages, v_pages), cosines, sines, page_ids, offsets = arrays
            layer = number % k_pages.shape[0]
            q, k_pages, v_pages = rope_write_kv(x, k_pages, v_pages, layer, cosines, sines, page_ids, offsets)
            x = x + q.reshape(tokens, config.num_kv_heads, width - 2, -1)[:, :, :1] * jnp.asarray(1e-3, dtype)
            return x, ((k_pages, v_pages), cosines, sines, page_ids, offsets)

        x = _random(3, (tokens, config.num_kv_heads, width, config.head_dim), dtype)
        tables = jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
        return x, (caches, *tables, jnp.asarray(places // page_size), jnp.asarray(places % page_size)), step

    return KernelCase("rope and KV write", f"{tokens}", num_bytes, 0.0, make)


def format_kernels(times: Sequence[KernelTime], ceiling: Ceiling) -> str:
    """A table: share is the floor over the time."""
    rows = [("kernel", "shape", "us", "MB", "GB/s", "TFLOP/s", "floor us", "share")]
    for entry in times:
        case, floor = entry.case, entry.floor(ceiling)
        measured = ("noise", "-", "-", "-")
        if not math.isnan(entry.seconds):
            rate = case.operations / entry.seconds
            measured = (
                f"{entry.seconds * 1e6:.1f}", f"{entry.bandwidth / 1e9:.1f}", f"{rate / 1e12:.2f}",
                f"{floor / entry.seconds:.0%}",
            )  # fmt: skip
        time_text, bandwidth, rate_text, share = measured
        megabytes = f"{case.num_bytes / 1e6:.2f}"
        rows.append((case.kernel, case.shape, time_text, megabytes, bandwidth, rate_text, f"{floor * 1e6:.1f}", share))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
