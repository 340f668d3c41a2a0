"""Time products with quantized weights on a GPU, every format and form, beside bfloat16: bandwidth over the weights' bytes.

    python scripts/bench_quantized_matmul.py --model llama-3-8b --shapes qkv,down --rows 1,64 --forms bf16,fp8,int8
    python scripts/bench_quantized_matmul.py --forms fp8,fp8-kernel,fp8-kernel@2x6x2,int4-kernel@4x8x1x2
    python scripts/bench_quantized_matmul.py --model llama-3-8b --cases qkv/1/int8-kernel@1x16x1x1x4,down/64/int8

Forms that end in "-kernel" are the Hopper kernel; "@SPLITxSTAGES[xUNITS[xTILES[xTURNS[xROW_BYTES[xCLUSTERED]]]]]", with 0
or 1 for the last, gives it another tuning than its own.

A program makes many calls that go round several weights, so that the L2 cache serves none of them, and each call's result
decides the next one's x, so that the calls run one after the other as in a model. Times are those of the kernels, from the
profiler; gaps between kernels, which the host may make here and not in a model, are not counted. The last column tells what
XLA made of the product: "f8" stands for cuBLASLt's 8-bit product, "lt" for its others, "cublas" and "triton" for those,
"mosaic" for the Hopper kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.bench.profile import traced_kernels
from jaxserve.kernels.int4 import unpack_int4
from jaxserve.kernels.quantized_matmul import quantized_matmul
from jaxserve.kernels.quantized_matmul_mosaic_gpu import quantized_matmul_mosaic_gpu
from jaxserve.kernels.quantized_matmul_plan import TuningConfig
from jaxserve.kernels.quantized_matmul_xla import quantize_rows

SHAPES = {  # k, columns
    "llama-3-8b": {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)},
    "llama-3-70b/4": {"qkv": (8192, 2560), "o": (2048, 8192), "gate_up": (8192, 14336), "down": (7168, 8192)},
    "tiny": {"qkv": (256, 384)},  # to see that the script runs
}
CALLS = 8
REPETITIONS = 3
WEIGHT_BYTES = 400_000_000  # several times an H100's L2
FLOAT8 = jnp.float8_e4m3fn

Weights = dict[str, jax.Array]
Multiply = Callable[[jax.Array, Weights], jax.Array]


def dot(x: jax.Array, w: jax.Array, w_axis: int) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (w_axis,)), ((), ())), preferred_element_type=jnp.float32)


def bf16(x: jax.Array, w: Weights) -> jax.Array:
    return dot(x, w["values"], 0).astype(x.dtype)


def bf16_outputs_first(x: jax.Array, w: Weights) -> jax.Array:
    return dot(x, w["values"], 1).astype(x.dtype)


def op(x: jax.Array, w: Weights) -> jax.Array:
    return quantized_matmul(x, w["values"], w["scales"])


def fp8_op(x: jax.Array, w: Weights) -> jax.Array:
    return quantized_matmul(x, w["values"], w["scales"], quantize_activations=True)


def kernel(
    x: jax.Array, w: Weights, quantize_activations: bool = False, config: TuningConfig | None = None
) -> jax.Array:
    values, scales = w["values"], w["scales"]
    if config is None:
        return quantized_matmul(
            x, values, scales, quantize_activations=quantize_activations, implementation="mosaic_gpu"
        )
    return quantized_matmul_mosaic_gpu(
        x,
        values[None],
        scales[:, None] if values.dtype == jnp.uint8 else scales[None],
        quantize_activations=quantize_activations,
        is_swiglu=False,
        out_dtype=x.dtype,
        config=config,
    )


fp8_kernel = functools.partial(kernel, quantize_activations=True)


def fp8_unpadded(x: jax.Array, w: Weights) -> jax.Array:
    """Float8 operands, rows as they are."""
    rows, factors = quantize_rows(x, None)
    return (dot(rows, w["values"], 1) * factors * w["scales"][None]).astype(x.dtype)


def fp8_scaled_pattern(x: jax.Array, w: Weights) -> jax.Array:
    """Both operands widened and multiplied with one factor, which XLA's rewriter looks for."""
    rows, factors = quantize_rows(jnp.pad(x, ((0, -x.shape[0] % 16), (0, 0))), None)
    one = jnp.bfloat16(1)
    wide = dot(rows.astype(jnp.bfloat16) * one, w["values"].astype(jnp.bfloat16) * w["one"].astype(jnp.bfloat16), 1)
    return (wide * factors * w["scales"][None])[: x.shape[0]].astype(x.dtype)


def fp8_bf16_result(x: jax.Array, w: Weights) -> jax.Array:
    """As the op, but the product itself is rounded to bfloat16."""
    rows, factors = quantize_rows(jnp.pad(x, ((0, -x.shape[0] % 16), (0, 0))), None)
    product = lax.dot_general(rows, w["values"], (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)
    return (product.astype(jnp.float32) * factors * w["scales"][None])[: x.shape[0]].astype(x.dtype)


def fp8_precise(x: jax.Array, w: Weights) -> jax.Array:
    """As the op, but without cuBLASLt's fast accumulation, which keeps whole sums in 14 bits."""
    rows, factors = quantize_rows(jnp.pad(x, ((0, -x.shape[0] % 16), (0, 0))), None)
    contracted = (((1,), (1,)), ((), ()))
    product = lax.dot_general(
        rows, w["values"], contracted, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return (product * factors * w["scales"][None])[: x.shape[0]].astype(x.dtype)


def fp8_inputs_first(x: jax.Array, w: Weights) -> jax.Array:
    """Weights [k, n], which cuBLASLt does not take as they lie."""
    rows, factors = quantize_rows(jnp.pad(x, ((0, -x.shape[0] % 16), (0, 0))), None)
    return (dot(rows, w["values"], 0) * factors * w["scales"][None])[: x.shape[0]].astype(x.dtype)


def cast_inputs_first(x: jax.Array, w: Weights) -> jax.Array:
    """Weights [k, n], widened in the product."""
    return (dot(x, w["values"].astype(x.dtype), 0) * w["scales"][None]).astype(x.dtype)


def int4_by_groups(x: jax.Array, w: Weights) -> jax.Array:
    """One product for each group, scaled and summed after."""
    groups = w["scales"].shape[0]
    n = w["values"].shape[0]
    numbers = unpack_int4(w["values"], x.shape[1] // groups).astype(x.dtype).reshape(n, groups, -1)
    grouped = x.reshape(x.shape[0], groups, -1)
    products = jnp.einsum("rgk,ngk->grn", grouped, numbers, preferred_element_type=jnp.float32)
    return jnp.sum(products * w["scales"][:, None].astype(jnp.float32), axis=0).astype(x.dtype)


def int4_as_xla_has_it(x: jax.Array, w: Weights) -> jax.Array:
    """The bytes taken for XLA's own 4-bit type, and x put into the order in which these have the numbers."""
    interleaved = x.reshape(x.shape[0], -1, 4, 4, 2).transpose(0, 1, 3, 4, 2).reshape(x.shape)
    groups, n = w["scales"].shape
    numbers = lax.bitcast_convert_type(w["values"], jnp.int4).reshape(n, groups, -1).astype(x.dtype)
    dense = (numbers * w["scales"].T[:, :, None].astype(x.dtype)).reshape(n, -1)
    return dot(interleaved, dense, 1).astype(x.dtype)


FORMS: dict[str, tuple[Multiply, str, bool]] = {  # product, kind of weight, whether its outputs are in front
    "bf16": (bf16, "bf16", False),
    "bf16-outputs-first": (bf16_outputs_first, "bf16", True),
    "fp8": (fp8_op, "fp8", True),
    "fp8-kernel": (fp8_kernel, "fp8", True),
    "fp8-weight-only-kernel": (kernel, "fp8", True),
    "int8-kernel": (kernel, "int8", True),
    "int4-kernel": (kernel, "int4", True),
    "int4-32-kernel": (kernel, "int4-32", True),
    "fp8-unpadded": (fp8_unpadded, "fp8", True),
    "fp8-scaled-pattern": (fp8_scaled_pattern, "fp8", True),
    "fp8-bf16-result": (fp8_bf16_result, "fp8", True),
    "fp8-precise": (fp8_precise, "fp8", True),
    "fp8-inputs-first": (fp8_inputs_first, "fp8", False),
    "fp8-weight-only": (op, "fp8", True),
    "fp8-weight-only-inputs-first": (cast_inputs_first, "fp8", False),
    "int8": (op, "int8", True),
    "int8-inputs-first": (cast_inputs_first, "int8", False),
    "int4": (op, "int4", True),
    "int4-32": (op, "int4-32", True),
    "int4-by-groups": (int4_by_groups, "int4", True),
    "int4-as-xla-has-it": (int4_as_xla_has_it, "int4", True),
}


def form_called(name: str) -> tuple[Multiply, str, bool]:
    """The entry of `FORMS`, with the tuning that the name may bring along."""
    plain, at, tuning = name.partition("@")
    multiply, kind, outputs_first = FORMS[plain]
    if not at:
        return multiply, kind, outputs_first
    if not plain.endswith("-kernel"):
        raise SystemExit(f"error: only kernels can be tuned, not {plain!r}")
    sizes, clustered = [int(number) for number in tuning.split("x")], True
    if len(sizes) == len(dataclasses.fields(TuningConfig)):
        clustered = bool(sizes.pop())
    tuned: Multiply = functools.partial(multiply, config=TuningConfig(*sizes, clustered=clustered))  # pyright: ignore[reportCallIssue]
    return tuned, kind, outputs_first


def make_weights(kind: str, outputs_first: bool, k: int, n: int, key: jax.Array) -> Weights:
    shape = (n, k) if outputs_first else (k, n)
    if kind == "bf16":
        return {"values": jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(k**-0.5)}
    if kind.startswith("int4"):
        group_size = 32 if kind == "int4-32" else 128
        return {
            "values": jax.random.bits(key, (n, k // 2), jnp.uint8),
            "scales": jnp.full((k // group_size, n), k**-0.5 / 4, jnp.bfloat16),
        }
    if kind == "int8":
        values = lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), jnp.int8)
        return {"values": values, "scales": jnp.full((n,), k**-0.5 / 64, jnp.float32)}
    values = jax.random.normal(key, shape, jnp.bfloat16).astype(FLOAT8)
    return {"values": values, "scales": jnp.full((n,), k**-0.5, jnp.float32), "one": jnp.float32(1)}


def time_call(multiply: Multiply, x: jax.Array, weights: list[Weights]) -> tuple[float, float, str]:
    """Seconds of a call's kernels, of the longest of them alone, and what XLA made of the product."""

    def run(x: jax.Array, weights: list[Weights]) -> jax.Array:
        for i in range(CALLS):
            out = multiply(x, weights[i % len(weights)])
            # One kernel of the size of x between two products, as there is in a model (a norm, a rotation).
            x = x + out[:, :1].astype(x.dtype) * jnp.asarray(1e-3, x.dtype)
        return x

    program = jax.jit(run).lower(x, weights).compile()
    text = program.as_text() or ""
    for _ in range(2):
        jax.block_until_ready(program(x, weights))
    durations: dict[str, float] = defaultdict(float)
    for event in traced_kernels(lambda: [jax.block_until_ready(program(x, weights)) for _ in range(REPETITIONS)]):
        durations[event.name] += event.duration / (REPETITIONS * CALLS)
    marks = {
        "f8": "lt$matmul$f8",
        "lt": '__cublas$lt$matmul"',
        "cublas": "__cublas$gemm",
        "triton": "triton",
        "mosaic": "mosaic_gpu",
    }
    if not durations:
        raise SystemExit(f"error: the profiler saw no kernel on {jax.devices()[0].device_kind}; this needs a GPU")
    made = "+".join(name for name, mark in marks.items() if mark in text)
    return sum(durations.values()), max(durations.values()), made


def bench(shape: str, k: int, n: int, rows: int, form: str) -> None:
    multiply, kind, outputs_first = form_called(form)
    make: Any = jax.jit(functools.partial(make_weights, kind, outputs_first, k, n))
    first = make(jax.random.key(0))
    weight_bytes = sum(array.nbytes for array in first.values())
    count = max(2, -(-WEIGHT_BYTES // weight_bytes)) if n > 1000 else 2
    weights = [first, *(make(jax.random.key(i)) for i in range(1, count))]
    x = jax.random.normal(jax.random.key(100), (rows, k), jnp.bfloat16)
    seconds, longest, made = time_call(multiply, x, weights)
    print(
        f"{shape:>8} {rows:>5} {form:>29} {seconds * 1e6:>8.1f} {weight_bytes / seconds / 1e9:>7.0f} "
        f"{longest * 1e6:>8.1f} {weight_bytes / longest / 1e9:>7.0f} {made}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b,llama-3-70b/4", help=f"comma-separated, of {', '.join(SHAPES)}")
    parser.add_argument("--shapes", default="qkv,o,gate_up,down", help="comma-separated")
    parser.add_argument("--rows", default="1,8,16,64", help="comma-separated")
    parser.add_argument("--cases", help="comma-separated, of SHAPE/ROWS/FORM: these alone, in the place of all others")
    parser.add_argument("--forms", default=",".join(FORMS), help="comma-separated")
    arguments = parser.parse_args()
    cases = [
        (shape, int(rows), form)
        for shape, rows, form in (
            itertools.product(arguments.shapes.split(","), arguments.rows.split(","), arguments.forms.split(","))
            if arguments.cases is None
            else (case.split("/") for case in arguments.cases.split(","))
        )
    ]
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {vars(arguments)}")
    print("us of a call's kernels, the small one between two products included, and of the longest of them alone")
    for model in arguments.model.split(","):
        print(f"{model}\n{'shape':>8} {'rows':>5} {'form':>29} {'us':>8} {'GB/s':>7} {'us':>8} {'GB/s':>7} made")
        for shape, rows, form in cases:
            if shape in SHAPES[model]:
                bench(shape, *SHAPES[model][shape], rows, form)


if __name__ == "__main__":
    main()
