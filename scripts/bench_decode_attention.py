"""Time paged decode attention on a GPU: microseconds a call and bandwidth over the KV bytes that it must read.

    python scripts/bench_decode_attention.py --shapes 1x8192,32x1024 --page-size 16 --cache-dtype bfloat16

A program makes many calls that go round the layers of a cache, so that the L2 cache serves none of them. Two programs of
different length are timed and their difference is divided by the difference in calls: what a program costs once (its
launch, the plan that all layers share) is left out, as a decode step pays it once for all layers.
"""

import argparse
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.decode_attention import decode_attention

SHAPES = "1x1024,1x8192,8x330,8x1024,8x8192,16x8192,32x330,32x1024,64x330,64x1024,64x4096"
CALLS = (16, 64)
REPETITIONS = 7
CACHE_BYTES = 400_000_000  # several times an H100's L2


class Arrays(NamedTuple):
    q: jax.Array  # [calls, batch, q_heads, head_dim]: different queries, so that no call can be shared
    k_pages: jax.Array
    v_pages: jax.Array
    page_table: jax.Array
    kv_lens: jax.Array


def make_arrays(batch: int, length: int, arguments: argparse.Namespace) -> Arrays:
    page_size, kv_heads, head_dim = arguments.page_size, arguments.kv_heads, arguments.head_dim
    dtype = jnp.dtype(arguments.cache_dtype)
    pages_per_row = -(-length // page_size)
    pages = batch * pages_per_row
    layer_bytes = 2 * pages * page_size * kv_heads * head_dim * dtype.itemsize
    layers = max(2, min(CALLS[0], -(-CACHE_BYTES // layer_bytes)))
    shape = (layers, pages, page_size, kv_heads, head_dim)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16).astype(dtype))
    table = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(batch, pages_per_row)
    q_shape = (max(CALLS), batch, arguments.q_heads, head_dim)
    return Arrays(
        q=jax.random.normal(jax.random.key(0), q_shape, jnp.bfloat16),
        k_pages=make(jax.random.key(1)),
        v_pages=make(jax.random.key(2)),
        page_table=jnp.asarray(table),
        kv_lens=jnp.full((batch,), length, jnp.int32),
    )


def time_program(calls: int, arrays: Arrays, implementation: Any) -> float:
    """Median seconds of a program of `calls` calls."""
    layers = arrays.k_pages.shape[0]
    scale = arrays.q.shape[-1] ** -0.5

    def run(arrays: Arrays) -> list[jax.Array]:
        return [
            decode_attention(
                arrays.q[i], arrays.k_pages, arrays.v_pages, i % layers, arrays.page_table, arrays.kv_lens,
                scale=scale, implementation=implementation,
            )
            for i in range(calls)
        ]  # fmt: skip

    program = jax.jit(run).lower(arrays).compile()
    for _ in range(2):
        jax.block_until_ready(program(arrays))
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        jax.block_until_ready(program(arrays))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="comma-separated BATCHxLENGTH")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--cache-dtype", default="bfloat16", help="bfloat16 or float8_e4m3fn")
    parser.add_argument("--implementation", choices=["mosaic_gpu", "xla"], help="the best one when not given")
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {vars(arguments)}")
    print(f"{'batch x length':>16} {'us a call':>10} {'GB/s of KV':>11}")
    for shape in arguments.shapes.split(","):
        batch, length = map(int, shape.split("x"))
        arrays = make_arrays(batch, length, arguments)
        short, long = (time_program(calls, arrays, arguments.implementation) for calls in CALLS)
        seconds = (long - short) / (CALLS[1] - CALLS[0])
        kv_bytes = 2 * batch * length * arguments.kv_heads * arguments.head_dim * arrays.k_pages.dtype.itemsize
        print(f"{shape:>16} {seconds * 1e6:>10.1f} {kv_bytes / seconds / 1e9:>11.0f}", flush=True)


if __name__ == "__main__":
    main()
