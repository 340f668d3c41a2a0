"""What changes logits before a token is drawn (penalties, biases), and the log probabilities that are reported."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxserve.sampling_params import MAX_LOGPROBS


@struct.dataclass
class ProcessorArrays:
    """Parameters and history of each row."""

    is_on: Bool[Array, " rows"]  # rows without any are left as they are
    output_counts: Int32[Array, "rows vocab"]  # how often the output holds each token
    in_prompt: Bool[Array, "rows vocab"]
    bias: Float[Array, "rows vocab"]
    stop_ids: Int32[Array, "rows stops"]  # past the vocabulary: none
    min_tokens: Int32[Array, " rows"]
    presence_penalty: Float[Array, " rows"]
    frequency_penalty: Float[Array, " rows"]
    repetition_penalty: Float[Array, " rows"]  # 1: off


@struct.dataclass
class Logprobs:
    """Log probabilities of one token a row, and of the most likely ones."""

    tokens: Float[Array, " rows"]
    top_ids: Int32[Array, "rows top"]
    top: Float[Array, "rows top"]  # descending


def process_logits(
    logits: Float[Array, "rows vocab"], arrays: ProcessorArrays, num_output: Int32[Array, " rows"]
) -> Float[Array, "rows vocab"]:
    """Logits to draw from: bias, then min_tokens, then repetition, frequency and presence penalty.

    Presence and frequency count output tokens alone, repetition the prompt's too.

    Args:
        num_output: tokens that each row has drawn before this one.
    """
    changed = logits.astype(jnp.float32) + arrays.bias
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    too_early = jnp.where((num_output < arrays.min_tokens)[:, None], arrays.stop_ids, logits.shape[1])
    changed = changed.at[rows, too_early].set(-jnp.inf, mode="drop")
    in_output = arrays.output_counts > 0
    penalty = arrays.repetition_penalty[:, None]
    repeated = jnp.where(changed > 0, changed / penalty, changed * penalty)
    changed = jnp.where(in_output | arrays.in_prompt, repeated, changed)
    changed = changed - arrays.frequency_penalty[:, None] * arrays.output_counts.astype(jnp.float32)
    changed = changed - jnp.where(in_output, arrays.presence_penalty[:, None], 0.0)
    return jnp.where(arrays.is_on[:, None], changed, logits.astype(jnp.float32))


def mask_logits(logits: Float[Array, "rows vocab"], words: Int32[Array, "rows words"]) -> Float[Array, "rows vocab"]:
    """Logits of the tokens whose bit is set (bit b of word w: token 32 w + b); minus infinity for the others."""
    bits = lax.shift_right_logical(words[:, :, None], jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
    allowed = bits.reshape(words.shape[0], -1)[:, : logits.shape[1]] == 1
    return jnp.where(allowed, logits.astype(jnp.float32), -jnp.inf)


def token_logprobs(logits: Float[Array, "rows vocab"], tokens: Int32[Array, " rows"]) -> Logprobs:
    """Log-softmax of raw logits in float32: of the given tokens and of the `MAX_LOGPROBS` most likely ones."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    top, top_ids = lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
    own = jnp.take_along_axis(logprobs, tokens[:, None], axis=1, mode="clip")[:, 0]
    return Logprobs(tokens=own, top_ids=top_ids.astype(jnp.int32), top=top)
