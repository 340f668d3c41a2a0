"""Configs of both formats: rotary scaling, ids that end an answer, and nothing unknown passed over."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.gguf_config import llama3_frequency_factors, model_config_from_gguf
from jaxserve.checkpoint.gguf_source import GGUFFile
from jaxserve.checkpoint.gguf_tokenizer import read_gguf_tokenizer
from jaxserve.checkpoint.hf_config import model_config_from_hf
from jaxserve.checkpoint.rope_config import rope_to_hf
from jaxserve.checkpoint.tokenizer_read import read_hf_tokenizer
from jaxserve.config import ModelConfig, RopeScaling
from tests.checkpoint.files import edit_config, write_gguf
from tests.tiny_model import TINY_CONFIG, random_weights, write_tiny_llama

GOLDEN_FREQUENCIES = Path(__file__).parents[1] / "goldens" / "rope_frequencies.json"
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_SCALING = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def config_of(**changes: Any) -> ModelConfig:
    config = {key: value for key, value in ({**TINY_CONFIG, **changes}).items() if value is not ...}
    return model_config_from_hf(config, eos_token_ids=(), bos_token_id=None, where="config.json")


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}, "rope_theta": ...},
    ],
    ids=["rope_type", "type", "rope_parameters"],
)
def test_llama3_scaling_under_every_spelling(spelling: dict[str, Any]) -> None:
    config = config_of(**spelling)
    assert (config.rope_scaling, config.rope_theta) == (LLAMA3_SCALING, 10000.0)


def test_rotary_base_under_both_spellings() -> None:
    assert config_of(rope_theta=5e5).rope_theta == 5e5
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    assert config_of(rope_theta=..., rope_parameters=parameters).rope_theta == 5e5
    assert config_of(rope_theta=...).rope_theta == 10000.0


def test_linear_scaling_and_none() -> None:
    assert config_of(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == RopeScaling("linear", 2.0)
    assert config_of(rope_scaling=None).rope_scaling is None
    assert config_of(rope_scaling={"rope_type": "default"}).rope_scaling is None


def test_yarn_and_dynamic_scaling() -> None:
    yarn = {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "beta_fast": 16,
        "truncate": False,
    }
    expected = RopeScaling(
        "yarn",
        4.0,
        original_max_position_embeddings=32768,
        attention_factor=0.1 * math.log(4) + 1,
        fast_turns=16.0,
        whole_pairs=False,
    )
    assert config_of(rope_scaling=yarn).rope_scaling == expected
    with pytest.raises(CheckpointError, match="original_max_position_embeddings=None"):
        config_of(rope_scaling={"type": "yarn", "factor": 4.0})
    dynamic = config_of(rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=64)
    assert dynamic.rope_scaling == RopeScaling("dynamic", 2.0, original_max_position_embeddings=64)


NEWER = {"rope_type": "default", "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        pytest.param(NEWER, YARN, id="added by hand"),
        pytest.param(NEWER, {**YARN, "rope_theta": 1e6}, id="added with its base"),
        pytest.param({**NEWER, **YARN}, {**YARN, "factor": 2.0, "rope_theta": 1e6}, id="another factor"),
        pytest.param(NEWER, {"rope_type": "default", "rope_theta": 1e4}, id="another base"),
    ],
)
def test_scalings_under_both_keys_that_differ_are_refused(parameters: dict[str, Any], scaling: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"rope_parameters=.* and rope_scaling=.* differ: .*remove") as caught:
        config_of(rope_theta=..., rope_parameters=parameters, rope_scaling=scaling)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        pytest.param({**YARN, "rope_theta": 1e6}, YARN, id="for older readers"),
        pytest.param({**YARN, "rope_theta": 1e6}, {"type": "yarn", **YARN, "beta_fast": 32}, id="spelled otherwise"),
        pytest.param({**YARN, "rope_theta": 1e6}, {}, id="empty"),
        pytest.param({}, YARN, id="the newer one empty"),
    ],
)
def test_scalings_under_both_keys_that_say_the_same(parameters: dict[str, Any], scaling: dict[str, Any]) -> None:
    """Also where one has the base, and the other leaves it to the config."""
    config = config_of(rope_theta=1e6, rope_parameters=parameters, rope_scaling=scaling)
    assert (config.rope_theta, config.rope_scaling) == (1e6, config_of(rope_scaling=YARN).rope_scaling)


LONGROPE = {"short_factor": [1.0] * 7 + [1.25], "long_factor": [float(pair + 1) for pair in range(8)]}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 64, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phi3s_longrope_under_every_name(kind: str) -> None:
    """Its length before stretching stands beside the scaling; the two lengths make the attention factor."""
    expected = RopeScaling(
        "longrope",
        original_max_position_embeddings=16,
        attention_factor=math.sqrt(1 + math.log(4) / math.log(16)),
        short_factors=tuple(LONGROPE["short_factor"]),
        long_factors=tuple(LONGROPE["long_factor"]),
    )
    assert config_of(**PHI3, rope_scaling={"type": kind, **LONGROPE}).rope_scaling == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"long_factor": ...}, "long_factor=None must be a list of numbers"),
        ({"short_factor": [1.0, "x"]}, "short_factor=.*must be a list of numbers"),
        ({"short_factor": [1.0] * 7}, "7 factors.*each of 8 pairs"),
        ({"long_factor": [0.0] * 8}, "long_factors=.*must be positive"),
        ({"long_mscale": 1.2}, "long_mscale=1.2"),
    ],
)
def test_longrope_that_does_not_fit_is_refused(changes: dict[str, Any], named: str) -> None:
    scaling = {key: value for key, value in {"type": "longrope", **LONGROPE, **changes}.items() if value is not ...}
    with pytest.raises(CheckpointError, match=f"config.json.*{named}"):
        config_of(**PHI3, rope_scaling=scaling)


@pytest.mark.parametrize("kind", ["ntk", "su", None, ["yarn"]])
def test_unknown_scaling_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{re.escape(str(kind))}.*llama3"):
        config_of(rope_scaling={"rope_type": kind, "factor": 2.0})


def test_llama3_scaling_with_a_missing_number_is_refused() -> None:
    with pytest.raises(CheckpointError, match="low_freq_factor"):
        config_of(rope_scaling={"rope_type": "llama3", **LLAMA3, "low_freq_factor": None})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*not Llama's.*supported are LlamaForCausalLM"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3.*not Llama's"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM.*mixture of experts"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75}, "partial_rotary_factor=0.75"),
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope"}}, "short_factor=None"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        ({"architectures": ...}, "architectures"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": ...}, "hidden_size=None"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"rope_theta": "big"}, "rope_theta"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json.*{named}"):
        config_of(**changes)


def test_keys_that_are_absent_have_the_familys_defaults() -> None:
    config = config_of(num_key_value_heads=..., rms_norm_eps=..., tie_word_embeddings=..., max_position_embeddings=...)
    assert (config.num_kv_heads, config.rms_norm_eps, config.tie_word_embeddings) == (4, 1e-6, False)
    assert config.max_position_embeddings == 2048


def test_sliding_window_counts_where_the_family_uses_it() -> None:
    mistral, qwen = ["MistralForCausalLM"], ["Qwen2ForCausalLM"]
    assert config_of(sliding_window=8).sliding_window is None
    assert config_of(architectures=mistral, sliding_window=8).sliding_window == 8
    assert config_of(architectures=mistral, sliding_window=None).sliding_window is None
    assert config_of(architectures=mistral).sliding_window == 4096
    assert config_of(architectures=qwen, sliding_window=8, use_sliding_window=False).sliding_window is None
    sliding = {"architectures": qwen, "sliding_window": 8, "use_sliding_window": True}
    assert config_of(**sliding, max_window_layers=0).sliding_window == 8
    assert config_of(**sliding, layer_types=["sliding_attention"] * 2).sliding_window == 8
    assert config_of(**sliding, max_window_layers=2).sliding_window is None
    with pytest.raises(CheckpointError, match="some layers"):
        config_of(**sliding, max_window_layers=1)


def test_biases_and_norms_of_the_families() -> None:
    def flags(architecture: str, **changes: Any) -> tuple[bool, bool, bool, bool]:
        config = config_of(architectures=[architecture], **changes)
        return config.attention_bias, config.attention_output_bias, config.mlp_bias, config.qk_norm

    assert flags("LlamaForCausalLM", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert flags("MistralForCausalLM", attention_bias=True, mlp_bias=True) == (False, False, False, False)
    assert flags("Qwen2ForCausalLM") == (True, False, False, False)
    assert flags("Qwen3ForCausalLM") == (False, False, False, True)
    assert flags("Phi3ForCausalLM") == (False, False, False, False)


def test_qwen3s_heads_are_of_128_where_nothing_is_said() -> None:
    assert config_of(architectures=["Qwen3ForCausalLM"], head_dim=...).head_dim == 128
    assert config_of(architectures=["Qwen2ForCausalLM"], head_dim=...).head_dim == 16


def test_phi3_slides_where_a_window_is_given() -> None:
    phi3 = ["Phi3ForCausalLM"]
    assert config_of(architectures=phi3, sliding_window=2047).sliding_window == 2047
    assert config_of(architectures=phi3).sliding_window is None


# --- GGUF


def gguf_config(path: Path, tensors: dict[str, np.ndarray] | None = None, **metadata: Any) -> ModelConfig:
    values = {**random_weights(TINY_CONFIG, 0), **(tensors or {})}
    keys = {f"llama.{key.replace('__', '.')}": value for key, value in metadata.items()}
    with GGUFFile(write_gguf(path / "model.gguf", values, metadata=keys)) as file:
        return model_config_from_gguf(file, eos_token_ids=(), bos_token_id=None)


def test_gguf_with_frequency_factors_is_llama3_scaling(tmp_path: Path) -> None:
    """As llama.cpp's converter computes them."""
    factors = []
    for pair in range(8):
        wavelength = 2 * math.pi * 500000.0 ** (2 * pair / 16)
        if wavelength < 8192 / 4.0:
            factors.append(1.0)
        elif wavelength > 8192 / 1.0:
            factors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    tensors = {"rope_freqs.weight": np.array(factors, np.float32)}
    config = gguf_config(tmp_path, tensors, rope__freq_base=500000.0)
    assert config.rope_scaling == LLAMA3_SCALING


def test_gguf_with_other_frequency_factors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rope_freqs"):
        gguf_config(tmp_path, {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)})


def test_gguf_scaling_by_name(tmp_path: Path) -> None:
    config = gguf_config(tmp_path, rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert config.rope_scaling == RopeScaling("linear", 4.0)
    # As files were before they told the kind, and as the first ones were.
    assert gguf_config(tmp_path, rope__scaling__factor=4.0).rope_scaling == RopeScaling("linear", 4.0)
    assert gguf_config(tmp_path, rope__scale_linear=4.0).rope_scaling == RopeScaling("linear", 4.0)
    assert gguf_config(tmp_path, rope__scaling__type="none", rope__scaling__factor=4.0).rope_scaling is None
    lengths = {"rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}
    config = gguf_config(tmp_path, rope__scaling__type="yarn", **lengths)
    attention_factor = 0.1 * math.log(4) + 1
    expected = RopeScaling("yarn", 4.0, original_max_position_embeddings=64, attention_factor=attention_factor)
    assert config.rope_scaling == expected
    with pytest.raises(CheckpointError, match="rope scaling 'ntk' is not supported"):
        gguf_config(tmp_path, rope__scaling__type="ntk")
    with pytest.raises(CheckpointError, match="yarn_ext_factor"):
        gguf_config(tmp_path, rope__scaling__type="yarn", rope__scaling__yarn_ext_factor=0.5, **lengths)


def test_gguf_with_factors_of_both_lengths_is_longrope(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them; its floats have 32 bits."""
    tensors = {
        "rope_factors_short.weight": np.asarray(LONGROPE["short_factor"], np.float32),
        "rope_factors_long.weight": np.asarray(LONGROPE["long_factor"], np.float32) + np.float32(0.1),
    }
    keys = {"rope__scaling__original_context_length": 16, "rope__scaling__attn_factor": 1.19}
    expected = RopeScaling(
        "longrope",
        original_max_position_embeddings=16,
        attention_factor=1.19,
        short_factors=tuple(LONGROPE["short_factor"]),
        long_factors=tuple(factor + 0.1 for factor in LONGROPE["long_factor"]),
    )
    assert gguf_config(tmp_path, tensors, **keys).rope_scaling == expected
    with pytest.raises(CheckpointError, match="attn_factor=None"):
        gguf_config(tmp_path, tensors, rope__scaling__original_context_length=16)
    del tensors["rope_factors_long.weight"]
    with pytest.raises(CheckpointError, match="rope_factors_long\\.weight' is missing"):
        gguf_config(tmp_path, tensors, **keys)


def test_gguf_floats_are_the_decimals_that_were_meant(tmp_path: Path) -> None:
    assert gguf_config(tmp_path).rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"rope__dimension_count": 8}, "rope.dimension_count=8.*16"),
        ({"block_count": "two"}, "block_count='two'"),
        ({"attention__layer_norm_rms_epsilon": None}, "epsilon=None"),
    ],
)
def test_gguf_values_that_cannot_be_are_refused(tmp_path: Path, metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        gguf_config(tmp_path, **metadata)


def test_frequency_factors_equal_transformers() -> None:
    cases = json.loads(GOLDEN_FREQUENCIES.read_text())
    cases = [case for case in cases if case["rope_parameters"]["rope_type"] == "llama3"]
    assert cases
    for case in cases:
        scaling, head_dim = case["rope_parameters"], case["head_dim"]
        theta = scaling["rope_theta"]
        llama3 = RopeScaling(
            "llama3", scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"],
            scaling["original_max_position_embeddings"],
        )  # fmt: skip
        plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
        scaled = plain / llama3_frequency_factors(llama3, theta, head_dim)
        np.testing.assert_allclose(scaled, case["inverse_frequencies"], rtol=1e-6)


@pytest.mark.parametrize(
    "scaling",
    [
        LLAMA3_SCALING,
        RopeScaling("linear", 2.0),
        RopeScaling("dynamic", 2.0, original_max_position_embeddings=128),
        RopeScaling("yarn", 4.0, original_max_position_embeddings=64, attention_factor=1.5, slow_turns=2.0),
        RopeScaling("longrope", attention_factor=1.5, short_factors=(1.0,) * 8, long_factors=(4.0,) * 8),
    ],
    ids=lambda scaling: scaling.kind,
)
def test_scalings_are_written_as_they_are_read(scaling: RopeScaling) -> None:
    config = config_of(rope_scaling=rope_to_hf(scaling), max_position_embeddings=128)
    assert config.rope_scaling == scaling


# --- ids that end an answer


def test_union_of_config_generation_config_and_tokenizer(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "source", eos_token_id=256)
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 7]}')
    files = read_hf_tokenizer(folder)
    assert files is not None
    assert files.settings.eos_token_ids == (256, 7, 258)
    assert files.settings.bos_token_id == 257


def test_eos_that_is_no_id_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "source")
    edit_config(folder, eos_token_id="</s>")
    with pytest.raises(CheckpointError, match="eos_token_id='</s>'"):
        read_hf_tokenizer(folder)


def test_union_of_the_gguf_keys(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 256, "tokenizer.ggml.eom_token_id": 5}
    path = write_gguf(tmp_path / "model.gguf", random_weights(TINY_CONFIG, 0), metadata=metadata)
    with GGUFFile(path) as file:
        files = read_gguf_tokenizer(file)
    assert files is not None
    assert files.settings.eos_token_ids == (258, 256, 5)
