"""Rotary tables against transformers' frequencies and against float64, where short prompts show no fault."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.families import LLAMA
from jaxserve.checkpoint.rope_config import rope_from_hf
from jaxserve.config import ModelConfig, RopeScaling, RopeScalingKind
from jaxserve.models.rope import inverse_frequencies, rope_tables, with_longest_sequence

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


ENTRIES = [
    pytest.param(entry, id=f"{index}-{entry['rope_parameters']['rope_type']}-{entry['sequence_length']}")
    for index, entry in enumerate(json.loads(GOLDEN.read_text()))
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_frequencies_and_attention_factors_equal_transformers(entry: dict[str, Any]) -> None:
    given = {key: entry[key] for key in ("rope_parameters", "max_position_embeddings")}
    theta, scaling = rope_from_hf(given, LLAMA, "golden")
    config = dataclasses.replace(
        config_with(entry["head_dim"], theta, scaling), max_position_embeddings=entry["max_position_embeddings"]
    )
    config = with_longest_sequence(config, entry["sequence_length"])
    np.testing.assert_allclose(inverse_frequencies(config), entry["inverse_frequencies"], rtol=1e-6, atol=0)
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(entry["attention_factor"], rel=1e-12)


def test_the_goldens_hold_every_scaling() -> None:
    kinds = {entry["rope_parameters"]["rope_type"] for entry in json.loads(GOLDEN.read_text())}
    assert kinds == set(get_args(RopeScalingKind))


def test_attention_factor_is_on_cosines_and_sines() -> None:
    frequencies = inverse_frequencies(config_with(16, 10000.0))
    positions = jnp.asarray([0, 3], jnp.int32)
    for plain, scaled in zip(
        rope_tables(positions, frequencies), rope_tables(positions, frequencies, 1.5), strict=True
    ):
        np.testing.assert_allclose(scaled, 1.5 * plain, rtol=1e-6)


def test_length_of_sequences_changes_no_model_whose_scaling_does_not_depend_on_it() -> None:
    config = config_with(16, 10000.0, RopeScaling("yarn", 4.0))
    assert with_longest_sequence(config, 100) is config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "none"}, "kind 'none' is not supported"),
        ({"kind": "linear", "factor": 0.0}, "factor=0.0 must be positive"),
        ({"kind": "yarn", "factor": 2.0, "attention_factor": float("nan")}, "attention_factor=nan"),
        ({"kind": "longrope", "short_factors": (1.0,)}, r"long_factors=\(\) must be positive numbers"),
        ({"kind": "linear", "factor": 2.0, "short_factors": (1.0,)}, "and only then"),
        ({"kind": "llama3", "factor": 8.0, "low_frequency_factor": 4.0}, "low_frequency_factor=4.0 must be .* below"),
    ],
)
def test_scalings_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling(**values)


def test_longrope_has_a_factor_for_each_pair_and_survives_json() -> None:
    scaling = RopeScaling("longrope", short_factors=(1.0,) * 8, long_factors=(2.0,) * 8)
    config = config_with(16, 10000.0, scaling)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    with pytest.raises(ValueError, match="8 factors, must have one for each of 16 pairs"):
        config_with(32, 10000.0, scaling)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("position", [255, 257, 4095, 16383, 131071])
def test_tables_stay_near_float64_at_long_positions(theta: float, position: int) -> None:
    frequencies = inverse_frequencies(config_with(128, theta))
    cosines, sines = rope_tables(jnp.asarray([position], jnp.int32), frequencies)
    angles = position / theta ** (np.arange(0, 128, 2) / 128)
    assert cosines.dtype == sines.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(cosines)[0], np.cos(angles), rtol=0, atol=1e-2)
    np.testing.assert_allclose(np.asarray(sines)[0], np.sin(angles), rtol=0, atol=1e-2)
