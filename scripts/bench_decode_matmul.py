"""Time the products of a decode step on a GPU against XLA's: microseconds a call, bandwidth over the weights' bytes.

    python scripts/bench_decode_matmul.py --shapes qkv,down --rows 1,64 --candidates

A program makes many calls that go round several weight matrices, so that the L2 cache serves none of them, and each
call's result decides the next one's x, so that the calls run one after the other as in a model. Two programs of
different length are timed; their difference, divided by the difference in calls, leaves out what a program costs once.
"""

import argparse
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.decode_matmul import decode_matmul, decode_matmul_swiglu
from jaxserve.kernels.decode_matmul_mosaic_gpu import TuningConfig, choose_config, decode_matmul_mosaic_gpu

SHAPES = {  # k, columns, whether gate and up, whether a residual is added: Llama-3-8B
    "qkv": (4096, 6144, False, False),
    "o": (4096, 4096, False, True),
    "gate_up": (4096, 14336, True, False),
    "down": (14336, 4096, False, True),
    "head": (4096, 128256, False, False),
}
CALLS = (8, 40)
REPETITIONS = 7
WEIGHT_BYTES = 400_000_000  # several times an H100's L2

Multiply = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]


def compile_calls(
    multiply: Multiply, x: jax.Array, weights: list[jax.Array], residual: jax.Array | None
) -> list[jax.stages.Compiled]:
    """One program for each of CALLS."""

    def run(calls: int, x: jax.Array, weights: list[jax.Array], residual: jax.Array | None) -> jax.Array:
        for i in range(calls):
            out = multiply(x, weights[i % len(weights)], residual)
            # One kernel of the size of x between two products, as there is in a model (a norm, a rotation).
            x = x + out[:, :1].astype(x.dtype) * jnp.asarray(1e-3, x.dtype)
        return x

    return [jax.jit(functools.partial(run, calls)).lower(x, weights, residual).compile() for calls in CALLS]


def time_call(
    programs: list[jax.stages.Compiled], x: jax.Array, weights: list[jax.Array], residual: jax.Array | None
) -> float:
    """Median seconds of one call."""
    medians = []
    for program in programs:
        times = []
        for _ in range(REPETITIONS + 2):
            start = time.perf_counter()
            jax.block_until_ready(program(x, weights, residual))
            times.append(time.perf_counter() - start)
        medians.append(float(np.median(times[2:])))
    return (medians[1] - medians[0]) / (CALLS[1] - CALLS[0])


def multiply_with(config: TuningConfig, *, is_swiglu: bool, out_dtype: jnp.dtype) -> Multiply:
    def multiply(x: jax.Array, w: jax.Array, residual: jax.Array | None) -> jax.Array:
        return decode_matmul_mosaic_gpu(
            x,
            w if is_swiglu else w[:, None, :],
            residual,
            is_swiglu=is_swiglu,
            out_dtype=out_dtype,
            prefetch_weights=True,
            config=config,
        )

    return multiply


def xla_multiply(*, is_swiglu: bool, out_dtype: jnp.dtype) -> Multiply:
    def multiply(x: jax.Array, w: jax.Array, residual: jax.Array | None) -> jax.Array:
        if is_swiglu:
            return decode_matmul_swiglu(x, w, implementation="xla")
        return decode_matmul(x, w, residual=residual, out_dtype=out_dtype, implementation="xla")

    return multiply


def candidates(chosen: TuningConfig, k: int, rows: int) -> list[TuningConfig]:
    padded_rows = -(-rows // 8) * 8
    stages = {chosen.stages, *(budget * 1024 // (128 * (128 + padded_rows)) for budget in (64, 104, 208))}
    splits = [split for split in (1, 2, 4) if k % (64 * split) == 0]
    others = [TuningConfig(split, count) for split in splits for count in sorted(stages) if count >= 2]
    return [chosen, *(config for config in others if config != chosen)]


def bench(name: str, rows: int, arguments: argparse.Namespace) -> None:
    k, columns, is_swiglu, has_residual = SHAPES[name]
    out_dtype = jnp.dtype(jnp.float32 if name == "head" else jnp.bfloat16)
    shape = (k, 2, columns) if is_swiglu else (k, columns)
    weight_bytes = 2 * int(np.prod(shape))
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(k**-0.5))
    weights = [make(jax.random.key(i)) for i in range(max(2, -(-WEIGHT_BYTES // weight_bytes)))]
    x = jax.random.normal(jax.random.key(100), (rows, k), jnp.bfloat16)
    residual = jax.random.normal(jax.random.key(101), (rows, columns), jnp.bfloat16) if has_residual else None
    chosen = choose_config(rows, k, columns, is_swiglu=is_swiglu)
    contenders: dict[str, Multiply] = {"xla": xla_multiply(is_swiglu=is_swiglu, out_dtype=out_dtype)}
    for config in candidates(chosen, k, rows) if arguments.candidates else [chosen]:
        label = f"split {config.split}, stages {config.stages}" + (" (chosen)" if config == chosen else "")
        contenders[label] = multiply_with(config, is_swiglu=is_swiglu, out_dtype=out_dtype)
    with ThreadPoolExecutor() as pool:
        compiling = {
            label: pool.submit(compile_calls, multiply, x, weights, residual) for label, multiply in contenders.items()
        }
        programs = {label: future.result() for label, future in compiling.items()}
    for label, compiled in programs.items():
        seconds = time_call(compiled, x, weights, residual)
        print(
            f"{name:>8} {rows:>4} {label:>28} {seconds * 1e6:>8.1f} {weight_bytes / seconds / 1e12:>6.2f}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qkv,o,gate_up,down", help=f"comma-separated, of {', '.join(SHAPES)}")
    parser.add_argument("--rows", default="1,8,16,64", help="comma-separated")
    parser.add_argument("--candidates", action="store_true", help="other tunings beside the chosen one")
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {vars(arguments)}")
    print("us a call include the small kernel between two products")
    print(f"{'shape':>8} {'rows':>4} {'implementation':>28} {'us':>8} {'TB/s':>6}")
    for name in arguments.shapes.split(","):
        for rows in map(int, arguments.rows.split(",")):
            bench(name, rows, arguments)


if __name__ == "__main__":
    main()
