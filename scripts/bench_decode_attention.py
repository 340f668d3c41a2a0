"""Time paged decode attention on a GPU: microseconds a call and bandwidth over the KV bytes that it must read.

    python scripts/bench_decode_attention.py --shapes 1x8192,32x1024 --page-size 16 --cache-dtype bfloat16
    python scripts/bench_decode_attention.py --variants default,separate_join --variant-shapes 64x400

A program makes many calls that go round the layers of a cache, so that the L2 cache serves none of them. The time is the
device's, from the profiler: from the start of the first attention kernel to the end of the last, gaps included, over the
number of calls. The host's part (launching, updating launch graphs) is not in it; a decode loop hides that by launching
ahead. A variant is a configuration of the Hopper kernel; "xla" is the plain XLA program.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.bench.profile import traced_kernels
from jaxserve.kernels.decode_attention import decode_attention
from jaxserve.kernels.decode_attention_mosaic_gpu import decode_attention_mosaic_gpu
from jaxserve.kernels.decode_attention_plan import TuningConfig, choose_config

SHAPES = "1x1024,1x8192,8x330,8x1024,8x8192,16x8192,32x330,32x1024,64x330,64x1024,64x4096"
VARIANT_SHAPES = "1x400,8x400,16x400,64x400"
CALLS = 16
REPETITIONS = 5
CACHE_BYTES = 400_000_000  # several times an H100's L2

# What is changed of the configuration that the kernel chooses.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "separate_join": {"separate_join": True},
    "one_worker": {"workers_per_sm": 1, "stages": 3},
    "two_stages": {"stages": 2},
    "four_stages": {"stages": 4},
    "block_128": {"block_kv": 128, "stages": 2},
    "two_workers": {"workers_per_sm": 2, "stages": 2},
}


class Arrays(NamedTuple):
    q: jax.Array  # [calls, batch, q_heads, head_dim]: different queries, so that no call can be shared
    k_pages: jax.Array
    v_pages: jax.Array
    page_table: jax.Array
    kv_lens: jax.Array


class Task(NamedTuple):
    """One shape with one variant."""

    batch: int
    length: int
    variant: str


def make_arrays(task: Task, arguments: argparse.Namespace) -> Arrays:
    page_size, kv_heads, head_dim = arguments.page_size, arguments.kv_heads, arguments.head_dim
    dtype = jnp.dtype(arguments.cache_dtype)
    pages_per_row = -(-task.length // page_size)
    pages = task.batch * pages_per_row
    layer_bytes = 2 * pages * page_size * kv_heads * head_dim * dtype.itemsize
    layers = max(2, min(CALLS, -(-CACHE_BYTES // layer_bytes)))
    shape = (layers, pages, page_size, kv_heads, head_dim)
    q_shape = (CALLS, task.batch, arguments.q_heads, head_dim)
    return Arrays(
        q=jax.random.normal(jax.random.key(0), q_shape, jnp.bfloat16),
        k_pages=jax.random.normal(jax.random.key(1), shape, jnp.bfloat16).astype(dtype),
        v_pages=jax.random.normal(jax.random.key(2), shape, jnp.bfloat16).astype(dtype),
        page_table=jax.random.permutation(jax.random.key(3), pages).astype(jnp.int32).reshape(-1, pages_per_row),
        kv_lens=jnp.full((task.batch,), task.length, jnp.int32),
    )


def choose_attention(variant: str, rows: int, arguments: argparse.Namespace) -> Callable[..., jax.Array]:
    if variant == "xla":
        return functools.partial(decode_attention, implementation="xla")
    itemsize = jnp.dtype(arguments.cache_dtype).itemsize
    config: TuningConfig = choose_config(arguments.head_dim, arguments.q_heads // arguments.kv_heads, itemsize, rows)
    return functools.partial(decode_attention_mosaic_gpu, config=replace(config, **VARIANTS[variant]))


def compile_program(task: Task, arguments: argparse.Namespace) -> Any:
    """A program of CALLS calls, compiled."""
    shapes = jax.eval_shape(lambda: make_arrays(task, arguments))
    layers, scale = shapes.k_pages.shape[0], arguments.head_dim**-0.5
    attend = choose_attention(task.variant, task.batch, arguments)

    def run(queries: list[jax.Array], arrays: Arrays) -> list[jax.Array]:
        return [
            attend(
                q, arrays.k_pages, arrays.v_pages, jnp.int32(i % layers), arrays.page_table, arrays.kv_lens, scale=scale
            )
            for i, q in enumerate(queries)
        ]

    queries = [jax.ShapeDtypeStruct(shapes.q.shape[1:], shapes.q.dtype)] * CALLS
    return jax.jit(run).lower(queries, shapes).compile()


def time_call(program: Any, arrays: Arrays) -> float:
    """Seconds of device time a call, the best of several runs of the program."""
    queries = list(arrays.q)

    def run() -> None:
        for _ in range(REPETITIONS):
            jax.block_until_ready(program(queries, arrays))

    run()
    kernels = traced_kernels(run)
    kernels = [kernel for kernel in kernels if "decode_attention" in kernel.name] or kernels
    if not kernels or len(kernels) % REPETITIONS:
        raise RuntimeError(
            f"the profiler saw {len(kernels)} kernels of {REPETITIONS} runs on {jax.devices()[0].device_kind}"
        )
    kernels.sort(key=lambda kernel: kernel.start)
    each = len(kernels) // REPETITIONS
    runs = [kernels[first : first + each] for first in range(0, len(kernels), each)]
    return min(run[-1].start + run[-1].duration - run[0].start for run in runs) / CALLS


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", default=SHAPES, help="comma-separated BATCHxLENGTH, timed with the first two variants"
    )
    parser.add_argument("--variant-shapes", default=VARIANT_SHAPES, help="BATCHxLENGTH, timed with all variants")
    parser.add_argument(
        "--variants", default=",".join(VARIANTS), help=f"comma-separated, of {', '.join(VARIANTS)}, xla"
    )
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--cache-dtype", default="bfloat16", help="bfloat16 or float8_e4m3fn")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    variants = arguments.variants.split(",")
    groups = ((arguments.shapes, variants[:2]), (arguments.variant_shapes, variants))
    tasks = [
        Task(int(shape.split("x")[0]), int(shape.split("x")[1]), variant)
        for shapes, chosen in groups
        for shape in filter(None, shapes.split(","))
        for variant in chosen
    ]
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {vars(arguments)}")
    width = 2 * arguments.kv_heads * arguments.head_dim * jnp.dtype(arguments.cache_dtype).itemsize
    failed = 0
    with ThreadPoolExecutor() as pool:
        programs = {task: pool.submit(compile_program, task, arguments) for task in tasks}
        for task in tasks:  # each is told at once: a run that is cut off has told what it had
            arrays = jax.jit(lambda task=task: make_arrays(task, arguments))()
            try:
                seconds = time_call(programs[task].result(), arrays)
            except Exception as error:  # a variant that does not fit must not cost the others' results
                failed += 1
                print(f"{task}: {error}", file=sys.stderr)
                continue
            speed = task.batch * task.length * width / seconds / 1e9
            print(
                f"{f'{task.batch}x{task.length}':>10} {task.variant:>14} {seconds * 1e6:8.1f} us a call {speed:6.0f} GB/s",
                flush=True,
            )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
