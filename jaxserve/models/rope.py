"""The angles of rotary position embeddings (https://arxiv.org/abs/2104.09864); `kernels/rope_write_kv.py` turns by them."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxserve.config import ModelConfig, RopeScaling

RopeTables = tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]  # cosines, sines


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a position turns each pair by: float32 [head_dim / 2].

    Rounded to float32 step by step, as where the checkpoints were trained: some thousands of positions on, frequencies that
    are off by a few units in the last place, more exact ones too, give logits that are off by 1e-3.

    With `rope_scaling` of kind "llama3", wavelengths longer than the original context are stretched by `factor`, those
    shorter than original / high_frequency_factor are left, and those between are interpolated (Llama 3.1).
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(1.0) / np.float32(config.rope_theta) ** exponents
    if config.rope_scaling is not None:
        frequencies = _scale(frequencies, config.rope_scaling)
    return frequencies.astype(np.float32)


def _scale(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    original = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    interpolated = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    is_long = wavelengths > original / scaling.low_frequency_factor
    is_short = wavelengths < original / scaling.high_frequency_factor
    return np.where(is_long, frequencies / scaling.factor, np.where(is_short, frequencies, interpolated))


def rope_tables(positions: Int32[Array, " tokens"], frequencies: np.ndarray) -> RopeTables:
    """Cosines and sines of each position's angles, in float32: bfloat16 angles are noise at long positions."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
    return jnp.cos(angles), jnp.sin(angles)
