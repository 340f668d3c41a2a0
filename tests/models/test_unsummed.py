"""Sums over devices that are left to the norms: the same model, wherever they are made."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import llama
from jaxserve.models.quantize_params import quantize_params
from jaxserve.quantization_config import QuantizationConfig
from tests.models.paged_model import PagedModel
from tests.tiny_engine import MODEL_CONFIG, random_params

PROMPT = [3, 17, 5, 40, 8, 21]


@pytest.mark.parametrize("output_bias", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("peer_rows", [8, 4])
def test_forward_pass_is_the_same(peer_rows: int, output_bias: bool):
    """Also where the prompt has more tokens than sums are left for, and where a bias follows a sum."""
    config = dataclasses.replace(MODEL_CONFIG, attention_output_bias=output_bias)
    params = random_params(config)
    models = [
        PagedModel(config, params, capacity=16, tensor_parallel_size=2, peer_rows=rows) for rows in (0, peer_rows)
    ]
    expected, got = (model.prefill(PROMPT) for model in models)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    expected, got = (model.decode(11, rows=2) for model in models)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "dense",
    [
        pytest.param({}, marks=pytest.mark.long),  # all of this is in the layers of the others
        {"dense_weights": ("wqkv", "w_down")},
        pytest.param({"dense_weights": ("w_gate_up",)}, marks=pytest.mark.long),
        pytest.param({"dense_layers": (0,)}, marks=pytest.mark.long),
        {"dense_parts": ((1, "wo"),)},
    ],
    ids=str,
)
def test_products_of_float8_numbers_are_scaled_by_who_sums_them(dense: dict[str, Any]):
    """Wherever they stand beside dense weights, rows are rounded before a product and scaled behind it as without peers."""
    quantization = dataclasses.replace(QuantizationConfig.named("fp8"), **dense)
    params = quantize_params(random_params(MODEL_CONFIG), MODEL_CONFIG, quantization)
    config = dataclasses.replace(MODEL_CONFIG, quantization=quantization)
    options: dict[str, Any] = {"capacity": 16, "tensor_parallel_size": 2, "chunk": len(PROMPT)}
    models = [PagedModel(config, params, peer_rows=rows, **options) for rows in (0, 8)]
    expected, got = (model.prefill(PROMPT) for model in models)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    expected, got = (model.decode(11) for model in models)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_stream_is_not_taken_for_its_part():
    with pytest.raises(ValueError, match="not yet summed"):
        llama.stream_sum(llama.Stream(residual=jnp.zeros((1, 4)), update=llama.Unsummed(jnp.zeros((1, 4)))))
