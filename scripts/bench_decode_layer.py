"""Time a decode layer between attention and attention on a GPU: microseconds a call, TB/s of weights.

    python scripts/bench_decode_layer.py --rows 1,8,64 --sets chosen,xla

A program makes many calls that go round several layers' weights, so that the L2 cache serves none of them, and each
call gets the residual stream of the call before. It is launched a few times and many times in a row, each on the
results of the one before; the difference, divided by the difference in calls, leaves out what the host does.

The sets "streams", "products" and "layers" take the kernel apart. Streams only read the weights, with everything that
could cost bandwidth varied: how much lies side by side, how far ahead is read, how many thread blocks read. Products
also fetch x and multiply, but nobody waits for anybody. Layers do it all. A process compiles each set for each number
of rows, all at the same time; a lock file keeps them from measuring at the same time.
"""

import argparse
import fcntl
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.decode_layer_mosaic_gpu import decode_layer_mosaic_gpu
from jaxserve.kernels.decode_layer_plan import Cut, Join, TuningConfig, choose_config, longest_ring
from jaxserve.kernels.decode_layer_xla import decode_layer_xla
from jaxserve.kernels.grid_barrier import COUNTERS

SIZES = {"attended": 4096, "hidden": 4096, "ffn": 14336, "qkv": 6144}  # Llama-3-8B
LAYERS = 3
LAUNCHES = (2, 8)
EPS = 1e-5
BANDWIDTH = 3.09e12  # bytes a second that one H100 reads at
SETS = ("chosen", "xla", "streams", "products", "layers")
ONCE = ("streams",)  # sets for which the rows make no difference

# residual stream, attention's result, counters, weights -> residual stream, counters
Layer = Callable[[jax.Array, jax.Array, jax.Array, tuple[jax.Array, ...]], tuple[jax.Array, jax.Array]]


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
) -> tuple[jax.Array, jax.Array]:
    # Or else the same product of the same arguments would be computed once for several calls; and qkv not at all.
    x, attended = jax.lax.optimization_barrier((x, attended))
    x, qkv = decode_layer_xla(attended, x, *weights, eps=EPS)
    return jax.lax.optimization_barrier((x, qkv))[0], counters


def our_layer(config: TuningConfig) -> Layer:
    def layer(
        x: jax.Array, attended: jax.Array, counters: jax.Array, weights: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        x, _, counters = decode_layer_mosaic_gpu(attended, x, *weights, counters, eps=EPS, config=config)
        return x, counters

    return layer


def cuts(tiles: tuple[int, ...], blocks: tuple[int, ...], join: Join) -> tuple[Cut, ...]:
    return tuple(Cut(*cut, join) for cut in zip(tiles, blocks, strict=True))


# Every phase cut so that all blocks read the same rows of the weights at the same time; gate and up are not cut along k.
MARCHING = (2, 4, 2, 2), (128, 112, 128, 96)
MARCHING_256 = (4, 4, 4, 4), (128, 112, 128, 96)
MARCHING_512 = (8, 8, 8, 8), (128, 112, 128, 96)


def streams() -> dict[str, TuningConfig]:
    """Names say: columns side by side, shared memory of the ring, what else."""
    narrow = TuningConfig(stages=12, extent="weights")  # 16 KB a stage
    marching = TuningConfig(cuts(*MARCHING, "all"), stage_tiles=4, extent="weights")  # 32 KB a stage
    wide = replace(marching, cuts=cuts(*MARCHING_256, "all"))
    widest = replace(marching, cuts=cuts(*MARCHING_512, "all"), stage_tiles=8)  # 64 KB a stage
    scattered = (132,) * 4
    few = cuts((8,) * 4, (64, 56, 64, 48), "all")
    qkv_of_all = cuts(MARCHING[0], (128, 112, 128, 128), "all")
    return {
        "128 192K scattered (the first version)": narrow,
        "128  96K scattered": replace(narrow, stages=6),
        "128  64K scattered": replace(narrow, stages=4),
        "256  96K scattered": replace(wide, cuts=cuts((4,) * 4, scattered, "all"), stages=3),
        "512 192K scattered": replace(widest, cuts=cuts((8,) * 4, scattered, "all"), stages=3),
        "128  96K marching": replace(narrow, cuts=cuts((2,) * 4, MARCHING[1], "all"), stages=6),
        "128/256 192K marching": replace(marching, stages=6),
        "128/256 128K marching": replace(marching, stages=4),
        "128/256  96K marching": replace(marching, stages=3),
        "128/256  64K marching": replace(marching, stages=2),
        "128/256  96K marching, qkv over 128 blocks": replace(marching, cuts=qkv_of_all, stages=3),
        "128/256  96K marching, copies of 16 rows": replace(marching, stages=3, copy_rows=16),
        "256  96K marching": replace(wide, stages=3),
        "256 192K marching": replace(wide, stages=6),
        "256  96K marching, copies of 16 rows": replace(wide, stages=3, copy_rows=16),
        "512 128K marching": replace(widest, stages=2),
        "512 192K marching": replace(widest, stages=3),
        "512 192K marching, copies of 16 rows": replace(widest, stages=3, copy_rows=16),
        "512 192K marching, 48 to 64 blocks": replace(widest, cuts=few, stages=3),
    }


def layers(rows: int) -> dict[str, TuningConfig]:
    # With many rows one warpgroup has not the registers for 256 columns.
    x_stages, warpgroups = (8, 1) if rows <= 16 else (4, 2)
    marching = TuningConfig(
        cuts(*MARCHING, "last"), warpgroups, stage_tiles=4, x_stages=x_stages, multiplies_ahead=True
    )
    deep = longest_ring(rows, marching)
    shallow = replace(deep, stages=3)
    found = {
        "128 deepest scattered, all join (the first version)": longest_ring(rows, TuningConfig(x_stages=x_stages)),
        "128/256 deepest marching, last joins, ahead": deep,
        "128/256  96K marching, last joins, ahead": shallow,
        "128/256  96K marching, last joins": replace(shallow, multiplies_ahead=False),
        "128/256  96K marching, all join, ahead": replace(shallow, cuts=cuts(*MARCHING, "all")),
        "256  96K marching, last joins, ahead": replace(shallow, cuts=cuts(*MARCHING_256, "last")),
    }
    if rows <= 16:
        widest = replace(shallow, cuts=cuts(*MARCHING_512, "last"), stage_tiles=8, x_stages=4)
        found["512 deepest marching, last joins, ahead"] = longest_ring(rows, widest)
    return found


def contenders(kind: str, rows: int) -> dict[str, Layer]:
    if kind == "xla":
        return {"xla": xla_layer}
    if kind == "chosen":
        return {"chosen": our_layer(choose_config(rows))}
    configs = streams() if kind == "streams" else layers(rows)
    if kind == "products":
        configs = {name: replace(config, extent="products") for name, config in list(configs.items())[:3]}
    return {f"{kind}: {name}": our_layer(config) for name, config in configs.items()}


def compile_calls(layer: Layer, calls: int, x: jax.Array, weights: list[tuple[jax.Array, ...]]) -> jax.stages.Compiled:
    def run(x: jax.Array, attended: jax.Array, weights: list[tuple[jax.Array, ...]]) -> jax.Array:
        counters = jnp.zeros(COUNTERS, jnp.int32)
        for call in range(calls):
            x, counters = layer(x, attended, counters, weights[call % len(weights)])
        return x

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
        result = x
        for _ in range(launches):
            result = program(result, attended, weights)
        jax.block_until_ready(result)
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:]))


def measure(kinds: list[str], rows: int, calls: int, repetitions: int, lock_path: Path) -> None:
    """Prints a line for each contender as soon as it is measured; of all who have the lock, one measures at a time."""
    weights = [jax.jit(functools.partial(make_weights, sizes=SIZES))(jax.random.key(i)) for i in range(LAYERS)]
    weight_bytes = sum(array.nbytes for array in weights[0])
    x = jax.random.normal(jax.random.key(rows), (rows, SIZES["hidden"]), jnp.bfloat16)
    attended = jax.random.normal(jax.random.key(7), (rows, SIZES["attended"]), jnp.bfloat16)
    jax.block_until_ready((x, attended, weights))
    with ThreadPoolExecutor() as pool, lock_path.open("w") as lock:
        programs = {
            name: pool.submit(compile_calls, layer, calls, x, weights)
            for kind in kinds
            for name, layer in contenders(kind, rows).items()
        }
        failures = []
        for name, program in programs.items():
            if (failure := program.exception()) is not None:
                print(f"{rows:>4}  {name}: does not compile", flush=True)
                failures.append(failure)
                continue
            compiled = program.result()
            fcntl.flock(lock, fcntl.LOCK_EX)
            few, many = [median_seconds(compiled, x, attended, weights, launches, repetitions) for launches in LAUNCHES]
            fcntl.flock(lock, fcntl.LOCK_UN)
            seconds = (many - few) / (calls * (LAUNCHES[1] - LAUNCHES[0]))
            print(f"{rows:>4}  {name:<76} {seconds * 1e6:>7.1f} {weight_bytes / seconds / 1e12:>6.2f}", flush=True)
    if failures:
        raise failures[0]


def relay(command: list[str]) -> list[str]:
    """Runs a process, shows its lines as they come, and returns them."""
    # Each takes memory as it needs it: there are many on one GPU.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if process.returncode:
        lines.append(f"failed with {process.returncode}: {' '.join(command)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,64", help="comma-separated")
    parser.add_argument("--sets", default="chosen,xla", help=f"comma-separated, of {', '.join(SETS)}")
    parser.add_argument("--calls", type=int, default=12, help="calls in a program")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--lock", type=Path, help="measure in this process, whenever it has this lock")
    arguments = parser.parse_args()
    sets, all_rows = arguments.sets.split(","), [int(rows) for rows in arguments.rows.split(",")]
    if unknown := set(sets) - set(SETS):
        parser.error(f"--sets has {sorted(unknown)}, which are not among {SETS}")
    if arguments.lock is not None:
        for rows in all_rows:
            measure(sets, rows, arguments.calls, arguments.repetitions, arguments.lock)
        return
    common = ["--calls", str(arguments.calls), "--repetitions", str(arguments.repetitions)]
    runs = [(kind, rows) for kind in sets for rows in (all_rows[:1] if kind in ONCE else all_rows)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(runs)) as pool:
        common += ["--lock", str(Path(folder, "lock"))]
        commands = [[sys.executable, __file__, "--sets", kind, "--rows", str(rows), *common] for kind, rows in runs]
        lines = [line for lines in pool.map(relay, commands) for line in lines]
    attended, hidden, ffn, qkv = SIZES.values()
    weight_bytes = 2 * hidden * (attended + 3 * ffn + qkv)
    print(
        f"\n{weight_bytes / 1e6:.0f} MB of weights, {weight_bytes / BANDWIDTH * 1e6:.1f} us at {BANDWIDTH / 1e12} TB/s"
    )
    print(f"{'rows':>4}  {'what':<76} {'us':>7} {'TB/s':>6}", *lines, sep="\n")


if __name__ == "__main__":
    main()
