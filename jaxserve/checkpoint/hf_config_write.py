"""A `ModelConfig` as Hugging Face's config.json: for models whose own format has none."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.families import Family
from jaxserve.checkpoint.rope_config import rope_to_hf
from jaxserve.config import ModelConfig


def hf_config_from_model(config: ModelConfig, family: Family, dtype: str) -> dict[str, Any]:
    """What `model_config_from_hf` reads the same config from.

    Args:
        dtype: of the weights.
    """
    written: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": dtype,
    }
    if config.rope_scaling is not None:
        written["rope_scaling"] = rope_to_hf(config.rope_scaling)
    if family.qkv_bias is None:
        written["attention_bias"] = config.attention_bias
    if family.has_mlp_bias:
        written["mlp_bias"] = config.mlp_bias
    if family.sliding_window != "none":
        written["sliding_window"] = config.sliding_window
        if family.sliding_window == "opt-in":
            written |= {"use_sliding_window": config.sliding_window is not None, "max_window_layers": 0}
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids)}
    return written | {key: value for key, value in ends.items() if value not in (None, [])}
