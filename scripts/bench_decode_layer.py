"""Time a decode layer between attention and attention on a GPU against XLA's: microseconds a call, TB/s of weights.

    python scripts/bench_decode_layer.py --rows 1,8,64 --variants

A program makes many calls that go round several layers' weights, so that the L2 cache serves none of them, and each
call's results are the next one's arguments. It is launched a few times and many times in a row, each on the results of
the one before; the difference, divided by the difference in calls, leaves out what the host does. All programs are
compiled first, in parallel.
"""

import argparse
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.decode_layer_mosaic_gpu import decode_layer_mosaic_gpu
from jaxserve.kernels.decode_layer_plan import TuningConfig, choose_config
from jaxserve.kernels.decode_layer_xla import decode_layer_xla
from jaxserve.kernels.grid_barrier import COUNTERS

SIZES = {"attended": 4096, "hidden": 4096, "ffn": 14336, "qkv": 6144}  # Llama-3-8B
LAYERS = 3
LAUNCHES = (2, 8)
EPS = 1e-5
BANDWIDTH = 3.09e12  # bytes a second that one H100 reads at

# residual stream, attention's result, counters -> the same of the next layer
Layer = Callable[[jax.Array, jax.Array, jax.Array, tuple[jax.Array, ...]], tuple[jax.Array, jax.Array, jax.Array]]


def make_weights(key: jax.Array, sizes: dict[str, int]) -> tuple[jax.Array, ...]:
    attended, hidden, ffn, qkv = sizes.values()
    keys = jax.random.split(key, 4)

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[0] ** -0.5)

    ones = jnp.ones(hidden, jnp.bfloat16)
    return (
        normal(keys[0], attended, hidden),
        ones,
        normal(keys[1], hidden, 2, ffn),
        normal(keys[2], ffn, hidden),
        ones,
        normal(keys[3], hidden, qkv),
    )


def xla_layer(
    x: jax.Array, attended: jax.Array, counters: jax.Array, weights: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, qkv = decode_layer_xla(attended, x, *weights, eps=EPS)
    assert qkv is not None
    return x, qkv[:, : attended.shape[1]], counters


def our_layer(config: TuningConfig, keeps_counters: bool) -> Layer:
    def layer(
        x: jax.Array, attended: jax.Array, counters: jax.Array, weights: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        given = counters if keeps_counters else None
        x, qkv, given = decode_layer_mosaic_gpu(attended, x, *weights, given, eps=EPS, config=config)
        assert qkv is not None
        return x, qkv[:, : attended.shape[1]], given if keeps_counters else counters

    return layer


def contenders(rows: int, all_variants: bool) -> dict[str, Layer]:
    chosen = choose_config(rows)
    found: dict[str, Layer] = {"xla": xla_layer, "chosen": our_layer(chosen, True)}
    if not all_variants:
        return found
    variants = {
        "no weights ahead of the kernel": replace(chosen, prefetch_weights=False),
        "half the ring": replace(chosen, stages=chosen.stages // 2),
        "two more stages of x, two fewer of weights": replace(
            chosen, stages=chosen.stages - 2, x_stages=chosen.x_stages + 2
        ),
        "two compute warpgroups": replace(chosen, compute_warpgroups=2, stages=chosen.stages // 2),
        "64 blocks": replace(chosen, blocks=64),
    }
    found |= {name: our_layer(config, True) for name, config in variants.items()}
    return found | {"counters filled each call": our_layer(chosen, False)}


def compile_calls(layer: Layer, calls: int, x: jax.Array, weights: list[tuple[jax.Array, ...]]) -> jax.stages.Compiled:
    def run(x: jax.Array, attended: jax.Array, weights: list[tuple[jax.Array, ...]]) -> tuple[jax.Array, jax.Array]:
        counters = jnp.zeros(COUNTERS, jnp.int32)
        for call in range(calls):
            x, attended, counters = layer(x, attended, counters, weights[call % len(weights)])
        return x, attended

    attended = jnp.zeros((x.shape[0], weights[0][0].shape[0]), x.dtype)
    return jax.jit(run).lower(x, attended, weights).compile()


def median_seconds(
    program: jax.stages.Compiled,
    x: jax.Array,
    attended: jax.Array,
    weights: list[tuple[jax.Array, ...]],
    launches: int,
    repetitions: int,
) -> float:
    times = []
    for _ in range(repetitions + 2):
        start = time.perf_counter()
        results = x, attended
        for _ in range(launches):
            results = program(*results, weights)
        jax.block_until_ready(results)
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,64", help="comma-separated")
    parser.add_argument("--variants", action="store_true", help="other tunings beside the chosen one")
    parser.add_argument("--calls", type=int, default=12, help="calls in a program")
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    weights = [jax.jit(functools.partial(make_weights, sizes=SIZES))(jax.random.key(i)) for i in range(LAYERS)]
    weight_bytes = sum(array.nbytes for array in weights[0])
    programs, xs = {}, {}
    with ThreadPoolExecutor() as pool:
        for rows in map(int, arguments.rows.split(",")):
            xs[rows] = jax.random.normal(jax.random.key(rows), (rows, SIZES["hidden"]), jnp.bfloat16)
            for name, layer in contenders(rows, arguments.variants).items():
                programs[rows, name] = pool.submit(compile_calls, layer, arguments.calls, xs[rows], weights)
    lines = []
    for (rows, name), program in programs.items():
        attended = jax.random.normal(jax.random.key(7), (rows, SIZES["attended"]), jnp.bfloat16)
        few, many = [
            median_seconds(program.result(), xs[rows], attended, weights, launches, arguments.repetitions)
            for launches in LAUNCHES
        ]
        seconds = (many - few) / (arguments.calls * (LAUNCHES[1] - LAUNCHES[0]))
        lines.append(f"{rows:>4}  {name:<44} {seconds * 1e6:>7.1f} {weight_bytes / seconds / 1e12:>6.2f}")
        print(lines[-1], flush=True)
    print(f"\n{jax.devices()[0].device_kind}, jax {jax.__version__}, {weight_bytes / 1e6:.0f} MB of weights a call, "
          f"{weight_bytes / BANDWIDTH * 1e6:.1f} us at {BANDWIDTH / 1e12} TB/s")  # fmt: skip
    print(f"{'rows':>4}  {'implementation':<44} {'us':>7} {'TB/s':>6}", *lines, sep="\n")


if __name__ == "__main__":
    main()
