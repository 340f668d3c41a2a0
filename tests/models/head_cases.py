"""EAGLE and Medusa heads as their papers write them: plain float32 numpy over whole sequences, and random weights."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.models.eagle import EagleConfig, EagleParams
from jaxserve.models.medusa import MedusaParams
from jaxserve.models.param_spec import ParamSpec

LAYER = ModelConfig(
    vocab_size=24, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    max_position_embeddings=64,
)  # fmt: skip


def drawn(specs: Any, seed: int = 0) -> Any:
    """Random weights; norms and biases are not ones and zeros."""
    rng = np.random.default_rng(seed)

    def draw(spec: ParamSpec) -> np.ndarray:
        if spec.dtype == "int32":
            return np.sort(rng.choice(LAYER.vocab_size, spec.shape[0], replace=False)).astype(np.int32)
        values = rng.standard_normal(spec.shape).astype(np.float32)
        if spec.standard_deviation is None:
            return 1 + 0.3 * values
        return values * (spec.standard_deviation or 0.3)

    return jax.tree.map(draw, specs, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def turned(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Rotary embeddings over [tokens, heads, head_dim], the first token at place 0."""
    half = config.head_dim // 2
    angles = np.arange(len(x))[:, None] * config.rope_theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(x: np.ndarray, params: EagleParams, config: ModelConfig) -> np.ndarray:
    """Causal, grouped-query, with the output projection."""
    layer, tokens, group = params.layer, len(x), config.group_size
    qkv = np.einsum("ti,ikgd->tkgd", x, layer.wqkv)
    heads = qkv.shape[1]
    q = turned(qkv[:, :, :group].reshape(tokens, heads * group, -1), config).reshape(tokens, heads, group, -1)
    k, v = turned(qkv[:, :, group], config), qkv[:, :, group + 1]
    scores = np.einsum("tkgd,skd->kgts", q, k) / np.sqrt(config.head_dim)
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("kgts,skd,kgdh->th", weights, v, layer.wo)


def taken_in(params: EagleParams, config: EagleConfig, features: np.ndarray) -> np.ndarray:
    """What EAGLE-3 makes of the model's hidden states."""
    if config.input_norm is not None:
        parts = len(config.tap_layers) if config.input_norm == "each" else 1
        pairs = zip(np.split(features, parts, axis=1), np.split(params.input_norm, parts), strict=True)
        features = np.concatenate([norm(part, weight, config.layer.rms_norm_eps) for part, weight in pairs], axis=1)
    return features @ params.fc


def eagle_reference(
    params: EagleParams, config: EagleConfig, embedding: np.ndarray, tokens: np.ndarray, hidden: np.ndarray
) -> np.ndarray:
    """What follows each pair of a sequence [pairs, hidden].

    Args:
        tokens: of each pair: the one after the place of its hidden state.
    """
    eps, layer = config.layer.rms_norm_eps, params.layer
    embedded = embedding[tokens]
    if config.version == 1:
        x = np.concatenate([embedded, hidden], axis=1) @ params.fc
        x = x if params.fc_bias is None else x + params.fc_bias
        inputs = x
    else:
        normed = norm(hidden, layer.attention_norm, eps)
        x = normed if config.norms_residual else hidden
        inputs = np.concatenate([norm(embedded, params.embedding_norm, eps), normed], axis=1)
    x = x + attention(inputs, params, config.layer)
    gate_up = np.einsum("th,hgf->gtf", norm(x, layer.mlp_norm, eps), layer.w_gate_up)
    x = x + (silu(gate_up[0]) * gate_up[1]) @ layer.w_down
    return norm(x, params.final_norm, eps) if config.norms_output else x


def medusa_reference(params: MedusaParams, hidden: np.ndarray) -> np.ndarray:
    """Scores of every head [heads, rows, vocab]."""
    scores = []
    for head in params.heads:
        x = hidden
        for weight, bias in zip(head.blocks, head.biases, strict=True):
            x = x + silu(x @ weight + bias)
        scores.append(x @ head.lm_head)
    return np.stack(scores)
