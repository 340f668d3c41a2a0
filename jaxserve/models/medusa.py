"""Medusa heads (Cai et al., 2024, https://arxiv.org/abs/2401.10774): each guesses the token at one place further ahead.

All of them read the model's last hidden state after its final norm, from which the model itself draws the next token; head
i guesses the token i + 1 places after that one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxserve.models.linear import head_scores
from jaxserve.models.param_spec import ParamSpec
from jaxserve.sharding.collectives import Collectives


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes of the heads.

    Attributes:
        num_blocks: residual blocks in each head, before its scores.

    Raises:
        ValueError: a size that is not positive.
    """

    num_heads: int
    num_blocks: int
    hidden_size: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_blocks", "hidden_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@struct.dataclass
class MedusaHeadParams:
    """One head. Leaves are arrays, or `ParamSpec`s where only the declaration is wanted."""

    blocks: tuple[Any, ...]  # [hidden, hidden] each
    biases: tuple[Any, ...]  # [hidden] each
    lm_head: Any  # [hidden, vocab]


@struct.dataclass
class MedusaParams:
    """All heads, the one that looks least far ahead first."""

    heads: tuple[MedusaHeadParams, ...]


def medusa_specs(config: MedusaConfig) -> MedusaParams:
    """The declaration of every array."""
    hidden = config.hidden_size
    head = MedusaHeadParams(
        blocks=(ParamSpec((hidden, hidden), ("hidden", "block"), hidden**-0.5),) * config.num_blocks,
        biases=(ParamSpec((hidden,), ("block",), 0.0),) * config.num_blocks,
        lm_head=ParamSpec((hidden, config.vocab_size), ("hidden", "vocab"), hidden**-0.5),
    )
    return MedusaParams(heads=(head,) * config.num_heads)


def medusa_logits(
    head: MedusaHeadParams, hidden: Float[Array, "rows hidden"], *, collectives: Collectives
) -> Float[Array, "rows vocab"]:
    """Float32 scores of one head.

    Args:
        hidden: last hidden states of the model after its final norm.
    """
    x = hidden
    with jax.named_scope("medusa_head"):
        for weight, bias in zip(head.blocks, head.biases, strict=True):
            inner = jnp.dot(x, weight, preferred_element_type=jnp.float32) + bias[None].astype(jnp.float32)
            x = (x.astype(jnp.float32) + jax.nn.silu(inner)).astype(hidden.dtype)
        return collectives.all_gather_last(head_scores(x, head.lm_head))
