"""GGUF metadata as a `ModelConfig`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.gguf_source import GGUFFile
from jaxserve.checkpoint.rope_config import yarn_attention_factor
from jaxserve.config import ModelConfig, RopeScaling

_ROPE_FREQUENCIES = "rope_freqs.weight"
_LONGROPE_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
# The file holds the factor of each frequency, not the numbers they were made from; every Llama 3.x was made from these.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def model_config_from_gguf(file: GGUFFile, *, eos_token_ids: tuple[int, ...], bos_token_id: int | None) -> ModelConfig:
    """The architecture that a GGUF describes.

    Raises:
        CheckpointError: if a value is missing or malformed, or asks for what is not supported.
    """
    names, known = set(file.names()), file.family.gguf_names
    hidden_size = _integer(file, "embedding_length")
    head_dim = _integer(file, "attention.key_length", hidden_size // file.num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _integer(file, key, head_dim) != head_dim:
            raise CheckpointError(f"{file.path}: {key}={_integer(file, key)} must equal the head size {head_dim}")
    rope_theta = _number(file, "rope.freq_base", 10000.0)
    if known.embedding not in names:
        raise CheckpointError(f"{file.path}: tensor {known.embedding!r} is missing: fetch the file again")
    shape = file.shape(known.embedding)
    if len(shape) != 2 or not shape[0]:
        raise CheckpointError(
            f"{file.path}: tensor {known.embedding!r} has shape {shape}, it must be (tokens, {hidden_size}): fetch the file "
            "again"
        )
    try:
        return ModelConfig(
            vocab_size=shape[0],
            hidden_size=hidden_size,
            intermediate_size=_integer(file, "feed_forward_length"),
            num_layers=_integer(file, "block_count"),
            num_heads=file.num_heads,
            num_kv_heads=file.num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_integer(file, "context_length"),
            rms_norm_eps=_shortest_float(_number(file, "attention.layer_norm_rms_epsilon")),
            rope_theta=_shortest_float(rope_theta),
            rope_scaling=_rope_scaling(file, rope_theta, head_dim),
            tie_word_embeddings=known.lm_head not in names,
            attention_bias=known.in_layer(0, known.qkv or "q", "bias") in names,
            attention_output_bias=known.in_layer(0, "o", "bias") in names,
            mlp_bias=known.in_layer(0, "up", "bias") in names,
            qk_norm=file.family.qk_norm,
            sliding_window=_integer(file, "attention.sliding_window", 0) or None,
            eos_token_ids=eos_token_ids,
            bos_token_id=bos_token_id,
        )
    except ValueError as error:
        raise CheckpointError(f"{file.path}: {error}") from error


def eos_token_ids_from_gguf(file: GGUFFile) -> tuple[int, ...]:
    """Ids that end an answer: end of text, of turn, of message."""
    found = [value for key in ("eos", "eot", "eom") if (value := token_id_from_gguf(file, key)) is not None]
    return tuple(dict.fromkeys(found))


def token_id_from_gguf(file: GGUFFile, key: str) -> int | None:
    """The id of a special token such as "bos"; None: the file says none.

    Raises:
        CheckpointError: if it is no id.
    """
    value = file.get(f"tokenizer.ggml.{key}_token_id")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise CheckpointError(f"{file.path}: {key}_token_id={value!r} must be a token id")
    return value


def llama3_frequency_factors(scaling: RopeScaling, theta: float, head_dim: int) -> np.ndarray:
    """By how much each rotary frequency is divided (https://arxiv.org/abs/2407.21783 and its published code).

    Returns:
        float64 array of head_dim / 2 factors.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    smooth = (scaling.original_max_position_embeddings / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling.factor + smooth)


def _rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> RopeScaling | None:
    kind = file.architecture("rope.scaling.type")
    if any(name in file.names() for name in _LONGROPE_FACTORS):
        return _longrope(file, head_dim)
    if kind == "linear" or (kind is None and _linear_key(file) is not None):
        if _ROPE_FREQUENCIES in file.names():
            raise CheckpointError(
                f"{file.path}: linear rope scaling and tensor {_ROPE_FREQUENCIES!r} are not supported at once"
            )
        return RopeScaling("linear", _number(file, _linear_key(file) or "rope.scaling.factor"))
    if kind == "yarn":
        return _yarn(file)
    if kind not in (None, "none"):
        raise CheckpointError(
            f"{file.path}: rope scaling {kind!r} is not supported: only none, linear, llama3, yarn, longrope"
        )
    if _ROPE_FREQUENCIES not in file.names():
        return None
    factors = _factors(file, _ROPE_FREQUENCIES, head_dim).astype(np.float64)
    scaling = RopeScaling("llama3", float(factors.max()), _LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL)
    expected = llama3_frequency_factors(scaling, theta, head_dim)
    if not np.allclose(factors, expected, rtol=1e-5, atol=0.0):
        raise CheckpointError(f"{file.path}: tensor {_ROPE_FREQUENCIES!r} is supported only with Llama 3's scaling")
    return scaling


def _factors(file: GGUFFile, name: str, head_dim: int) -> np.ndarray:
    """A tensor with a number for each rotary frequency."""
    if name not in file.names():
        raise CheckpointError(f"{file.path}: tensor {name!r} is missing: fetch the file again")
    if math.prod(file.shape(name)) != head_dim // 2:  # told before so many are read
        raise CheckpointError(
            f"{file.path}: tensor {name!r} has shape {file.shape(name)}, it must be ({head_dim // 2},), a factor for each "
            f"rotary frequency of heads of {head_dim}: fetch the file again"
        )
    return file.read(name).reshape(-1)


def _linear_key(file: GGUFFile) -> str | None:
    """Where the factor is, if there is one: older files do not say the kind, and the oldest have a key of another name."""
    keys = ("rope.scaling.factor", "rope.scale_linear")
    return next((key for key in keys if file.architecture(key) not in (None, 0.0)), None)


def _yarn(file: GGUFFile) -> RopeScaling:
    for key in ("yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor"):
        if file.architecture(f"rope.scaling.{key}", None) is not None:
            raise CheckpointError(f"{file.path}: metadata rope.scaling.{key} is not supported")
    factor = _shortest_float(_number(file, "rope.scaling.factor"))
    own_factor = _shortest_float(_number(file, "rope.scaling.attn_factor", 1.0))
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=_integer(file, "rope.scaling.original_context_length"),
        attention_factor=own_factor * yarn_attention_factor(factor),
        fast_turns=_shortest_float(_number(file, "rope.scaling.yarn_beta_fast", 32.0)),
        slow_turns=_shortest_float(_number(file, "rope.scaling.yarn_beta_slow", 1.0)),
    )


def _longrope(file: GGUFFile, head_dim: int) -> RopeScaling:
    short_factors, long_factors = (
        tuple(map(_shortest_float, _factors(file, name, head_dim))) for name in _LONGROPE_FACTORS
    )
    return RopeScaling(
        "longrope",
        original_max_position_embeddings=_integer(file, "rope.scaling.original_context_length"),
        attention_factor=_shortest_float(_number(file, "rope.scaling.attn_factor")),
        short_factors=short_factors,
        long_factors=long_factors,
    )


def _shortest_float(value: float) -> float:
    """GGUF's floats have 32 bits: 1e-5 reads as 9.99999974e-06. Meant is the shortest decimal with that float32."""
    return float(np.format_float_scientific(np.float32(value)))


def _integer(file: GGUFFile, key: str, default: int | None = None) -> int:
    value: Any = file.architecture(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{file.path}: metadata {key}={value!r} must be a whole number")
    return value


def _number(file: GGUFFile, key: str, default: float | None = None) -> float:
    value: Any = file.architecture(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CheckpointError(f"{file.path}: metadata {key}={value!r} must be a number")
    return float(value)
