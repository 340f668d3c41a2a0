"""Seeded random weights: what a seed gives, and that a second start compiles nothing for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import QuantizationConfig
from jaxserve.engine.executable_cache import ExecutableCache
from jaxserve.models.params import LlamaParams, draw_param, init_params, is_declared, param_specs
from jaxserve.models.shard_layout import ShardLayout
from jaxserve.sharding.mesh import make_mesh
from tests.engine.test_engine import compilations
from tests.long_cases import few_of
from tests.tiny_engine import MODEL_CONFIG

FLOAT32 = jnp.dtype(jnp.float32)
FIRST_OF_SEED_3 = [-2.3783397674560547, 0.2823367714881897, -0.1218419224023819]  # of embedding, last wqkv and lm_head


@pytest.mark.parametrize(
    "seed", [0, 2**40 + 3, *(pytest.param(seed, marks=pytest.mark.long) for seed in (-1, 2**31 + 3))]
)
def test_each_array_has_a_key_of_its_own_out_of_the_seed(seed: int) -> None:
    specs = jax.tree.leaves(param_specs(MODEL_CONFIG), is_leaf=is_declared)
    arrays = jax.tree.leaves(init_params(MODEL_CONFIG, seed, FLOAT32))
    keys = jax.random.split(jax.random.key(seed), len(specs))
    draw = jax.jit(draw_param, static_argnums=(0, 1))
    for spec, key, array in zip(specs, keys, arrays, strict=True):
        np.testing.assert_allclose(array, draw(spec, FLOAT32, key), rtol=1e-6)


def test_a_seed_gives_the_weights_that_it_always_gave() -> None:
    params = init_params(MODEL_CONFIG, 3, FLOAT32)
    first = [float(array.ravel()[0]) for array in (params.embedding, params.layers[1].wqkv, params.lm_head)]
    np.testing.assert_allclose(first, FIRST_OF_SEED_3, rtol=1e-5)


@pytest.mark.usefixtures("without_jax_cache")
@pytest.mark.parametrize(
    ("num_devices", "quantization"), few_of(((2, "int8"),), ((1, None), (2, None), (2, "int8"), (8, None)))
)
def test_a_second_start_compiles_nothing_for_them(num_devices: int, quantization: str | None, tmp_path: Path) -> None:
    """Over more devices than KV heads as well; each has its part alone."""
    config = MODEL_CONFIG
    if quantization is not None:
        config = dataclasses.replace(config, quantization=QuantizationConfig.named(quantization))
    mesh = make_mesh(jax.devices(), num_devices)
    shardings = ShardLayout(config, num_devices).source_shardings(mesh)

    def start() -> tuple[LlamaParams, ExecutableCache]:
        programs = ExecutableCache(tmp_path, tuple(mesh.devices.flat), "weights")
        return init_params(config, 3, FLOAT32, shardings, programs.load_or_compile), programs

    first, _ = start()
    with compilations() as events:
        second, programs = start()
    assert events == []
    assert programs.times and all(time.loaded for time in programs.times)
    expected = init_params(config, 3, FLOAT32)
    for array, again, wanted, place in zip(*map(jax.tree.leaves, (first, second, expected, shardings)), strict=True):
        np.testing.assert_array_equal(again, array)
        np.testing.assert_allclose(np.asarray(array), np.asarray(wanted), rtol=1e-6)
        assert again.sharding.is_equivalent_to(place, again.ndim)


@pytest.mark.usefixtures("without_jax_cache")
def test_programs_that_draw_other_random_numbers_are_not_taken(tmp_path: Path) -> None:
    def first_number() -> float:
        programs = ExecutableCache(tmp_path, (jax.devices()[0],), "weights")
        params = init_params(MODEL_CONFIG, 3, FLOAT32, load_or_compile=programs.load_or_compile)
        return float(params.embedding.ravel()[0])

    with jax.default_prng_impl("rbg"):
        others = first_number()
    assert others != pytest.approx(FIRST_OF_SEED_3[0], rel=1e-5)
    assert first_number() == pytest.approx(FIRST_OF_SEED_3[0], rel=1e-5)
