#!/usr/bin/env python3
"""Time prefill attention on this GPU, kernel time alone (read from the profiler), and print a table.

    scripts/bench_prefill_attention.py                       # the default shapes, the default block sizes
    scripts/bench_prefill_attention.py --config 2,128,2 --config 1,64,4 --tokens 512
    scripts/bench_prefill_attention.py --check               # compare with the plain-XLA implementation first

TFLOP/s count the causal half only: 4 x (query, position) pairs x query heads x head_dim.
"""

import argparse
import dataclasses
import datetime
import functools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.prefill_attention_mosaic_gpu import TuningConfig, default_config, prefill_attention_mosaic_gpu
from jaxserve.kernels.prefill_attention_xla import prefill_attention_xla

CALLS = 20


@dataclasses.dataclass(frozen=True)
class Workload:
    """`chunks` are (context length, new tokens) of each row."""

    name: str
    chunks: tuple[tuple[int, int], ...]
    tokens: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    kv_dtype: str = "bfloat16"

    @property
    def flops(self) -> float:
        pairs = sum(new * context + new * (new + 1) / 2 for context, new in self.chunks)
        return 4.0 * pairs * self.q_heads * self.head_dim


def one_row(tokens: int, context: int = 0, **shape: Any) -> Workload:
    return Workload(f"{tokens} after {context}" if context else f"{tokens}", ((context, tokens),), tokens, **shape)


DEFAULT_WORKLOADS = (
    *(one_row(tokens) for tokens in (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)),
    Workload("8 rows of 229 in 2048", ((0, 229),) * 8, 2048),
    Workload("12 rows of 5 to 280 in 2048", tuple((0, 5 + 25 * i) for i in range(12)), 2048),
    one_row(512, context=7680),
    one_row(64, context=8128),
    # As in an engine's step: 16 rows are compiled, and most of them empty.
    Workload("128 after 15872, of 16 rows", ((15872, 128), *((0, 0),) * 15), 128),
    Workload("72 after 15928 and 56, of 16 rows", ((15928, 72), (0, 56), *((0, 0),) * 14), 128),
    one_row(4096, head_dim=64),
    one_row(4096, head_dim=96),
    one_row(4096, head_dim=256, q_heads=16),
    one_row(4096, q_heads=24),
    one_row(4096, q_heads=8),
    one_row(4096, page_size=64),
    one_row(4096, kv_dtype="float8_e4m3fn"),
    one_row(256, kv_dtype="float8_e4m3fn"),
)


def make_arguments(workload: Workload, layers: int = 4) -> tuple[jax.Array, ...]:
    """Random queries and cache, pages scattered; several layers so that repeated calls don't read from L2 alone."""
    random = np.random.default_rng(0)
    rows = len(workload.chunks)
    kv_lens = np.array([context + new for context, new in workload.chunks], np.int32)
    used = -(-kv_lens // workload.page_size)
    pages = int(used.sum()) + 1
    page_table = np.zeros((rows, int(used.max())), np.int32)
    ids = iter(random.permutation(pages))
    for row in range(rows):
        page_table[row, : used[row]] = [next(ids) for _ in range(used[row])]
    query_starts = np.cumsum([0, *(new for _, new in workload.chunks)]).astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    cache = (layers, pages, workload.page_size, workload.kv_heads, workload.head_dim)
    return (
        jax.random.normal(keys[0], (workload.tokens, workload.q_heads, workload.head_dim), jnp.bfloat16),
        jax.random.normal(keys[1], cache, jnp.bfloat16).astype(workload.kv_dtype),
        jax.random.normal(keys[2], cache, jnp.bfloat16).astype(workload.kv_dtype),
        jnp.asarray(page_table),
        jnp.asarray(query_starts),
        jnp.asarray(kv_lens),
    )


def kernel_microseconds(call: Callable[[int], jax.Array]) -> float:
    """Median time on the GPU of the kernels of one call."""
    call(0).block_until_ready()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for i in range(CALLS):
                call(i).block_until_ready()
        profile = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    durations: dict[str, list[float]] = {}
    for plane in profile.planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                if not event.name.startswith("Memcpy"):
                    durations.setdefault(event.name, []).append(event.duration_ns / 1e3)
    if not durations:
        raise RuntimeError(f"the profiler saw no kernel; planes: {[plane.name for plane in profile.planes]}")
    return sum(statistics.median(times) * round(len(times) / CALLS) for times in durations.values())


def measure(workload: Workload, config: TuningConfig | None, check: bool) -> str:
    q, k_pages, v_pages, page_table, query_starts, kv_lens = make_arguments(workload)
    scale = workload.head_dim**-0.5
    kernel = jax.jit(functools.partial(prefill_attention_mosaic_gpu, scale=scale, config=config))
    layers = [jnp.int32(i) for i in range(k_pages.shape[0])]

    def call(i: int) -> jax.Array:
        return kernel(q, k_pages, v_pages, layers[i % len(layers)], page_table, query_starts, kv_lens)

    microseconds = kernel_microseconds(call)
    teraflops = workload.flops / microseconds / 1e6
    error = ""
    if check:
        reference = jax.jit(functools.partial(prefill_attention_xla, scale=scale))
        expected = reference(q, k_pages, v_pages, layers[1], page_table, query_starts, kv_lens).astype(jnp.float32)
        difference = jnp.linalg.norm(call(1).astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
        error = f" | {float(difference):.1e}"
    used = config or default_config(q, k_pages.dtype, page_table.shape[1] * workload.page_size)
    shape = f"{workload.q_heads}/{workload.kv_heads} x {workload.head_dim}"
    cache = f"{workload.kv_dtype} x {workload.page_size}"
    blocks = f"{used.compute_warpgroups},{used.kv_block},{used.stages}" + (",1" if used.cuts_kv else "")
    return f"| {workload.name} | {shape} | {cache} | {blocks} | {microseconds:.1f} | {teraflops:.0f}{error} |"


def parse_config(text: str) -> TuningConfig:
    compute_warpgroups, kv_block, stages, *cuts_kv = map(int, text.split(","))
    return TuningConfig(compute_warpgroups, kv_block, stages, cuts_kv=any(cuts_kv))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, action="append", help="one row of this many tokens; may be repeated")
    parser.add_argument("--context", type=int, default=0, help="tokens already in the cache, with --tokens")
    parser.add_argument(
        "--config",
        action="append",
        help="compute warpgroups,KV block,stages, and 1 where KV is cut; may be repeated (default: the kernel's)",
    )
    parser.add_argument("--check", action="store_true", help="compare with the plain-XLA implementation")
    arguments = parser.parse_args()
    workloads = DEFAULT_WORKLOADS
    if arguments.tokens:
        workloads = tuple(one_row(tokens, arguments.context) for tokens in arguments.tokens)
    configs = [parse_config(text) for text in arguments.config or ()] or [None]
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {datetime.date.today()}")
    print(
        "| tokens | heads x head_dim | cache x page | blocks | us | TFLOP/s |" + (" error |" if arguments.check else "")
    )
    print("|---|---|---|---|---|---|" + ("---|" if arguments.check else ""))
    for workload in workloads:
        for config in configs:
            print(measure(workload, config, arguments.check), flush=True)


if __name__ == "__main__":
    main()
