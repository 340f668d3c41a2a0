"""Problems for quantized_matmul, with a float64 reference; shared by the tests on CPU and on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxserve.kernels.int4 import pack_int4, unpack_int4
from jaxserve.kernels.quantized_matmul import quantized_matmul, quantized_matmul_swiglu
from jaxserve.kernels.quantized_matmul_plan import Form, TuningConfig, misfit

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: shapes and options."""

    values: str = "float8"  # "float8", "int8" or "int4"
    quantize_activations: bool = False
    power_of_two_factors: bool = False
    has_input_scale: bool = False
    groups: int = 4
    rows: int = 8
    k: int = 512
    columns: int = 128
    is_swiglu: bool = False
    has_residual: bool = False
    dtype: Any = jnp.bfloat16
    out_dtype: Any = None

    @property
    def outputs(self) -> tuple[int, ...]:
        return (2, self.columns) if self.is_swiglu else (self.columns,)


def make_arguments(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments of `quantized_matmul` or `quantized_matmul_swiglu`; every row and output at a size of its own."""
    rng = np.random.default_rng(seed)
    shape = (*case.outputs, case.k)
    sizes = 2.0 ** rng.uniform(-6, 6, (case.rows, 1))
    arguments: dict[str, Any] = {"x": jnp.asarray(rng.standard_normal((case.rows, case.k)) * sizes, case.dtype)}
    scales = rng.uniform(0.5, 2.0, case.outputs) * case.k**-0.5
    if case.values == "float8":
        arguments["values"] = jnp.asarray(rng.standard_normal(shape).astype(FLOAT8))
    elif case.values == "int8":
        arguments["values"] = jnp.asarray(rng.integers(-127, 128, shape), jnp.int8)
        scales = scales / 64
    else:
        arguments["values"] = pack_int4(jnp.asarray(rng.integers(-8, 8, shape), jnp.int8), case.k // case.groups)
        scales = rng.uniform(0.5, 2.0, (case.groups, *case.outputs)) * case.k**-0.5 / 4
    arguments["scales"] = jnp.asarray(scales, jnp.bfloat16 if case.values == "int4" else jnp.float32)
    if case.quantize_activations:
        arguments["quantize_activations"] = True
    if case.power_of_two_factors:
        arguments["power_of_two_factors"] = True
    if case.has_input_scale:
        arguments["input_scale"] = jnp.float32(0.03)
    if case.has_residual:
        arguments["residual"] = jnp.asarray(
            rng.standard_normal((case.rows, case.columns)), case.out_dtype or case.dtype
        )
    return arguments


def dense_weights(case: Case, arguments: dict[str, Any]) -> np.ndarray:
    """Float64 [*outputs, k]."""
    values, scales = arguments["values"], np.asarray(arguments["scales"].astype(jnp.float32)).astype(np.float64)
    if case.values != "int4":
        return np.asarray(values.astype(jnp.float32)).astype(np.float64) * scales[..., None]
    numbers = np.asarray(unpack_int4(values, case.k // case.groups)).astype(np.float64)
    numbers = numbers.reshape(*case.outputs, case.groups, -1)
    return (numbers * np.moveaxis(scales, 0, -1)[..., None]).reshape(*case.outputs, case.k)


def rounded_activations(case: Case, arguments: dict[str, Any]) -> np.ndarray:
    """Float64 [rows, k], after the rounding to float8 that the case asks for."""
    x = np.asarray(arguments["x"].astype(jnp.float32)).astype(np.float64)
    if not case.quantize_activations:
        return x
    if case.has_input_scale:
        factors = np.asarray(arguments["input_scale"], np.float64)
    else:
        factors = np.abs(x).max(axis=1, keepdims=True).astype(np.float32) * np.float32(1 / 448)
        if case.power_of_two_factors:
            factors = 2.0 ** np.ceil(np.log2(factors))
    # In float32 from here on: a quotient that lies between two float8 numbers must fall on the same side.
    return np.clip(x.astype(np.float32) / np.float32(factors), -448, 448).astype(FLOAT8).astype(np.float64) * factors


def reference(case: Case, arguments: dict[str, Any]) -> np.ndarray:
    """The definition in float64."""
    x, w = rounded_activations(case, arguments), dense_weights(case, arguments)
    if case.is_swiglu:
        gate, up = x @ w[0].T, x @ w[1].T
        return gate / (1 + np.exp(-gate)) * up
    product = x @ w.T
    return product + np.asarray(arguments["residual"].astype(jnp.float32)) if case.has_residual else product


def check(
    case: Case, tolerance: float | None = None, function: Callable[..., jax.Array] | None = None, **options: Any
) -> np.ndarray:
    """Asserts that the op, compiled, gives the reference's values, and returns them.

    Args:
        tolerance: relative; None: a few roundings of the result's dtype.
        function: in the op's place.
    """
    arguments = make_arguments(case)
    static = {key: arguments.pop(key) for key in ("quantize_activations", "power_of_two_factors") if key in arguments}
    function = function or (quantized_matmul_swiglu if case.is_swiglu else quantized_matmul)
    if case.out_dtype is not None:
        static["out_dtype"] = case.out_dtype
    out = jax.jit(lambda arrays: function(**arrays, **static, **options))(arguments)
    assert out.dtype == (case.out_dtype or case.dtype)
    expected = reference(case, arguments)
    assert out.shape == expected.shape
    # A row's terms are as large as the row; what each rounds to is told by the dtypes: weights of 4 bits are multiplied
    # out in x's dtype.
    exact = out.dtype == jnp.float32 and case.dtype == jnp.float32
    if tolerance is None:
        tolerance = 1e-5 if exact else 2.0**-7
    scale = np.abs(np.asarray(arguments["x"].astype(jnp.float32))).max(axis=1, keepdims=True)
    floor = scale * max(scale.max(), 1.0) if case.is_swiglu else scale
    actual = np.asarray(out.astype(jnp.float32))
    excess = np.abs(actual - expected) / (tolerance * (np.abs(expected) + 0.5 * floor))
    worst = np.unravel_index(np.argmax(np.where(np.isnan(excess), np.inf, excess)), excess.shape)
    assert excess[worst] <= 1, f"{excess[worst]:.2f} times {tolerance=} at {worst}: {actual[worst]}, {expected[worst]}"
    return actual


CASES = {
    "float8, both": Case(quantize_activations=True),
    "float8, both, powers of two": Case(quantize_activations=True, power_of_two_factors=True, has_residual=True),
    "float8, both, powers of two, in float32": Case(
        quantize_activations=True, power_of_two_factors=True, dtype=jnp.float32
    ),
    "float8, both, one row": Case(quantize_activations=True, rows=1),
    "float8, both, odd sizes": Case(quantize_activations=True, rows=13, k=90, columns=37, has_residual=True),
    "float8, both, in float32": Case(quantize_activations=True, dtype=jnp.float32, has_residual=True),
    "float8, both, fixed input scale": Case(quantize_activations=True, has_input_scale=True, dtype=jnp.float32),
    "float8, both, swiglu": Case(quantize_activations=True, is_swiglu=True),
    "float8, both, swiglu in float32": Case(quantize_activations=True, is_swiglu=True, dtype=jnp.float32, rows=3),
    "float8, many rows": Case(quantize_activations=True, rows=200),
    "float8 weights": Case(has_residual=True),
    "float8 weights, swiglu": Case(is_swiglu=True, rows=5),
    "float8 weights in float32": Case(dtype=jnp.float32, rows=1),
    "int8": Case("int8", has_residual=True),
    "int8 in float32, odd sizes": Case("int8", dtype=jnp.float32, rows=7, k=91, columns=51),
    "int8, swiglu": Case("int8", is_swiglu=True, dtype=jnp.float32),
    "int8, float32 result of bfloat16": Case("int8", out_dtype=jnp.float32),
    "int4": Case("int4", has_residual=True),
    "int4, one group": Case("int4", groups=1, dtype=jnp.float32),
    "int4 in float32": Case("int4", dtype=jnp.float32, groups=16, has_residual=True),
    "int4, swiglu": Case("int4", is_swiglu=True, dtype=jnp.float32, rows=1),
    "int4, odd sizes": Case("int4", dtype=jnp.float32, rows=3, k=96, groups=3, columns=21),
    "int4, groups that are in order": Case("int4", dtype=jnp.float32, rows=3, k=96, groups=4, columns=21),
}

FORMATS = {
    "float8, both": {"values": "float8", "quantize_activations": True},
    "float8 weights": {"values": "float8"},
    "int8": {"values": "int8"},
    "int4, groups of 128": {"values": "int4", "groups": 128},
    "int4, groups of 32": {"values": "int4", "groups": 32},
}

# Of the Hopper kernel: every kind of cut, with few and with many stages.
TUNINGS = (
    TuningConfig(1, 2),
    TuningConfig(4, 5, tiles=2),
    TuningConfig(4, 2, tiles=2),
    TuningConfig(8, 2, units=2),
    TuningConfig(2, 6, turns=2),
    TuningConfig(2, 4, turns=2),
    TuningConfig(1, 4, turns=4),
    TuningConfig(1, 3, row_bytes=64),
    TuningConfig(1, 3, units=2, row_bytes=64),
    TuningConfig(2, 6, tiles=2, turns=2, row_bytes=64),
    TuningConfig(1, 3, units=2, tiles=2),
    TuningConfig(1, 2, units=2, tiles=2),
    TuningConfig(1, 2, tiles=2, turns=2),
    TuningConfig(8, 2, units=2, clustered=False),
    TuningConfig(2, 6, turns=2, clustered=False),
    TuningConfig(4, 2, tiles=2, clustered=False),
)


def tuned_case(form: str, rows: int, is_swiglu: bool) -> Case:
    """What `TUNINGS` cut, for one of `FORMATS`."""
    options = {**FORMATS[form], "groups": 64 if form == "int4, groups of 32" else 16}
    return Case(rows=rows, k=2048, columns=256, has_residual=not is_swiglu, is_swiglu=is_swiglu, **options)


def tuning_fits(case: Case, config: TuningConfig) -> bool:
    forms: dict[str, Form] = {"float8": "float8-wide", "int8": "int8", "int4": "int4"}
    reason = misfit(
        "float8" if case.quantize_activations else forms[case.values],
        case.rows,
        case.k,
        case.columns,
        config,
        is_swiglu=case.is_swiglu,
        has_residual=case.has_residual,
        group_length=case.k // case.groups,
    )
    return reason is None


TUNED = [  # form, tuning, rows, is_swiglu
    (form, config, rows, is_swiglu)
    for form, config, rows, is_swiglu in itertools.product(FORMATS, TUNINGS, (3, 60), (False, True))
    if tuning_fits(tuned_case(form, rows, is_swiglu), config)
]


def opcodes_that_read(hlo: str, element_type: str) -> list[str]:
    """What a compiled program does with its arguments of a type, in its entry computation; bitcasts do nothing."""
    entry = hlo[hlo.index("\nENTRY ") :]
    names: set[str] = set()
    opcodes = []
    # A name, a type (of a tuple in parentheses, which may have others in it), and the operation with its operands.
    line = r"^ +(?:ROOT )?%(\S+) = (\((?:[^()]|\([^()]*\))*\)|\S+) ([\w-]+)\(([^()]*)\)"
    for name, made, opcode, operands in re.findall(line, entry, re.MULTILINE):
        if opcode == "parameter" and made.startswith(f"{element_type}["):
            names.add(name)
        elif names.intersection(re.findall(r"%([\w.-]+)", operands)):
            if opcode == "bitcast":
                names.add(name)
            else:
                opcodes.append(opcode)
    return opcodes
