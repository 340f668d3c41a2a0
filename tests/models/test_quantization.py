"""What quantized weights hold: how far they are from the dense ones, their declarations, their products."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.models import quantization
from jaxserve.models.linear import column_parallel, row_parallel, swiglu
from jaxserve.models.params import QUANTIZABLE, init_params, param_specs
from jaxserve.models.quantization import (
    QuantizedWeight,
    group_length,
    int4_groups,
    quantized_bytes,
    quantized_spec,
)
from jaxserve.models.quantize_params import quantization_for, quantize_params
from jaxserve.sharding.collectives import Collectives
from jaxserve.sharding.mesh import make_mesh
from jaxserve.sharding.placement import named_shardings
from tests.long_cases import few_of
from tests.tiny_engine import MODEL_CONFIG, tiny_params

NAMES = ("fp8", "fp8-weight-only", "int8", "int4", "int4-32")
ALONE = Collectives(1)
# One program each: called as they are, every step of them would be compiled on its own.
quantize = jax.jit(quantization.quantize, static_argnames=("num_input_axes", "config"))
dequantize = jax.jit(quantization.dequantize)


def named(name: str) -> QuantizationConfig:
    return QuantizationConfig.named(name)


def dense_weight(inputs: tuple[int, ...], outputs: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Outputs of very different sizes, one of them all zeros."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((*inputs, *outputs)) * 2.0 ** rng.uniform(-12, 4, outputs)
    w.reshape(-1, np.prod(outputs))[:, 1] = 0.0
    return w.astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("inputs", "outputs"), [((256,), (2, 24)), ((2, 4, 32), (40,))])
def test_each_number_is_near_the_dense_one(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    w = dense_weight(inputs, outputs)
    quantized = quantize(jnp.asarray(w), len(inputs), named(name))
    assert quantized.shape == w.shape
    back = np.asarray(dequantize(quantized))
    flat, flat_back = w.reshape(-1, np.prod(outputs)), back.reshape(-1, np.prod(outputs))
    largest = np.abs(flat).max(axis=0)
    error = np.abs(flat_back - flat)
    if name.startswith("fp8"):  # half a step of 2**-3, or half the smallest step
        assert (error <= np.maximum(np.abs(flat) * 2.0**-4, largest * 2.0**-10 / 448) * 1.001).all()
        assert np.abs(flat_back).max(axis=0) == pytest.approx(largest)
    elif name == "int8":
        assert (error <= largest / 127 / 2 * 1.001).all()
    else:
        size = named(name).group_size
        grouped, grouped_back = (a.reshape(-1, size, a.shape[1]) for a in (flat, flat_back))
        extreme = np.abs(grouped).max(axis=1, keepdims=True)
        # Half a step, which is an eighth of the extreme; more for the few that a smaller scale cuts.
        error = np.abs(grouped_back - grouped)
        assert (error <= extreme * 0.3).all()
        assert (np.sqrt((error**2).mean(axis=1)) <= extreme[:, 0] / 8 / 2).all()
    assert (flat_back[:, 1] == 0).all()


def test_int4_scales_are_better_than_those_of_the_extremes_alone() -> None:
    w = np.random.default_rng(3).standard_normal((512, 64)).astype(np.float32)
    quantized = quantize(jnp.asarray(w), 1, named("int4"))
    grouped = w.reshape(4, 128, 64)
    scales = np.abs(grouped).max(axis=1, keepdims=True) / 7
    plain = np.clip(np.round(grouped / scales), -8, 7) * scales
    error = np.square(np.asarray(dequantize(quantized)) - w).mean()
    assert error < 0.9 * np.square(plain - grouped).mean()


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_the_format_has_come_back_as_they_were(name: str) -> None:
    config = named(name)
    rng = np.random.default_rng(0)
    if name.startswith("fp8"):
        numbers = rng.standard_normal((64, 8)).astype(jnp.float8_e4m3fn).astype(np.float32)
        numbers[0] = 448.0
    elif name == "int8":
        numbers = rng.integers(-127, 128, (64, 8)).astype(np.float32)
        numbers[0] = -127
    else:
        numbers = rng.integers(-8, 8, (64, 8)).astype(np.float32)
        numbers[::32] = -8
    w = numbers * np.float32(0.125)
    np.testing.assert_array_equal(dequantize(quantize(jnp.asarray(w), 1, config)), w)


@pytest.mark.parametrize("name", NAMES)
def test_bytes(name: str) -> None:
    quantized = quantize(jnp.ones((256, 64), jnp.float32), 1, named(name))
    expected = {"int4": 128 * 64 + 2 * 64 * 2, "int4-32": 128 * 64 + 8 * 64 * 2}.get(name, 256 * 64 + 64 * 4)
    assert quantized_bytes(quantized) == expected


@pytest.mark.parametrize(("inputs", "size", "length"), [(4096, 128, 128), (576, 128, 96), (64, 128, 64), (192, 32, 32)])
def test_groups_divide_the_inputs(inputs: int, size: int, length: int) -> None:
    assert group_length(inputs, size) == length


@pytest.mark.parametrize(
    ("inputs", "size", "groups"),
    [
        ((2, 4, 32), 128, (2, 1)),
        ((2, 4, 64), 128, (2, 2)),  # of two heads each
        ((2, 2, 96), 32, (2, 6)),
        ((2, 2, 16), 32, (2, 2)),  # in 32 inputs there are two heads, which devices may part
        ((1, 8, 80), 128, (1, 40)),  # 16 divides 80 and 128
    ],
)
def test_long_groups_have_whole_runs_of_each_head(inputs: tuple[int, ...], size: int, groups: tuple[int, ...]) -> None:
    assert int4_groups(inputs, size) == groups
    w = dense_weight(inputs, (3,))
    config = QuantizationConfig("int4", size)
    quantized = quantize(jnp.asarray(w), 3, config)
    assert quantized.values.shape == (3, *inputs[:-1], inputs[-1] // 2)
    assert quantized.scales.shape == (*groups, 3)
    # As one axis they have the same groups, where those have as many inputs.
    length = np.prod(inputs) // np.prod(groups)
    flat = quantize(jnp.asarray(w.reshape(-1, 3)), 1, QuantizationConfig("int4", int(length)))
    np.testing.assert_array_equal(quantized.values.reshape(3, -1), flat.values)
    np.testing.assert_array_equal(dequantize(quantized), np.asarray(dequantize(flat)).reshape(w.shape))


def test_inputs_that_cannot_be_paired_are_refused() -> None:
    with pytest.raises(ValueError, match="99 inputs cannot be cut into int4 groups"):
        quantize(jnp.ones((99, 4), jnp.float32), 1, named("int4"))
    with pytest.raises(ValueError, match=r"inputs=\(2, 3\) must end in an even size"):
        quantize(jnp.ones((2, 3, 4), jnp.float32), 2, named("int4"))


def test_input_scales_cannot_be_made_up() -> None:
    with pytest.raises(ValueError, match="come with a checkpoint"):
        quantize(jnp.ones((8, 4), jnp.float32), 1, QuantizationConfig("fp8", has_input_scales=True))


@pytest.mark.parametrize("name", NAMES)
def test_declarations_are_those_of_the_arrays(name: str) -> None:
    specs = param_specs(dataclasses.replace(MODEL_CONFIG, quantization=named(name)))
    params = quantize_params(tiny_params(), MODEL_CONFIG, named(name))
    for field, num_input_axes in QUANTIZABLE.items():
        spec, weight, dense = (getattr(tree.layers[0], field) for tree in (specs, params, param_specs(MODEL_CONFIG)))
        assert weight.num_input_axes == spec.num_input_axes == num_input_axes
        assert weight.shape == spec.shape == dense.shape
        for part in ("values", "scales"):
            declared, array = getattr(spec, part), getattr(weight, part)
            assert (array.shape, array.dtype.name) == (declared.shape, declared.dtype), (field, part)


@pytest.mark.parametrize("name", NAMES)
def test_a_shard_of_a_quantized_weight_is_the_quantized_shard(name: str) -> None:
    """So that devices can quantize, and multiply with, what they hold."""
    config = named(name)
    w = dense_weight((8, 2, 32), (16,))
    whole = quantize(w, 3, config)
    spec = quantized_spec(param_specs(MODEL_CONFIG).layers[0].wo, 3, config)
    assert spec.values.logical_axes == ("hidden", "kv_heads", "group", "head_dim")
    values, scales = np.asarray(whole.values), np.asarray(whole.scales)
    part = dataclasses.replace(whole, values=values[:, 2:4], scales=scales[2:4] if config.format == "int4" else scales)
    np.testing.assert_array_equal(dequantize(part), np.asarray(dequantize(whole))[2:4])
    if config.format == "int4":
        np.testing.assert_array_equal(dequantize(quantize(w[2:4], 3, config)), dequantize(part))


@pytest.mark.parametrize(("name", "size"), few_of((("int8", 1), ("int4", 4)), itertools.product(NAMES, (1, 4))))
def test_random_weights_are_made_quantized_and_in_place(name: str, size: int) -> None:
    config = dataclasses.replace(MODEL_CONFIG, intermediate_size=512, quantization=named(name))
    dense_config = dataclasses.replace(config, quantization=None)
    shardings = named_shardings(param_specs(config), make_mesh(jax.devices(), size))
    made = init_params(config, 7, jnp.dtype(jnp.float32), shardings)
    expected = quantize_params(init_params(dense_config, 7, jnp.dtype(jnp.float32)), dense_config, named(name))
    assert jax.tree.structure(made) == jax.tree.structure(expected)
    for path, array in jax.tree_util.tree_leaves_with_path(made):
        held = array.addressable_shards[0].data.size
        if array.ndim > 1:
            cut = any(axis is not None for axis in array.sharding.spec)
            assert held == array.size // (size if cut else 1), path
    w, w_expected = made.layers[1].w_down, expected.layers[1].w_down
    np.testing.assert_array_equal(dequantize(w), dequantize(w_expected))
    assert w.values.addressable_shards[0].data.size == w.values.size // size


def test_quantizing_a_model_gives_up_the_dense_weights_when_it_may() -> None:
    dense = jax.device_put(tiny_params())
    kept = quantize_params(dense, MODEL_CONFIG, named("int8"))
    assert not dense.layers[0].wo.is_deleted()
    given_up = quantize_params(dense, MODEL_CONFIG, named("int8"), donate=True)
    assert dense.layers[0].wo.is_deleted() and not given_up.embedding.is_deleted()
    np.testing.assert_array_equal(dequantize(kept.layers[1].wqkv), dequantize(given_up.layers[1].wqkv))


def test_a_quantized_model_is_not_quantized_again() -> None:
    config = dataclasses.replace(MODEL_CONFIG, quantization=named("int8"))
    with pytest.raises(ValueError, match=r"quantized already \(int8\)"):
        quantize_params(tiny_params(), config, named("fp8"))


def test_a_config_with_quantization_survives_json() -> None:
    config = dataclasses.replace(MODEL_CONFIG, quantization=QuantizationConfig("int4", 32), kv_cache_scales=True)
    assert ModelConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("name", ["awq", "", "fp4"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be one of fp8, fp8-weight-only, int8, int4, int4-32"):
        QuantizationConfig.named(name)


def near(actual: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_products_take_quantized_weights_where_they_take_dense_ones(name: str) -> None:
    rng = np.random.default_rng(5)
    # Numbers that float8 has, so that rounding the activations changes nothing.
    x = rng.standard_normal((6, 256)).astype(jnp.float8_e4m3fn).astype(np.float32)
    x[:, 0] = 7.0  # the largest: a power of two times float8's largest
    bias = rng.standard_normal((2, 40)).astype(np.float32)
    wide = {part: rng.standard_normal(shape).astype(np.float32) / 16 for part, shape in _SHAPES.items()}
    weights = {part: quantize(jnp.asarray(w), _INPUTS[part], named(name)) for part, w in wide.items()}
    dense = {part: np.asarray(dequantize(w), np.float64) for part, w in weights.items()}

    @jax.jit
    def products(x: jax.Array, weights: dict[str, QuantizedWeight], bias: jax.Array) -> Any:
        return (
            column_parallel(x, weights["column"], bias.reshape(80)),
            row_parallel(x, weights["row"], None, ALONE),
            [swiglu(x, weights["column"], added) for added in (None, bias)],
        )

    columns, rows, gated = products(x, weights, bias)  # pyright: ignore[reportArgumentType]
    near(columns, x @ dense["column"].reshape(256, 80) + bias.reshape(80))
    near(rows, x @ dense["row"].reshape(256, 40))
    for out, added in zip(gated, (None, bias), strict=True):
        gate, up = (x @ dense["column"][:, i] + (0 if added is None else added[i]) for i in range(2))
        near(out, gate / (1 + np.exp(-gate)) * up)


_SHAPES = {"column": (256, 2, 40), "row": (2, 4, 32, 40)}
_INPUTS = {"column": 1, "row": 3}


def test_only_a_quantized_weight_knows_its_dense_shape() -> None:
    weight = quantize(jnp.ones((2, 4, 32, 40), jnp.float32), 3, named("int4"))
    assert isinstance(weight, QuantizedWeight)
    assert weight.values.shape == (40, 2, 4, 16)
    assert weight.scales.shape == (2, 1, 40)
    assert weight.shape == (2, 4, 32, 40)


def layers_left_dense(params: Any) -> list[list[str]]:
    """Of each layer the names of large weights that are not quantized."""
    return [
        [name for name in QUANTIZABLE if not isinstance(getattr(layer, name), QuantizedWeight)]
        for layer in params.layers
    ]


def test_layers_and_weights_that_stay_as_they_are() -> None:
    config = dataclasses.replace(MODEL_CONFIG, num_layers=3)
    asked = QuantizationConfig("fp8", dense_layers=(2,), dense_weights=("wo",))
    quantized = dataclasses.replace(config, quantization=asked)
    assert ModelConfig.from_json(json.loads(json.dumps(quantized.to_json()))) == quantized
    expected = [["wo"], ["wo"], list(QUANTIZABLE)]
    assert layers_left_dense(param_specs(quantized)) == expected
    assert layers_left_dense(init_params(quantized, 0, jnp.dtype(jnp.float32))) == expected
    dense = init_params(config, 0, jnp.dtype(jnp.float32))
    made = quantize_params(dense, config, asked)
    assert layers_left_dense(made) == expected
    np.testing.assert_array_equal(made.layers[0].wo, dense.layers[0].wo)
    assert jax.tree.structure(made) == jax.tree.structure(init_params(quantized, 0, jnp.dtype(jnp.float32)))


@pytest.mark.parametrize(
    ("name", "changes", "leaves_some"),
    [
        ("fp8", {}, True),
        ("fp8-weight-only", {}, True),
        ("int8", {}, False),
        ("int4", {}, False),
        ("fp8", {"num_layers": 4}, False),
        ("fp8", {"hidden_size": 4096, "intermediate_size": 14336}, False),
    ],
)
def test_float8_leaves_some_weights_of_small_models(name: str, changes: dict[str, int], leaves_some: bool) -> None:
    model = dataclasses.replace(MODEL_CONFIG, **{"num_layers": 30, **changes})
    chosen = quantization_for(model, named(name))
    expected = {"dense_layers": (0, 29), "dense_weights": ("wqkv", "w_down")} if leaves_some else {}
    assert chosen == dataclasses.replace(named(name), **expected)
    assert chosen.name == name
    own = QuantizationConfig("fp8", dense_layers=(1,))
    assert quantization_for(model, own) == own
