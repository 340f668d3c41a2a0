"""Hugging Face's config.json and generation_config.json as a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.config_values import flag, number, whole_number
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.families import Family, family_of_architecture
from jaxserve.checkpoint.rope_config import rope_from_hf
from jaxserve.config import ModelConfig

_REFUSED_WHEN_SET = {
    "partial_rotary_factor": "rotary embeddings over a part of each head",
    "num_local_experts": "mixtures of experts",
}


def family_of_config(config: Mapping[str, Any], where: str) -> Family:
    """The family that `architectures` names.

    Raises:
        CheckpointError: if it is not supported, or not said.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise CheckpointError(f"{where}: architectures={architectures!r} must name one architecture")
    return family_of_architecture(str(architectures[0]), where)


def model_config_from_hf(
    config: Mapping[str, Any], *, eos_token_ids: tuple[int, ...], bos_token_id: int | None, where: str
) -> ModelConfig:
    """The architecture that a config.json describes.

    Args:
        eos_token_ids: the union over config, generation config and tokenizer.
        where: the file's name, for messages.

    Raises:
        CheckpointError: if a key is missing or malformed, or asks for what is not supported.
    """
    family = family_of_config(config, where)
    for key, meaning in _REFUSED_WHEN_SET.items():
        if config.get(key) not in (None, 1.0):
            raise CheckpointError(f"{where}: {key}={config[key]!r}: {meaning} is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{where}: hidden_act={config['hidden_act']!r} is not supported, only 'silu'")
    hidden_size, num_heads = (
        whole_number(config, "hidden_size", where),
        whole_number(config, "num_attention_heads", where),
    )
    attention_bias = flag(config, "attention_bias", where)
    rope_theta, rope_scaling = rope_from_hf(config, family, where)
    default_head_dim = hidden_size // max(1, num_heads)
    if "head_dim" not in config and family.default_head_dim is not None:
        default_head_dim = family.default_head_dim
    try:
        return ModelConfig(
            vocab_size=whole_number(config, "vocab_size", where),
            hidden_size=hidden_size,
            intermediate_size=whole_number(config, "intermediate_size", where),
            num_layers=whole_number(config, "num_hidden_layers", where),
            num_heads=num_heads,
            num_kv_heads=whole_number(config, "num_key_value_heads", where, num_heads),
            head_dim=whole_number(config, "head_dim", where, default_head_dim),
            max_position_embeddings=whole_number(
                config, "max_position_embeddings", where, family.default_max_position_embeddings
            ),
            rms_norm_eps=number(config, "rms_norm_eps", where, family.default_rms_norm_eps),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=flag(config, "tie_word_embeddings", where, family.default_tie_word_embeddings),
            attention_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            attention_output_bias=attention_bias and family.qkv_bias is None,
            mlp_bias=family.has_mlp_bias and flag(config, "mlp_bias", where),
            qk_norm=family.qk_norm,
            sliding_window=_sliding_window(config, family, where),
            eos_token_ids=eos_token_ids,
            bos_token_id=bos_token_id,
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _sliding_window(config: Mapping[str, Any], family: Family, where: str) -> int | None:
    if family.sliding_window == "none":
        return None
    if family.sliding_window == "opt-in" and not flag(config, "use_sliding_window", where):
        return None
    window = config.get("sliding_window", family.default_sliding_window)
    if window is not None and family.sliding_window == "opt-in":
        sliding = _layers_that_slide(config, where)
        if not any(sliding):
            return None
        if not all(sliding):
            raise CheckpointError(f"{where}: a sliding window in some layers only is not supported")
    return None if window is None else whole_number(config, "sliding_window", where, window)


def _layers_that_slide(config: Mapping[str, Any], where: str) -> list[bool]:
    """For each layer whether it slides: as `layer_types` lists them, else those from `max_window_layers` on."""
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list):
        return [layer_type == "sliding_attention" for layer_type in layer_types]
    first = whole_number(config, "max_window_layers", where, 28)
    return [layer >= first for layer in range(whole_number(config, "num_hidden_layers", where))]


def token_ids_from(value: Any, where: str) -> tuple[int, ...]:
    """`eos_token_id` as it may be written: absent, one id, or a list of them."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(map(_is_token_id, ids)):
        raise CheckpointError(f"{where}: eos_token_id={value!r} must be a token id or a list of them")
    return tuple(ids)


def bos_token_id_from(config: Mapping[str, Any], where: str) -> int | None:
    """`bos_token_id`, which may be absent.

    Raises:
        CheckpointError: if it is no token id.
    """
    value = config.get("bos_token_id")
    if value is not None and not _is_token_id(value):
        raise CheckpointError(f"{where}: bos_token_id={value!r} must be a token id")
    return value


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
