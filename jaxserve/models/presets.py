"""Architectures by name, for benchmarks with random weights (`load_format="dummy"`)."""

from __future__ import annotations

import json
from pathlib import Path

from jaxserve.config import ModelConfig, RopeScaling

# Of its config.json, and not of `ModelConfig`.
_HUGGING_FACE_KEYS = ("architectures", "model_type", "num_hidden_layers")


def _presets() -> dict[str, ModelConfig]:
    return {
        "llama-3-8b": ModelConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_position_embeddings=8192,
            rope_theta=500000.0,
        ),
        "llama-3-70b": ModelConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            max_position_embeddings=8192,
            rope_theta=500000.0,
        ),
        "llama-3.2-1b": ModelConfig(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            max_position_embeddings=131072,
            rope_theta=500000.0,
            rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
            tie_word_embeddings=True,
        ),
    }


def preset_names() -> tuple[str, ...]:
    """Of the well-known models."""
    return tuple(_presets())


def preset_config(name: str) -> ModelConfig:
    """The architecture of a well-known model, or of a JSON file with `ModelConfig`'s fields.

    Raises:
        ValueError: unknown name, or a file that does not describe a model.
    """
    presets = _presets()
    if name in presets:
        return presets[name]
    if _is_json_file(name):
        try:
            data = json.loads(Path(name).read_text())
            if isinstance(data, dict) and any(key in data for key in _HUGGING_FACE_KEYS):
                raise ValueError(
                    "it looks like a Hugging Face config: give the folder that holds its weights, or a JSON file with "
                    "ModelConfig's fields"
                )
            return ModelConfig.from_json(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} does not describe a model: {error}") from error
    raise ValueError(f"no architecture is called {name!r}: use one of {sorted(presets)}, or a JSON file")


def is_preset(name: str) -> bool:
    """Whether `preset_config` is to be asked for a model that a user calls so: a file may still not describe one.

    A local folder or file counts before a well-known model of that name, as `jaxserve serve` takes it.
    """
    return _is_json_file(name) or (name in _presets() and not Path(name).exists())


def _is_json_file(name: str) -> bool:
    return Path(name).suffix == ".json" and Path(name).is_file()
