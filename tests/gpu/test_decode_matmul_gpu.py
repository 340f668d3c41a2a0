"""decode_matmul on the card: the Hopper kernel, its choice, and the fall-back."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.decode_matmul import Implementation, decode_matmul
from jaxserve.kernels.decode_matmul_mosaic_gpu import TuningConfig, decode_matmul_mosaic_gpu
from tests.kernels.decode_matmul_cases import Case, check, make_arrays

pytestmark = pytest.mark.usefixtures("hopper")

SHAPES = {
    "qkv": Case(k=4096, columns=6144),
    "attention output": Case(k=4096, columns=4096, has_residual=True),
    "gate and up": Case(k=4096, columns=14336, is_swiglu=True),
    "down": Case(k=14336, columns=4096, has_residual=True),
    "head": Case(k=4096, columns=128256, out_dtype=jnp.float32),
    "small, odd number of tiles": Case(k=576, columns=960),
    "float32 residual": Case(k=1024, columns=1024, has_residual=True, out_dtype=jnp.float32),
}


@pytest.mark.parametrize("rows", [1, 3, 8, 13, 16, 40, 64, 128])
@pytest.mark.parametrize("name", SHAPES)
def test_hopper_kernel_matches_the_definition(name: str, rows: int):
    if name == "head" and rows not in (1, 64):
        pytest.skip("two row counts are enough for the largest shape: its reference takes seconds")
    case = dataclasses.replace(SHAPES[name], rows=rows)
    for prefetch_weights in (False, True):
        check(case, functools.partial(case.function, prefetch_weights=prefetch_weights, implementation="mosaic_gpu"))


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 5])
@pytest.mark.parametrize("rows", [1, 24, 64])
def test_every_cut_gives_the_definition_and_the_same_bits_each_time(split: int, stages: int, rows: int):
    case = Case(rows=rows, k=2048, columns=1024)
    config = TuningConfig(split=split, stages=stages)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return decode_matmul_mosaic_gpu(x, w[:, None, :], is_swiglu=False, out_dtype=x.dtype, config=config)

    first = check(case, run)
    for _ in range(20):
        np.testing.assert_array_equal(check(case, run), first)


def test_a_chain_of_products_waits_for_its_predecessors():
    """Each kernel starts before its predecessor ends; the result of one is the input of the next."""
    case = Case(rows=8, k=4096, columns=4096)
    x, w, _ = make_arrays(case)
    _, w2, _ = make_arrays(case, seed=1)

    def chain(implementation: Implementation) -> np.ndarray:
        multiply = functools.partial(decode_matmul, prefetch_weights=True, implementation=implementation)

        @jax.jit
        def run(x: jax.Array, w: jax.Array, w2: jax.Array) -> jax.Array:
            for _ in range(10):
                x = multiply(x, w, residual=x)
                x = multiply(x, w2)
                x = x / jnp.abs(x).max().astype(x.dtype)
            return x

        return np.asarray(run(x, w, w2).astype(jnp.float32))

    ours = chain("mosaic_gpu")
    np.testing.assert_array_equal(ours, chain("mosaic_gpu"))
    expected = chain("xla")
    assert np.linalg.norm(ours - expected) / np.linalg.norm(expected) < 0.05


def test_falls_back_where_the_kernel_cannot_run_and_says_so_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            decode_matmul(jnp.ones((8, 96), jnp.bfloat16), jnp.ones((96, 64), jnp.bfloat16))
    assert [record.levelname for record in caplog.records if "plain XLA" in record.message] == ["WARNING"]
