"""The angles of rotary position embeddings (https://arxiv.org/abs/2104.09864); `kernels/rope_write_kv.py` turns by them."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxserve.config import ModelConfig, RopeScaling

RopeTables = tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]  # cosines, sines


def with_longest_sequence(config: ModelConfig, length: int) -> ModelConfig:
    """The config of a model whose sequences have at most `length` tokens.

    Some scalings are others for longer sequences. Keys in the cache are turned already, and a sequence that grows past the
    original context would have to be computed anew with the others: so the longest sequence that is allowed decides, once,
    for every sequence. Models whose scaling does not depend on it stay as they are.
    """
    if config.rope_scaling is None or not config.rope_scaling.depends_on_length:
        return config
    return dataclasses.replace(config, max_position_embeddings=length)


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a position turns each pair by: float32 [head_dim / 2].

    Rounded to float32 step by step, as where the checkpoints were trained: some thousands of positions on, frequencies that
    are off by a few units in the last place, more exact ones too, give logits that are off by 1e-3.

    Where the scaling depends on the longest sequence, `max_position_embeddings` is taken for it.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    periods = np.float32(config.rope_theta) ** exponents
    scaling = config.rope_scaling
    if scaling is None:
        frequencies = np.float32(1.0) / periods
    elif scaling.kind == "linear":
        frequencies = np.float32(1.0) / periods / np.float32(scaling.factor)
    elif scaling.kind == "llama3":
        frequencies = _llama3(np.float32(1.0) / periods, scaling)
    elif scaling.kind == "yarn":
        frequencies = _yarn(periods, scaling, config.rope_theta)
    elif scaling.kind == "dynamic":
        frequencies = np.float32(1.0) / np.float32(_dynamic_theta(scaling, config)) ** exponents
    else:
        is_long = config.max_position_embeddings > scaling.original_max_position_embeddings
        factors = np.asarray(scaling.long_factors if is_long else scaling.short_factors, np.float32)
        frequencies = np.float32(1.0) / (factors * periods)
    return frequencies.astype(np.float32)


def _llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Wavelengths longer than the original context are stretched by `factor`, those shorter than original /
    high_frequency_factor are left, and those between are interpolated (Llama 3.1).
    """
    original = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    interpolated = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    is_long = wavelengths > original / scaling.low_frequency_factor
    is_short = wavelengths < original / scaling.high_frequency_factor
    return np.where(is_long, frequencies / scaling.factor, np.where(is_short, frequencies, interpolated))


def _yarn(periods: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    """Pairs that turn more than `fast_turns` times within the original context are left, those that turn less than
    `slow_turns` times are stretched by `factor`, and those between are mixed, in proportion to their place.
    """

    def pair(turns: float) -> float:
        """Which pair, counted in fractions, turns so often."""
        radians = scaling.original_max_position_embeddings / turns
        return len(periods) * math.log(radians / (2 * math.pi)) / math.log(theta)

    first, last = pair(scaling.fast_turns), pair(scaling.slow_turns)
    if scaling.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(periods) - 1)  # as published: the bound is twice the number of pairs
    width = last - first if last != first else 0.001
    pairs = np.arange(len(periods), dtype=np.float32)
    stretched = np.clip((pairs - np.float32(first)) / np.float32(width), np.float32(0.0), np.float32(1.0))
    left = np.float32(1.0) - stretched
    interpolated = np.float32(1.0) / (np.float32(scaling.factor) * periods)
    return interpolated * (np.float32(1.0) - left) + np.float32(1.0) / periods * left


def _dynamic_theta(scaling: RopeScaling, config: ModelConfig) -> float:
    """The base with which the longest sequence's turns stay within those of the original context."""
    excess = max(1.0, config.max_position_embeddings / scaling.original_max_position_embeddings)
    stretch = scaling.factor * excess - (scaling.factor - 1)
    return config.rope_theta * stretch ** (config.head_dim / (config.head_dim - 2))


def rope_tables(
    positions: Int32[Array, " tokens"], frequencies: np.ndarray, attention_factor: float = 1.0
) -> RopeTables:
    """Cosines and sines of each position's angles, in float32: bfloat16 angles are noise at long positions.

    Args:
        attention_factor: they are multiplied with it, so that scores are with its square.
    """
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
    cosines, sines = jnp.cos(angles), jnp.sin(angles)
    if attention_factor == 1.0:
        return cosines, sines
    factor = jnp.float32(attention_factor)
    return cosines * factor, sines * factor
