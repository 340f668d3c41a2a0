"""Products with quantized weights against a float64 reference, and what they refuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.quantized_matmul import quantized_matmul, quantized_matmul_swiglu
from jaxserve.kernels.quantized_matmul_choice import choose_config
from jaxserve.kernels.quantized_matmul_mosaic_gpu import quantized_matmul_mosaic_gpu
from jaxserve.kernels.quantized_matmul_plan import (
    Problem,
    TuningConfig,
    block_k,
    misfit,
    unsupported_reason,
)
from jaxserve.kernels.quantized_matmul_xla import quantize_rows
from tests.kernels.quantized_matmul_cases import (
    CASES,
    FORMATS,
    TUNED,
    Case,
    check,
    make_arguments,
    opcodes_that_read,
)

needs_interpreter = pytest.mark.skipif(
    not (0, 11) <= jax.__version_info__ < (0, 12),
    reason=f"jax {jax.__version__} can't lower or interpret this kernel; 0.11 can",
)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    check(CASES[name], implementation="xla")


@pytest.mark.parametrize("name", ["float8, both", "int4, swiglu"])
def test_runs_anywhere_when_no_implementation_is_named(name: str) -> None:
    check(CASES[name])


def test_rows_are_rounded_the_same_however_they_are_cut() -> None:
    """Each device takes the factor of its own part of a row; the numbers must not depend on that."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((64, 512)) * 3, jnp.bfloat16)
    whole, factors = quantize_rows(x, None, power_of_two_factors=True)
    rounded = whole.astype(jnp.float32) * factors
    parts = [quantize_rows(part, None, power_of_two_factors=True) for part in jnp.split(x, 8, axis=1)]
    rejoined = jnp.concatenate([values.astype(jnp.float32) * factor for values, factor in parts], axis=1)
    assert len({float(factor[0, 0]) for _, factor in parts}) > 1  # they do differ
    # Float8's steps are relative, but for numbers near its smallest ones.
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)))
    equal = (rounded == rejoined) | (jnp.abs(x.astype(jnp.float32)) < largest * 2.0**-13)
    assert equal.all()
    np.testing.assert_allclose(rounded, rejoined, atol=float(largest) * 2.0**-17, rtol=0)


@pytest.mark.parametrize("power_of_two_factors", [False, True])
def test_rounding_uses_the_range_of_float8_and_never_leaves_it(power_of_two_factors: bool) -> None:
    extremes = jnp.asarray([[448.0, 1.0], [449.0, 1.0], [1e30, 1.0], [0.0, 0.0], [1e-38, 0.0], [2.0**-110, 0.0]])
    values, factors = quantize_rows(extremes.astype(jnp.float32), None, power_of_two_factors=power_of_two_factors)
    assert np.isfinite(values.astype(jnp.float32)).all()
    assert values[0, 0] == 448.0
    if power_of_two_factors:
        assert factors[:2, 0].tolist() == [1.0, 2.0]
    error = 0.07 if power_of_two_factors else 1e-6  # the largest number is held exactly
    np.testing.assert_allclose((values.astype(jnp.float32) * factors)[[1, 2, 5], 0], extremes[[1, 2, 5], 0], rtol=error)
    assert (values[3] == 0).all()


def test_activations_past_a_fixed_scale_become_its_largest_number() -> None:
    x = jnp.asarray([[1e6, -1e6]], jnp.float32)
    values, factors = quantize_rows(x, jnp.float32(2.0))
    assert values.astype(jnp.float32).tolist() == [[448.0, -448.0]]
    assert float(factors[0, 0]) == 2.0


@pytest.mark.parametrize(
    ("case", "changed", "message"),
    [
        (Case(), {"values": jnp.zeros((4, 8, 512), jnp.int8)}, r"must be \[n, k\]"),
        (Case(), {"values": jnp.zeros((128, 512), jnp.float32)}, "must be one of"),
        (Case(), {"values": jnp.zeros((128, 500), jnp.int8)}, "512 columns, which int8"),
        (Case("int4"), {"values": jnp.zeros((128, 512), jnp.uint8)}, "512 columns, which uint8"),
        (Case(), {"scales": jnp.zeros((127,), jnp.float32)}, r"must be the outputs \(128,\)"),
        (Case(), {"scales": jnp.zeros((128,), jnp.bfloat16)}, "must be float32"),
        (Case("int4"), {"scales": jnp.zeros((3, 128), jnp.bfloat16)}, "groups dividing k=512"),
        (Case("int4"), {"scales": jnp.zeros((4, 128), jnp.float32)}, "must be bfloat16"),
        (Case("int8"), {"quantize_activations": True}, "goes with float8_e4m3fn weights, not int8"),
        (Case(), {"input_scale": jnp.float32(1)}, "goes with quantize_activations"),
        (Case(quantize_activations=True), {"input_scale": jnp.ones((8,), jnp.float32)}, "must be one float32"),
        (Case(), {"residual": jnp.zeros((8, 128), jnp.float32)}, r"must be bfloat16\(8, 128\)"),
        (Case(), {"x": jnp.zeros((512,), jnp.bfloat16)}, r"must be \[rows, k\]"),
        (Case(), {"out_dtype": jnp.int32}, "out_dtype"),
        (Case(), {"implementation": "triton"}, "'mosaic_gpu', 'xla' or None"),
    ],
)
def test_what_does_not_fit_together_is_refused(case: Case, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantized_matmul(**make_arguments(case) | changed)


def test_swiglu_needs_gate_and_up() -> None:
    arguments = make_arguments(Case())
    with pytest.raises(ValueError, match=r"must be \[2, ffn, k\]"):
        quantized_matmul_swiglu(**arguments)


# Few and small, since the interpreter takes seconds for each: together they reach every branch of the kernel.
LONG = (
    "float8, both, powers of two, split",
    "float8, both, swiglu",
    "float8 weights, residual",
    "float8 weights, swiglu, split finer than rows",
    "int8, four units, many rows",
    "int8, gate and up in turns",
    "int4, groups of 64, swiglu",
)
INTERPRETED = {
    "float8, both, residual": (
        Case(quantize_activations=True, rows=1, k=256, has_residual=True),
        TuningConfig(1, 2, units=2),
    ),
    "float8, both, powers of two, split": (
        Case(quantize_activations=True, power_of_two_factors=True, rows=13, columns=64, has_residual=True),
        TuningConfig(2, 2),
    ),
    "float8, both, fixed input scale": (
        Case(quantize_activations=True, has_input_scale=True, rows=3, k=256, columns=64, out_dtype=jnp.float32),
        TuningConfig(1, 3),
    ),
    "float8, both, swiglu": (
        Case(quantize_activations=True, rows=9, k=256, columns=64, is_swiglu=True),
        TuningConfig(2, 2, tiles=2),
    ),
    "float8 weights, residual": (Case(rows=5, k=256, has_residual=True), TuningConfig(1, 4, tiles=2)),
    "float8 weights, swiglu, split finer than rows": (
        Case(rows=3, columns=64, is_swiglu=True),
        TuningConfig(4, 2),
    ),
    "int8, four units, many rows": (Case("int8", rows=60, k=384, columns=256), TuningConfig(1, 2, units=4)),
    "int8, gate and up in turns": (
        Case("int8", rows=1, columns=64, is_swiglu=True),
        TuningConfig(1, 2, turns=2),
    ),
    "int8, half of the rows, one product in a step": (
        Case("int8", rows=2, k=256, columns=64),
        TuningConfig(1, 3, row_bytes=64),
    ),
    "int8, split, float32 result": (
        Case("int8", rows=4, columns=64, out_dtype=jnp.float32, has_residual=True),
        TuningConfig(2, 2),
    ),
    "int8, three blocks for two runs of rows": (
        Case("int8", rows=9, k=384, columns=64),
        TuningConfig(3, 2),
    ),
    "int4, groups of 128, in turns": (
        Case("int4", rows=8, k=2048, groups=16, columns=64),
        TuningConfig(1, 6, turns=2),
    ),
    "int4, groups of 32, split, residual": (
        Case("int4", rows=5, groups=16, columns=64, has_residual=True),
        TuningConfig(2, 2, row_bytes=64),
    ),
    "int4, groups of 64, swiglu": (Case("int4", rows=2, groups=8, columns=64, is_swiglu=True), TuningConfig(1, 2)),
}


def interpreted(case: Case, config: TuningConfig) -> Callable[..., jax.Array]:
    """The kernel in the interpreter, with the arguments of the public function that the case is for."""

    def run(x: jax.Array, values: jax.Array, scales: jax.Array, **options: Any) -> jax.Array:
        if not case.is_swiglu:
            values = values[None]
            scales = scales[:, None] if case.values == "int4" else scales[None]
        return quantized_matmul_mosaic_gpu(
            x,
            values,
            scales,
            options.get("residual"),
            options.get("input_scale"),
            quantize_activations=case.quantize_activations,
            power_of_two_factors=case.power_of_two_factors,
            is_swiglu=case.is_swiglu,
            out_dtype=jnp.dtype(case.out_dtype or case.dtype),
            config=config,
            interpret=plgpu.InterpretGPUParams(),  # pyright: ignore[reportAttributeAccessIssue] (jax 0.10)
        )

    return run


@needs_interpreter
@pytest.mark.parametrize(
    ("case", "config"),
    [
        pytest.param(*problem, id=name, marks=[pytest.mark.long] if name in LONG else [])
        for name, problem in INTERPRETED.items()
    ],
)
def test_hopper_kernel_equals_the_reference(case: Case, config: TuningConfig) -> None:
    check(case, function=interpreted(case, config))


@needs_interpreter
def test_hopper_kernel_gives_the_same_bits_each_time() -> None:
    case = Case("int8", columns=64, out_dtype=jnp.float32)
    first = check(case, function=interpreted(case, TuningConfig(4, 2)))
    again = check(case, function=interpreted(case, TuningConfig(4, 2)))  # its threads run in another order
    np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize(
    ("k", "columns", "is_swiglu"),
    [(4096, 6144, False), (4096, 14336, True), (14336, 4096, False), (7168, 8192, False), (256, 192, False)],
)
@pytest.mark.parametrize("form", ["float8", "float8-wide", "int8", "int4"])
def test_tuning_depends_on_the_shape_alone_and_fits(form: Any, k: int, columns: int, is_swiglu: bool) -> None:
    for rows, dtype in ((1, jnp.bfloat16), (16, jnp.float32), (64, jnp.float32)):
        options: dict[str, Any] = {"is_swiglu": is_swiglu, "group_length": 32, "out_dtype": dtype}
        config = choose_config(form, rows, k, columns, **options)
        assert config == choose_config(form, rows, k, columns, **options)
        assert misfit(form, rows, k, columns, config, **options) is None


@pytest.mark.parametrize("is_swiglu", [False, True])
@pytest.mark.parametrize("rows", [3, 60])
@pytest.mark.parametrize("form", FORMATS)
def test_tunings_that_fit_reach_every_kind_of_cut(form: str, rows: int, is_swiglu: bool) -> None:
    """Those that the tests on a card go through, of each format."""
    configs = [config for *case, config in ((a, c, d, b) for a, b, c, d in TUNED) if case == [form, rows, is_swiglu]]
    assert len(configs) >= 6
    assert {config.row_bytes for config in configs} == {64, 128}
    for kind in ("split", "turns", "tiles", "units"):
        assert any(getattr(config, kind) > 1 for config in configs), kind
    assert {config.stages >= 3 * config.turns for config in configs} == {False, True}


def test_programs_tell_what_reads_their_arguments() -> None:
    program = """HloModule jit_f

%fused (param: u8[4,8]) -> s8[4,8] {
  %param = u8[4,8]{1,0} parameter(0), metadata={op_name="copy(u8[4,8] %weights)"}
  ROOT %shift = s8[4,8]{1,0} shift-left(%param, %param)
}

ENTRY %main (x: bf16[2,16], weights: u8[4,8]) -> bf16[2,4] {
  %weights = u8[4,8]{1,0} parameter(1), sharding={replicated}
  %bitcast.1 = s4[4,16]{1,0:E(4)} bitcast(%weights), metadata={op_name="reshape"}
  %x = bf16[2,16]{1,0} parameter(0)
  %call.0 = (bf16[2,4]{1,0:T(8)}, f32[1]{0}) custom-call(%x, %bitcast.1), custom_call_target="kernel(%weights)"
  ROOT %out = bf16[2,4]{1,0} get-tuple-element(%call.0), index=0
}
"""
    assert opcodes_that_read(program, "u8") == ["custom-call"]
    assert opcodes_that_read(program.replace(" bitcast(", " copy("), "u8") == ["copy"]
    fused = program.replace("custom-call(%x, %bitcast.1)", "fusion(%weights, %x)")
    assert opcodes_that_read(fused, "u8") == ["fusion"]
    assert opcodes_that_read(program, "bf16") == ["custom-call"]


@pytest.mark.parametrize("columns", [64, 320])
@pytest.mark.parametrize("tiles_of_k", [1, 3, 5, 23])
@pytest.mark.parametrize("form", ["float8", "float8-wide", "int8", "int4"])
def test_every_shape_that_is_covered_has_a_cut(form: Any, tiles_of_k: int, columns: int) -> None:
    k = tiles_of_k * block_k(form)
    for is_swiglu, rows in itertools.product((False, True), (1, 64)):
        options: dict[str, Any] = {"is_swiglu": is_swiglu, "group_length": 32, "out_dtype": jnp.float32}
        config = choose_config(form, rows, k, columns, **options)
        assert misfit(form, rows, k, columns, config, **options) is None


@pytest.mark.parametrize("form", ["float8", "float8-wide", "int8", "int4"])
def test_tunings_that_are_chosen_run_in_one_go_where_they_can(form: Any) -> None:
    """Clusters of 4 or 8 blocks find no room on all multiprocessors: with as many blocks as these, some would run alone."""
    for rows, k, columns in ((16, 14336, 4096), (64, 14336, 4096), (64, 4096, 6144), (64, 4096, 4096)):
        config = choose_config(form, rows, k, columns, is_swiglu=False)
        blocks = columns // (config.units * config.tiles * 64) * config.split
        assert blocks < 124 if config.clustered and config.split >= 4 else blocks <= 132, config


@pytest.mark.parametrize("form", ["float8-wide", "int8", "int4"])
def test_blocks_wait_for_others_outside_a_cluster_only_where_all_find_room(form: Any) -> None:
    """On a card with fewer multiprocessors they would wait for blocks that cannot begin."""
    options: dict[str, Any] = {"is_swiglu": False}
    chosen = choose_config(form, 64, 14336, 4096, **options)
    assert (
        not chosen.clustered and 4096 // (64 * chosen.units) * chosen.split == 128
    )  # else half of the card has no work
    assert choose_config(form, 64, 14336, 4096, **options, multiprocessors=114).clustered
    too_many = TuningConfig(8, 2, units=2, clustered=False)
    assert "more than 132 blocks" in str(misfit(form, 64, 14336, 4096, too_many, **options))


def test_a_cut_is_told_to_fit_up_to_the_last_stage_that_does() -> None:
    """What the compiler counted for cuts that it refused on a card: 249968 bytes, and 250968 with scales of groups."""
    options: dict[str, Any] = {"is_swiglu": True}
    assert misfit("float8-wide", 60, 2048, 256, TuningConfig(2, 4, turns=2), **options) is None
    assert "takes 2499" in str(misfit("float8-wide", 60, 2048, 256, TuningConfig(2, 6, turns=2), **options))
    options = {"is_swiglu": False, "has_residual": True}
    assert misfit("int4", 60, 2048, 256, TuningConfig(2, 4, turns=2), **options) is None
    assert "of 232448 bytes" in str(misfit("int4", 60, 2048, 256, TuningConfig(2, 6, turns=2), **options))


def test_a_product_is_never_in_flight_when_its_own_registers_are_widened_into_again() -> None:
    """With the least bytes of a row a step of 8-bit weights is one product, which then must end with the step."""

    def problem(form: Any, **changes: Any) -> Problem:
        config = TuningConfig(1, 3, **changes)
        return Problem(form, 8, 384, 128, 128, False, False, jnp.dtype(jnp.bfloat16), config, None)

    for form in ("int8", "float8-wide"):
        assert problem(form).releases_late
        assert not problem(form, row_bytes=64).releases_late
        assert problem(form, row_bytes=64, tiles=2).releases_late
    assert problem("int4", row_bytes=64).releases_late


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"split": 9}, "split=9 must be one of"),
        ({"stages": 1}, "stages=1 must be at least 2"),
        ({"tiles": 3}, "tiles=3 1 or 2"),
        ({"turns": 2, "stages": 3}, "stages=3 must be a multiple of .*turns=2"),
        ({"units": 2, "turns": 3, "stages": 3}, "more than 4 tiles or 4 warpgroups"),
        ({"split": 4}, "k=384 must be a multiple of 128 times .*split=4"),
        ({"units": 4}, "columns=384 must be a multiple of 256"),
        ({"clustered": False}, "makes one part of k"),
        ({"stages": 99}, "takes 1016392 of 232448 bytes of shared memory"),
    ],
)
def test_a_tuning_that_does_not_go_into_the_shape_is_refused(config: dict[str, Any], message: str) -> None:
    def plan() -> Problem:
        tuning = TuningConfig(**{"split": 1, "stages": 2, **config})
        return Problem("int8", 8, 384, 384, 384, False, False, jnp.dtype(jnp.bfloat16), tuning, None)

    with pytest.raises(ValueError, match=message):
        plan()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"values": "int4"}, None),
        ({"dtype": jnp.float32}, "x is float32"),
        ({"rows": 65}, "rows=65"),
        ({"k": 576}, "k=576 must be a multiple of 128"),
        ({"values": "int4", "k": 384, "groups": 3}, "k=384 must be a multiple of 256"),
        ({"values": "int4", "groups": 2}, "groups of 256"),
        ({"columns": 96}, "columns=96 of 64"),
    ],
)
@needs_interpreter
def test_hopper_kernel_says_what_it_does_not_take(changes: dict[str, Any], reason: str | None) -> None:
    case = Case(**changes)
    arguments = make_arguments(case)
    values, scales = arguments["values"], arguments["scales"]
    found = unsupported_reason(arguments["x"], values, scales, False, jnp.dtype(case.dtype))
    assert found is None if reason is None else reason in str(found)


def test_asking_for_the_hopper_kernel_on_a_cpu_says_why_not() -> None:
    with pytest.raises(NotImplementedError, match="not a GPU"):
        quantized_matmul(**make_arguments(Case()), implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="not a GPU"):
        quantized_matmul_swiglu(**make_arguments(Case(is_swiglu=True)), implementation="mosaic_gpu")
