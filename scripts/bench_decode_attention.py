"""Time paged decode attention on a GPU: microseconds a call and bandwidth over the KV bytes that it must read.

    python scripts/bench_decode_attention.py --shapes 1x8192,32x1024 --page-size 16 --cache-dtype bfloat16

A program makes many calls that go round the layers of a cache, so that the L2 cache serves none of them. The time is the
device's, from the profiler: from the start of the first attention kernel to the end of the last, gaps included, over the
number of calls. The host's part (launching, updating launch graphs) is not in it; a decode loop hides that by launching
ahead.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.decode_attention import decode_attention

SHAPES = "1x1024,1x8192,8x330,8x1024,8x8192,16x8192,32x330,32x1024,64x330,64x1024,64x4096"
CALLS = 16
REPETITIONS = 5
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
    layers = max(2, min(CALLS, -(-CACHE_BYTES // layer_bytes)))
    shape = (layers, pages, page_size, kv_heads, head_dim)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16).astype(dtype))
    table = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(batch, pages_per_row)
    q_shape = (CALLS, batch, arguments.q_heads, head_dim)
    return Arrays(
        q=jax.random.normal(jax.random.key(0), q_shape, jnp.bfloat16),
        k_pages=make(jax.random.key(1)),
        v_pages=make(jax.random.key(2)),
        page_table=jnp.asarray(table),
        kv_lens=jnp.full((batch,), length, jnp.int32),
    )


def time_call(arrays: Arrays, implementation: Any) -> float:
    """Seconds of device time a call, the best of several runs of one program."""
    layers = arrays.k_pages.shape[0]
    scale = arrays.q.shape[-1] ** -0.5

    def run(queries: list[jax.Array], arrays: Arrays) -> list[jax.Array]:
        return [
            decode_attention(
                q, arrays.k_pages, arrays.v_pages, i % layers, arrays.page_table, arrays.kv_lens,
                scale=scale, implementation=implementation,
            )
            for i, q in enumerate(queries)
        ]  # fmt: skip

    queries = list(arrays.q)
    program = jax.jit(run).lower(queries, arrays).compile()
    for _ in range(2):
        jax.block_until_ready(program(queries, arrays))
    return min(device_seconds(lambda: program(queries, arrays)) for _ in range(REPETITIONS)) / CALLS


def device_seconds(call: Any) -> float:
    """From the start of the first to the end of the last attention kernel; of all kernels where none is named so."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        [trace] = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(trace))
    kernels = [
        (event.name, event.start_ns, event.start_ns + event.duration_ns)
        for plane in profile.planes
        if "GPU" in plane.name
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    kernels = [kernel for kernel in kernels if "decode_attention" in kernel[0]] or kernels
    if not kernels:
        raise RuntimeError(f"the profiler saw no kernel on {jax.devices()[0].device_kind}; this needs a GPU")
    return (max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)) * 1e-9


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
        seconds = time_call(arrays, arguments.implementation)
        kv_bytes = 2 * batch * length * arguments.kv_heads * arguments.head_dim * arrays.k_pages.dtype.itemsize
        print(f"{shape:>16} {seconds * 1e6:>10.1f} {kv_bytes / seconds / 1e9:>11.0f}", flush=True)


if __name__ == "__main__":
    main()
