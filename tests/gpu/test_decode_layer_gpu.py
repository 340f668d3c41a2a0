"""decode_layer on the card: the persistent Hopper kernel against the plain-XLA layer, again and again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.decode_layer import decode_layer
from jaxserve.kernels.decode_layer_mosaic_gpu import decode_layer_mosaic_gpu
from jaxserve.kernels.decode_layer_plan import TuningConfig, choose_config
from jaxserve.kernels.grid_barrier import COUNTERS
from tests.kernels.decode_layer_cases import EPS, Case, check, make_arrays, reference

SMALL = Case(attended=512, hidden=512, ffn=1024, qkv=768)
LLAMA = Case(attended=4096, hidden=4096, ffn=14336, qkv=6144)
REPETITIONS = 50


@pytest.fixture(autouse=True)
def _hopper() -> None:
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability != "9.0":
        pytest.skip(f"needs a Hopper GPU, this one has compute capability {capability}")


@functools.cache
def _few_rows(case: Case) -> tuple[jax.Array | None, ...]:
    return make_arrays(case)


def _arrays(case: Case, rows: int) -> tuple[jax.Array | None, ...]:
    """The weights are the same for all numbers of rows; making them takes seconds."""
    attended, residual, *weights = _few_rows(case)
    assert attended is not None and residual is not None
    repeats = -(-rows // case.rows)
    # Rows that differ, from few: shifted by one column each time.
    attended, residual = [
        jnp.concatenate([jnp.roll(array, i, axis=1) for i in range(repeats)])[:rows] for array in (attended, residual)
    ]
    return attended, residual, *weights


def _check_repeatedly(case: Case, rows: int, config: TuningConfig | None) -> None:
    arrays = _arrays(case, rows)
    expected = reference(arrays)
    run = jax.jit(functools.partial(decode_layer_mosaic_gpu, eps=EPS, config=config))
    counters = jnp.zeros(COUNTERS, jnp.int32)
    first = None
    for _ in range(REPETITIONS):
        x, qkv, counters = run(*arrays, counters)
        results = [np.asarray(result.astype(jnp.float32)) for result in (x, qkv) if result is not None]
        if first is None:
            check(x, expected[0], 4e-3)
            check(qkv, expected[1], 8e-3)
            first = results
        for again, result in zip(results, first, strict=True):
            np.testing.assert_array_equal(again, result)
    assert not np.asarray(counters).any()


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 40, 64])
def test_a_small_layer_matches_the_definition_each_time(rows: int):
    _check_repeatedly(SMALL, rows, None)


@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
def test_any_number_of_blocks_gives_the_definition(blocks: int):
    _check_repeatedly(SMALL, 8, TuningConfig(blocks, 1, 4, 4))


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 64])
def test_a_layer_of_llama_matches_the_definition_each_time(rows: int):
    _check_repeatedly(LLAMA, rows, None)


@pytest.mark.parametrize("rows", [8, 64])
def test_two_compute_warpgroups_give_the_definition(rows: int):
    _check_repeatedly(LLAMA, rows, TuningConfig(compute_warpgroups=2, stages=5, x_stages=4))


def test_the_last_layer_has_no_next():
    arrays = (*_arrays(LLAMA, 8)[:6], None, None)
    result = decode_layer(*arrays, eps=EPS, implementation="mosaic_gpu")  # pyright: ignore[reportArgumentType]
    check(result.x, reference(arrays)[0], 4e-3)
    assert result.qkv is None


def test_a_chain_of_layers_in_one_program_gives_the_same_bits_each_time():
    """Each layer's kernel may start before its predecessor ends, and uses its counters."""
    arrays = _arrays(LLAMA, 8)
    config = choose_config(8)

    @jax.jit
    def run(attended: jax.Array, residual: jax.Array, *weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        counters = jnp.zeros(COUNTERS, jnp.int32)
        for _ in range(8):
            residual, qkv, counters = decode_layer_mosaic_gpu(
                attended, residual, *weights, counters, eps=EPS, config=config
            )
            assert qkv is not None
            attended = qkv[:, : attended.shape[1]]
            residual = residual / jnp.abs(residual).max().astype(residual.dtype)
        return attended, residual

    first = [np.asarray(result.astype(jnp.float32)) for result in run(*arrays)]  # pyright: ignore[reportArgumentType]
    assert all(np.isfinite(result).all() for result in first)
    for _ in range(10):
        for again, result in zip(run(*arrays), first, strict=True):  # pyright: ignore[reportArgumentType]
            np.testing.assert_array_equal(np.asarray(again.astype(jnp.float32)), result)
