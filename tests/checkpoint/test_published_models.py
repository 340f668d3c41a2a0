"""Configs as the families publish them: each is understood, down to the number of its weights."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxserve.checkpoint.hf_config import model_config_from_hf
from jaxserve.config import RopeScaling
from jaxserve.models.params import param_specs

# hidden, intermediate, layers, heads, KV heads, vocabulary; what else the config says; what is made of it; weights.
LLAMA, MISTRAL, QWEN2 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MODELS: dict[str, tuple[str, tuple[int, ...], dict[str, Any], dict[str, Any], int]] = {
    "llama-7b": (
        LLAMA, (4096, 11008, 32, 32, 0, 32000),
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "pad_token_id": 0},
        {"num_kv_heads": 32, "head_dim": 128, "rope_theta": 10000.0, "rope_scaling": None}, 6_738_415_616,
    ),
    "llama-2-70b": (
        LLAMA, (8192, 28672, 80, 64, 8, 32000),
        {"max_position_embeddings": 4096, "pretraining_tp": 1, "rope_scaling": None}, {"head_dim": 128}, 68_976_648_192,
    ),
    "llama-3-8b": (
        LLAMA, (4096, 14336, 32, 32, 8, 128256), {"max_position_embeddings": 8192, "rope_theta": 500000.0},
        {"rope_theta": 500000.0, "tie_word_embeddings": False}, 8_030_261_248,
    ),
    "llama-3.1-8b": (
        LLAMA, (4096, 14336, 32, 32, 8, 128256),
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3_SCALING}},
        {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)}, 8_030_261_248,
    ),
    "llama-3.2-1b": (
        LLAMA, (2048, 8192, 16, 32, 8, 128256),
        {
            "head_dim": 64, "tie_word_embeddings": True, "rope_theta": 500000.0,
            "rope_scaling": {"rope_type": "llama3", "factor": 32.0, **LLAMA3_SCALING},
        },
        {"head_dim": 64, "tie_word_embeddings": True}, 1_235_814_400,
    ),
    "llama-3.3-70b": (
        LLAMA, (8192, 28672, 80, 64, 8, 128256),
        {
            "head_dim": 128, "max_position_embeddings": 131072, "mlp_bias": False, "attention_bias": False,
            "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3_SCALING},
        },
        {"max_position_embeddings": 131072}, 70_553_706_496,
    ),
    "tinyllama-1.1b": (
        LLAMA, (2048, 5632, 22, 32, 4, 32000), {"max_position_embeddings": 2048, "rope_scaling": None},
        {"head_dim": 64, "rope_theta": 10000.0}, 1_100_048_384,
    ),
    "smollm2-135m": (
        LLAMA, (576, 1536, 30, 9, 3, 49152),
        {"rope_interleaved": False, "is_llama_config": True, "rope_theta": 100000, "tie_word_embeddings": True},
        {"head_dim": 64, "rope_theta": 100000.0}, 134_515_008,
    ),
    "mistral-7b-v0.1": (
        MISTRAL, (4096, 14336, 32, 32, 8, 32000), {"sliding_window": 4096, "rope_theta": 10000.0},
        {"sliding_window": 4096, "attention_bias": False}, 7_241_732_096,
    ),
    "mistral-7b-v0.3": (
        MISTRAL, (4096, 14336, 32, 32, 8, 32768), {"sliding_window": None, "rope_theta": 1000000.0},
        {"sliding_window": None, "rope_theta": 1e6}, 7_248_023_552,
    ),
    "qwen2-0.5b": (
        QWEN2, (896, 4864, 24, 14, 2, 151936),
        {"max_window_layers": 24, "sliding_window": 131072, "use_sliding_window": False, "tie_word_embeddings": True},
        {"sliding_window": None, "attention_bias": True, "attention_output_bias": False}, 494_032_768,
    ),
    "qwen2.5-7b": (
        QWEN2, (3584, 18944, 28, 28, 4, 152064),
        {"max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "rope_theta": 1000000.0},
        {"sliding_window": None, "attention_bias": True}, 7_615_616_512,
    ),
    "qwen3-0.6b": (
        "Qwen3ForCausalLM", (1024, 3072, 28, 16, 8, 151936),
        {
            "head_dim": 128, "attention_bias": False, "max_window_layers": 28, "sliding_window": None,
            "use_sliding_window": False, "tie_word_embeddings": True, "rope_theta": 1000000,
        },
        {"head_dim": 128, "qk_norm": True, "attention_bias": False, "sliding_window": None}, 596_049_920,
    ),
    "phi-3-mini-4k": (
        "Phi3ForCausalLM", (3072, 8192, 32, 32, 32, 32064),
        {
            "sliding_window": 2047, "original_max_position_embeddings": 4096, "rope_scaling": None, "rope_theta": 10000.0,
            "max_position_embeddings": 4096, "attention_bias": False, "auto_map": {"AutoConfig": "phi3.Phi3Config"},
        },
        {"sliding_window": 2047, "attention_bias": False}, 3_821_079_552,
    ),
    "phi-3-medium-4k": (
        "Phi3ForCausalLM", (5120, 17920, 40, 40, 10, 32064), {"sliding_window": 2047, "rope_scaling": None},
        {"head_dim": 128, "num_kv_heads": 10}, 13_960_238_080,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_config_and_number_of_weights(name: str) -> None:
    architecture, sizes, says, expected, num_weights = MODELS[name]
    keys = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    )  # fmt: skip
    given = {key: size for key, size in zip(keys, sizes, strict=True) if size}  # 0: not said
    given |= {"architectures": [architecture], "hidden_act": "silu", "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}
    config = model_config_from_hf({**given, **says}, eos_token_ids=(2,), bos_token_id=1, where="config.json")
    assert {key: getattr(config, key) for key in expected} == expected
    assert sum(spec.size for spec in jax.tree.leaves(param_specs(config))) == num_weights
