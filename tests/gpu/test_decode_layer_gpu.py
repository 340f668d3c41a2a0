"""decode_layer on the card: the persistent Hopper kernel against the plain-XLA layer, again and again."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.decode_layer import decode_layer
from jaxserve.kernels.decode_layer_mosaic_gpu import decode_layer_mosaic_gpu
from jaxserve.kernels.decode_layer_plan import Cut, TuningConfig, choose_config
from jaxserve.kernels.decode_layer_xla import decode_layer_xla
from jaxserve.kernels.grid_barrier import COUNTERS
from tests.kernels.decode_layer_cases import EPS, Case, check

pytestmark = pytest.mark.usefixtures("hopper")

SMALL = Case(attended=512, hidden=512, ffn=1024, qkv=768)
LLAMA = Case(attended=4096, hidden=4096, ffn=14336, qkv=6144)
REPETITIONS = {SMALL: 50, LLAMA: 30}

# All blocks at the same rows of the weights, who leaves a group's last part adds them up.
MARCHING = Cut(2, 128, "last"), Cut(4, 112, "last"), Cut(2, 128, "last"), Cut(2, 96, "last")
CONFIGS = {
    "marching": TuningConfig(MARCHING, stage_tiles=4, stages=3, multiplies_ahead=True),
    "marching, all join, small copies": TuningConfig(
        tuple(Cut(cut.tiles, cut.blocks) for cut in MARCHING),
        stage_tiles=4,
        stages=3,
        copy_rows=16,
    ),
    "uneven shares": TuningConfig((Cut(2, 132, "last"),) * 4, multiplies_ahead=True),
    "wide": TuningConfig((Cut(8, 128, "last"),) * 4, stage_tiles=8, stages=3, multiplies_ahead=True),
    "two compute warpgroups": TuningConfig(
        MARCHING, compute_warpgroups=2, stage_tiles=4, stages=4, multiplies_ahead=True
    ),
}


@functools.cache
def _arrays(case: Case, rows: int) -> tuple[jax.Array, ...]:
    """The arguments of decode_layer, made on the card: a large layer's take seconds on the host."""
    assert case.qkv is not None

    @jax.jit
    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        def normal(index: int, *shape: int, deviation: float = 1.0, mean: float = 0.0) -> jax.Array:
            values = jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
            return (values * jnp.float32(deviation) + jnp.float32(mean)).astype(jnp.bfloat16)

        return (
            normal(0, rows, case.attended),
            normal(1, rows, case.hidden, deviation=2.0),
            *_weights(case, normal),
        )

    return make(jax.random.key(0))


def _weights(case: Case, normal: Any) -> tuple[jax.Array, ...]:
    assert case.qkv is not None
    return (
        normal(2, case.attended, case.hidden, deviation=case.attended**-0.5),
        normal(3, case.hidden, deviation=0.3, mean=1.0),
        normal(4, case.hidden, 2, case.ffn, deviation=case.hidden**-0.5),
        normal(5, case.ffn, case.hidden, deviation=case.ffn**-0.5),
        normal(6, case.hidden, deviation=0.3, mean=1.0),
        normal(7, case.hidden, case.qkv, deviation=case.hidden**-0.5),
    )


@functools.cache
def _expected(case: Case, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The definition in float32 by XLA, on the card."""

    @jax.jit
    def define(*arrays: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        with jax.default_matmul_precision("highest"):
            return decode_layer_xla(*[array.astype(jnp.float32) for array in arrays], eps=EPS)  # pyright: ignore[reportCallIssue]

    x, qkv = [np.asarray(result) for result in define(*_arrays(case, rows)) if result is not None]
    return x, qkv


def _check_repeatedly(case: Case, rows: int, config: TuningConfig | None) -> None:
    arrays = _arrays(case, rows)
    run = jax.jit(functools.partial(decode_layer_mosaic_gpu, eps=EPS, config=config))
    x, qkv, counters = first = run(*arrays, jnp.zeros(COUNTERS, jnp.int32))
    expected = _expected(case, rows)
    check(x, expected[0], 4e-3)
    check(qkv, expected[1], 8e-3)
    differences = []
    for _ in range(REPETITIONS[case]):
        x, qkv, counters = run(*arrays, counters)
        differences += [(again != result).any() for again, result in zip((x, qkv), first[:2], strict=True)]
    assert not np.asarray(jnp.stack(differences)).any()
    assert not np.asarray(counters).any()


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_small_layer_matches_the_definition_each_time(rows: int):
    _check_repeatedly(SMALL, rows, None)


@pytest.mark.parametrize("join", ["all", "last"])
@pytest.mark.parametrize("blocks", [1, 7])
def test_any_number_of_blocks_gives_the_definition(blocks: int, join: Any):
    _check_repeatedly(SMALL, 8, TuningConfig((Cut(2, blocks, join),) * 4, stages=4))


@pytest.mark.parametrize("rows", [1, 64])
def test_a_layer_of_llama_matches_the_definition_each_time(rows: int):
    _check_repeatedly(LLAMA, rows, None)


@pytest.mark.parametrize("name", CONFIGS)
def test_however_a_layer_of_llama_is_cut_it_matches_the_definition(name: str):
    _check_repeatedly(LLAMA, 8, CONFIGS[name])


def test_two_compute_warpgroups_give_the_definition_of_many_rows():
    _check_repeatedly(LLAMA, 64, CONFIGS["two compute warpgroups"])


def test_the_last_layer_has_no_next():
    arrays = (*_arrays(LLAMA, 8)[:6], None, None)
    result = decode_layer(*arrays, eps=EPS, implementation="mosaic_gpu")  # pyright: ignore[reportArgumentType, reportCallIssue]
    check(result.x, _expected(LLAMA, 8)[0], 4e-3)
    assert result.qkv is None


@pytest.mark.parametrize("config", [choose_config(8), CONFIGS["marching"]], ids=["chosen", "marching"])
def test_a_chain_of_layers_in_one_program_gives_the_same_bits_each_time(config: TuningConfig):
    """Each layer's kernel may start before its predecessor ends, and uses its counters."""
    arrays = _arrays(LLAMA, 8)

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
