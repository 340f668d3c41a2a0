"""Every implementation of decode_matmul and decode_matmul_swiglu against float64 numpy."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.decode_matmul import decode_matmul, decode_matmul_swiglu
from jaxserve.kernels.decode_matmul_mosaic_gpu import TuningConfig, choose_config, decode_matmul_mosaic_gpu
from tests.kernels.decode_matmul_cases import CASES, Case, check, make_arrays

needs_interpreter = pytest.mark.skipif(
    not (0, 11) <= jax.__version_info__ < (0, 12),
    reason=f"jax {jax.__version__} can't lower or interpret this kernel; 0.11 can",
)

# Few and small, since the interpreter takes seconds for each: together they reach every branch of the kernel.
INTERPRETED = {
    "one row, residual": (Case(rows=1, has_residual=True), TuningConfig(split=1, stages=2)),
    "fewer rows than a tile": (Case(rows=5), TuningConfig(split=1, stages=2)),
    "more stages than steps": (Case(k=128, columns=64), TuningConfig(split=1, stages=4)),
    "split, odd rows, residual": (Case(rows=13, has_residual=True), TuningConfig(split=2, stages=2)),
    "split finer than rows": (Case(rows=3, has_residual=True, columns=64), TuningConfig(split=4, stages=2)),
    "split, rows that it does not divide": (Case(rows=24), TuningConfig(split=2, stages=3)),
    "swiglu": (Case(rows=9, columns=64, is_swiglu=True), TuningConfig(split=1, stages=2)),
    "swiglu, split": (Case(rows=40, columns=64, is_swiglu=True), TuningConfig(split=4, stages=2)),
    "float32 result": (Case(rows=8, out_dtype=jnp.float32), TuningConfig(split=1, stages=2)),
    "float32 result and residual, split": (
        Case(rows=16, out_dtype=jnp.float32, has_residual=True, columns=64),
        TuningConfig(split=2, stages=2),
    ),
}


def interpreted(case: Case, config: TuningConfig, prefetch_weights: bool = False) -> Callable[..., jax.Array]:
    """The kernel in the interpreter, with the arguments of the public function that the case is for."""

    def run(x: jax.Array, w: jax.Array, **options) -> jax.Array:
        return decode_matmul_mosaic_gpu(
            x,
            w if case.is_swiglu else w[:, None, :],
            options.get("residual"),
            is_swiglu=case.is_swiglu,
            out_dtype=jnp.dtype(options.get("out_dtype", x.dtype)),
            prefetch_weights=prefetch_weights,
            config=config,
            interpret=plgpu.InterpretGPUParams(),
        )

    return run


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_matches_the_definition(case: Case):
    check(case, functools.partial(case.function, implementation="xla"))


@needs_interpreter
@pytest.mark.parametrize(("case", "config"), INTERPRETED.values(), ids=INTERPRETED.keys())
def test_hopper_kernel_matches_the_definition(case: Case, config: TuningConfig):
    check(case, interpreted(case, config))


@needs_interpreter
@pytest.mark.parametrize("stages", [3, 6])
def test_hopper_kernel_may_fetch_weights_first(stages: int):
    case = Case(rows=4, has_residual=True)
    check(case, interpreted(case, TuningConfig(split=2, stages=stages), prefetch_weights=True))


@needs_interpreter
def test_hopper_kernel_gives_the_same_bits_each_time():
    case = Case(columns=64, out_dtype=jnp.float32)
    multiply = interpreted(case, TuningConfig(split=4, stages=2))
    first = check(case, multiply)
    for _ in range(2):  # the interpreter's threads run in another order each time
        np.testing.assert_array_equal(check(case, multiply), first)


@pytest.mark.parametrize(
    ("k", "columns", "is_swiglu"),
    [(4096, 6144, False), (4096, 4096, False), (4096, 14336, True), (14336, 4096, False), (4096, 128256, False)],
)
@pytest.mark.parametrize("rows", [1, 8, 64, 128])
def test_tuning_depends_on_the_shape_alone_and_fits(rows: int, k: int, columns: int, is_swiglu: bool):
    config = choose_config(rows, k, columns, is_swiglu=is_swiglu)
    assert config == choose_config(rows, k, columns, is_swiglu=is_swiglu)
    assert k % (64 * config.split) == 0
    assert config.stages >= 2


def test_chooses_an_implementation_by_itself():
    case = Case(dtype=jnp.float32)
    check(case, decode_matmul)
    check(dataclasses.replace(case, is_swiglu=True), decode_matmul_swiglu)


def test_asking_for_the_hopper_kernel_on_a_cpu_says_why_not():
    x, w, _ = make_arrays(Case())
    with pytest.raises(NotImplementedError, match="not a GPU"):
        decode_matmul(x, w, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="not a GPU"):
        decode_matmul_swiglu(x, jnp.stack([w, w], 1), implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((4, 2, 128))}, r"must be \[rows, k\]"),
        ({"x": jnp.zeros((4, 96))}, "must agree in k"),
        ({"x": jnp.zeros((4, 128), jnp.bfloat16)}, "must be the same"),
        ({"w": jnp.zeros((128, 2, 64))}, r"must be \[k, n\]"),
        ({"residual": jnp.zeros((4, 32))}, r"must be float32\(4, 64\)"),
        ({"residual": jnp.zeros((4, 64), jnp.bfloat16)}, "residual is bfloat16"),
        ({"out_dtype": jnp.int32}, "must be one of"),
        ({"implementation": "triton"}, "implementation='triton'"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_says_what_is_wrong(change: dict[str, Any], message: str):
    arguments: dict[str, Any] = {"x": jnp.zeros((4, 128)), "w": jnp.zeros((128, 64))}
    with pytest.raises(ValueError, match=message):
        decode_matmul(**arguments | change)


def test_says_what_is_wrong_with_gate_and_up():
    with pytest.raises(ValueError, match=r"must be \[k, 2, ffn\]"):
        decode_matmul_swiglu(jnp.zeros((4, 128)), jnp.zeros((128, 3, 64)))
