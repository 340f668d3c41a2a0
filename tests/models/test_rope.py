"""Rotary tables against transformers' frequencies and against float64, where short prompts show no fault."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import ModelConfig, RopeScaling
from jaxserve.models.rope import inverse_frequencies, rope_tables

GOLDEN = Path(__file__).parent.parent / "goldens" / "rope_frequencies.json"


def config_with(head_dim: int, rope_theta: float, rope_scaling: RopeScaling | None = None) -> ModelConfig:
    return ModelConfig(
        vocab_size=16,
        hidden_size=head_dim,
        intermediate_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
    )


def scaling_of(rope: dict[str, Any]) -> RopeScaling:
    if rope["rope_type"] == "linear":
        return RopeScaling("linear", rope["factor"])
    return RopeScaling(
        "llama3",
        rope["factor"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=f"{entry['rope_parameters']['rope_type']}-{entry['rope_parameters']['factor']:g}")
        for entry in json.loads(GOLDEN.read_text())
    ],
)
def test_frequencies_equal_transformers(entry: dict[str, Any]) -> None:
    rope = entry["rope_parameters"]
    config = config_with(entry["head_dim"], rope["rope_theta"], scaling_of(rope))
    np.testing.assert_allclose(inverse_frequencies(config), entry["inverse_frequencies"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("position", [255, 257, 4095, 16383, 131071])
def test_tables_stay_near_float64_at_long_positions(theta: float, position: int) -> None:
    frequencies = inverse_frequencies(config_with(128, theta))
    cosines, sines = rope_tables(jnp.asarray([position], jnp.int32), frequencies)
    angles = position / theta ** (np.arange(0, 128, 2) / 128)
    assert cosines.dtype == sines.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(cosines)[0], np.cos(angles), rtol=0, atol=1e-2)
    np.testing.assert_allclose(np.asarray(sines)[0], np.sin(angles), rtol=0, atol=1e-2)
