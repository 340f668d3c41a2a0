"""The kernels of a step as `jaxserve bench kernels` times them: their inputs, and what a call must read and write."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.bench.kernels import KernelCase, Step
from jaxserve.config import ModelConfig
from jaxserve.kernels.add_rms_norm import add_rms_norm
from jaxserve.kernels.all_reduce_add_rms_norm import all_reduce_add_rms_norm
from jaxserve.kernels.decode_attention import decode_attention
from jaxserve.kernels.peer_memory import PeerMemory
from jaxserve.kernels.prefill_attention import prefill_attention
from jaxserve.kernels.quantize_rows import quantize_rows
from jaxserve.kernels.rope_write_kv import rope_write_kv
from jaxserve.models.linear import column_parallel, head_scores, row_parallel, swiglu
from jaxserve.models.quantization import quantize
from jaxserve.models.sampling import SamplingArrays, row_keys, sample
from jaxserve.quantization_config import QuantizationConfig
from jaxserve.sampling_params import SamplingMode
from jaxserve.sharding.collectives import Collectives
from jaxserve.sharding.mesh import TENSOR_AXIS

_CACHE_BYTES = 400_000_000  # several times the last-level cache: the calls go round so much of weights or KV pages
_MOST_COPIES = 16
_FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)

Product = Callable[[jax.Array, Any], Any]


def kernel_cases(
    config: ModelConfig,
    dtype: jnp.dtype,
    *,
    rows: Sequence[int],
    attention: Sequence[tuple[int, int]],
    prefill: Sequence[int],
    page_size: int,
    quantization: QuantizationConfig | None = None,
    mesh: Mesh | None = None,
    peers: PeerMemory | None = None,
) -> Iterator[KernelCase]:
    """The kernels of a model's step.

    Args:
        rows: of the products, norms, sums, of what is rounded, and of sampling.
        attention: batch and tokens in the cache of each row, for decode attention.
        prefill: prompt tokens, for prefill attention and the KV write.
        quantization: of the layers' weights; None: they are of `dtype`.
        mesh: whose devices sum over each other, with one axis; None: that is left out.
        peers: memory of these devices, for the kernel of our own that sums; None: XLA's alone is timed.
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
    for count in rows:
        yield _rounding_case(count, hidden, dtype)
    for cache_dtype in (dtype, _FLOAT8):
        for batch, length in attention:
            yield _decode_attention_case(config, batch, length, dtype, page_size, cache_dtype)
    for tokens in prefill:
        yield _prefill_attention_case(config, tokens, dtype, page_size)
    for tokens in (*rows, *prefill):
        yield _rope_write_case(config, tokens, dtype, page_size)
    for mode in get_args(SamplingMode):
        if mode != "full":  # which draws as "filtered" does
            for count in rows:
                yield _sampling_case(count, config.vocab_size, mode)
    if mesh is not None:
        for memory in (None, *([] if peers is None else [peers])):
            for count in rows:
                yield _sum_case(count, hidden, dtype, mesh, memory)


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


def _rounding_case(rows: int, size: int, dtype: jnp.dtype) -> KernelCase:
    num_bytes = rows * size * (dtype.itemsize + _FLOAT8.itemsize) + 4 * rows  # rows in, numbers and factors out

    def make() -> tuple[jax.Array, Any, Step]:
        def step(number: int, x: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
            rounded = quantize_rows(x)
            values = lax.optimization_barrier(rounded.values)  # else only the column that is used would be made
            change = values[:rows, 0].astype(jnp.float32) * rounded.factors[:rows]
            return x.at[:, 0].add(change.astype(dtype)), arrays

        return _random(3, (rows, size), dtype), (), step

    return KernelCase("rounding to float8", f"{rows} x {size}", num_bytes, 0.0, make)


def _sampling_case(rows: int, vocab: int, mode: SamplingMode) -> KernelCase:
    def make() -> tuple[jax.Array, Any, Step]:
        copies = _copies(4 * rows * vocab)
        params = SamplingArrays(
            temperature=jnp.full((rows,), 0.7, jnp.float32),
            top_p=jnp.full((rows,), 0.9, jnp.float32),
            top_k=jnp.full((rows,), 50, jnp.int32),
            min_p=jnp.zeros((rows,), jnp.float32),
        )

        def step(number: int, x: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
            logits, params, seeds = arrays
            scores = logits[number % copies]
            if mode == "greedy":  # which has no random keys for the last tokens to enter
                scores = scores + x[:, None].astype(jnp.float32) * jnp.float32(1e-9)
            return x + 1 + sample(scores, params, row_keys(seeds, x), mode=mode), arrays

        logits = [_random(number, (rows, vocab), jnp.dtype(jnp.float32)) * 200 for number in range(copies)]
        return jnp.zeros((rows,), jnp.int32), (logits, params, jnp.ones((rows, 2), jnp.uint32)), step

    return KernelCase(f"sampling {mode}", f"{rows} x {vocab}", 4 * rows * vocab, 0.0, make)


def _sum_case(rows: int, size: int, dtype: jnp.dtype, mesh: Mesh, peers: PeerMemory | None) -> KernelCase:
    """Its bytes are those of one device's memory: what goes from one to another has a limit of its own."""
    cut, whole = PartitionSpec(TENSOR_AXIS), PartitionSpec()

    def make() -> tuple[jax.Array, Any, Step]:
        def per_device(
            x: jax.Array, update: jax.Array, weight: jax.Array, memory: PeerMemory | None, number: int
        ) -> tuple[jax.Array, jax.Array]:
            if number == 0:
                # XLA has the devices wait for each other before a program with a collective of its own: none of our
                # kernels then waits for a device that still loads.
                x = x + lax.psum(update[0, :, :1] * jnp.asarray(0, dtype), TENSOR_AXIS)
            total, norm = all_reduce_add_rms_norm(x, update[0], weight, 1e-5, axis=TENSOR_AXIS, peers=memory)
            # Both results are used, so that XLA makes both; the norm was not asked for in float8.
            return cast("jax.Array", norm), total[None]

        def step(number: int, x: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
            update, weight, memory = arrays
            run = jax.shard_map(
                partial(per_device, number=number), mesh=mesh, in_specs=(whole, cut, whole, cut), out_specs=(whole, cut),
                check_vma=False,
            )  # fmt: skip
            norm, total = run(x, update, weight, memory)
            return norm, (total, weight, memory)

        def placed(array: jax.Array, spec: PartitionSpec) -> jax.Array:
            return jax.device_put(array, NamedSharding(mesh, spec))

        update = placed(_random(4, (mesh.size, rows, size), dtype), cut)
        weight = placed(jnp.ones((size,), dtype), whole)
        return placed(_random(3, (rows, size), dtype), whole), (update, weight, peers), step

    kind = "XLA" if peers is None else "own"
    num_bytes = dtype.itemsize * (4 * rows + 1) * size
    return KernelCase(f"all-reduce, add, norm ({kind})", f"{mesh.size} x {rows} x {size}", num_bytes, 0.0, make)


def _cache(config: ModelConfig, pages: int, dtype: jnp.dtype, page_size: int) -> tuple[jax.Array, jax.Array]:
    layer = pages * page_size * config.num_kv_heads * config.head_dim
    shape = (_copies(2 * layer * dtype.itemsize), pages, page_size, config.num_kv_heads, config.head_dim)
    return _random(1, shape, dtype), _random(2, shape, dtype)


def _decode_attention_case(
    config: ModelConfig, batch: int, length: int, dtype: jnp.dtype, page_size: int, cache_dtype: jnp.dtype
) -> KernelCase:
    tokens = batch * length
    cached, own = tokens * config.num_kv_heads * cache_dtype.itemsize, batch * config.num_heads * dtype.itemsize
    num_bytes = config.head_dim * 2 * (cached + own)

    def make() -> tuple[jax.Array, Any, Step]:
        pages = -(-length // page_size)
        caches = _cache(config, batch * pages, cache_dtype, page_size)
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
    kind = " fp8 KV" if cache_dtype == _FLOAT8 else ""
    return KernelCase(f"decode attention{kind}", f"{batch} x {length}", num_bytes, operations, make)


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
