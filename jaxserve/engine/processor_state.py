"""Penalties and biases of every slot, on the device; written when a sequence that has any begins to decode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int32

from jaxserve.engine.sequence import Sequence
from jaxserve.models.logit_processors import ProcessorArrays
from jaxserve.sampling_params import MAX_LOGIT_BIAS

MAX_SUPPRESSED_IDS = 256  # end-of-text and stop tokens that min_tokens can hold back


@struct.dataclass
class ProcessorState:
    """One row for each slot; donated to every program that touches it. Rows of slots without processors are stale."""

    output_counts: Int32[Array, "slots vocab"]
    in_prompt: Bool[Array, "slots vocab"]
    bias: Float[Array, "slots vocab"]
    stop_ids: Int32[Array, "slots stops"]
    min_tokens: Int32[Array, " slots"]
    penalties: Float[Array, "slots 3"]  # presence, frequency, repetition


@dataclass(frozen=True)
class SlotProcessors:
    """One slot's row, as the host sends it; ids past the vocabulary are padding."""

    slot: np.ndarray  # []
    prompt_ids: np.ndarray  # [longest sequence]
    output_ids: np.ndarray  # [longest sequence]
    bias_ids: np.ndarray  # [MAX_LOGIT_BIAS]
    biases: np.ndarray  # [MAX_LOGIT_BIAS]
    stop_ids: np.ndarray  # [MAX_SUPPRESSED_IDS]
    min_tokens: np.ndarray  # []
    penalties: np.ndarray  # [3]

    def arrays(self) -> tuple[np.ndarray, ...]:
        return tuple(vars(self).values())


def empty_processors(slots: int, vocab_size: int) -> ProcessorState:
    return ProcessorState(
        output_counts=jnp.zeros((slots, vocab_size), jnp.int32),
        in_prompt=jnp.zeros((slots, vocab_size), jnp.bool_),
        bias=jnp.zeros((slots, vocab_size), jnp.float32),
        stop_ids=jnp.full((slots, MAX_SUPPRESSED_IDS), vocab_size, jnp.int32),
        min_tokens=jnp.zeros((slots,), jnp.int32),
        penalties=jnp.ones((slots, 3), jnp.float32),
    )


def slot_processors(sequence: Sequence, slot: int, longest: int, vocab_size: int) -> SlotProcessors:
    """The row of a sequence whose tokens are all known to the host."""
    sampling = sequence.request.sampling
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]

    def padded(ids: list[int], size: int) -> np.ndarray:
        array = np.full(size, vocab_size, np.int32)
        array[: len(ids)] = ids
        return array

    biases = np.zeros(MAX_LOGIT_BIAS, np.float32)
    biases[: len(sampling.logit_bias)] = [bias for _, bias in sampling.logit_bias]
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    return SlotProcessors(
        slot=np.asarray(slot, np.int32),
        prompt_ids=padded(prompt, longest),
        output_ids=padded(sequence.token_ids[len(prompt) :], longest),
        bias_ids=padded([token for token, _ in sampling.logit_bias], MAX_LOGIT_BIAS),
        biases=biases,
        stop_ids=padded(sorted(sequence.stop_token_ids)[:MAX_SUPPRESSED_IDS], MAX_SUPPRESSED_IDS),
        min_tokens=np.asarray(sampling.min_tokens, np.int32),
        penalties=np.asarray(penalties, np.float32),
    )


def slot_processors_like(longest: int, like: Callable[[tuple[int, ...], Any], Any]) -> tuple[Any, ...]:
    """Shapes of `SlotProcessors.arrays()`, made by `like(shape, dtype)`."""
    return SlotProcessors(
        slot=like((), jnp.int32),
        prompt_ids=like((longest,), jnp.int32),
        output_ids=like((longest,), jnp.int32),
        bias_ids=like((MAX_LOGIT_BIAS,), jnp.int32),
        biases=like((MAX_LOGIT_BIAS,), jnp.float32),
        stop_ids=like((MAX_SUPPRESSED_IDS,), jnp.int32),
        min_tokens=like((), jnp.int32),
        penalties=like((3,), jnp.float32),
    ).arrays()


def set_slot(
    state: ProcessorState,
    slot: Array,
    prompt_ids: Array,
    output_ids: Array,
    bias_ids: Array,
    biases: Array,
    stop_ids: Array,
    min_tokens: Array,
    penalties: Array,
) -> ProcessorState:
    """Overwrites one slot's row with what `slot_processors` describes."""
    vocab_size = state.bias.shape[1]
    counts = jnp.zeros((vocab_size,), jnp.int32).at[output_ids].add(1, mode="drop")
    in_prompt = jnp.zeros((vocab_size,), jnp.bool_).at[prompt_ids].set(True, mode="drop")
    bias = jnp.zeros((vocab_size,), jnp.float32).at[bias_ids].add(biases, mode="drop")
    return ProcessorState(
        output_counts=state.output_counts.at[slot].set(counts),
        in_prompt=state.in_prompt.at[slot].set(in_prompt),
        bias=state.bias.at[slot].set(bias),
        stop_ids=state.stop_ids.at[slot].set(stop_ids),
        min_tokens=state.min_tokens.at[slot].set(min_tokens),
        penalties=state.penalties.at[slot].set(penalties),
    )


def rows_of(state: ProcessorState, is_on: Bool[Array, " slots"], slots: Int32[Array, " rows"]) -> ProcessorArrays:
    """The processors of the rows that sample for these slots."""

    def rows(array: Array) -> Array:
        return jnp.take(array, slots, axis=0, mode="clip")

    penalties = rows(state.penalties)
    return ProcessorArrays(
        is_on=rows(is_on),
        output_counts=rows(state.output_counts),
        in_prompt=rows(state.in_prompt),
        bias=rows(state.bias),
        stop_ids=rows(state.stop_ids),
        min_tokens=rows(state.min_tokens),
        presence_penalty=penalties[:, 0],
        frequency_penalty=penalties[:, 1],
        repetition_penalty=penalties[:, 2],
    )


def count_verified(
    state: ProcessorState,
    slots: Int32[Array, " rows"],
    tokens: Int32[Array, "rows width"],
    counts: Int32[Array, " rows"],
) -> ProcessorState:
    """As `count_tokens`, the first `counts` tokens of each row."""
    counted = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < counts[:, None]
    output_counts = state.output_counts.at[slots[:, None], tokens].add(counted.astype(jnp.int32), mode="drop")
    return dataclasses.replace(state, output_counts=output_counts)


def count_tokens(state: ProcessorState, slots: Int32[Array, " rows"], tokens: Int32[Array, " rows"]) -> ProcessorState:
    """Takes in the tokens that were drawn; a slot past the end is dropped."""
    return ProcessorState(
        output_counts=state.output_counts.at[slots, tokens].add(1, mode="drop"),
        in_prompt=state.in_prompt,
        bias=state.bias,
        stop_ids=state.stop_ids,
        min_tokens=state.min_tokens,
        penalties=state.penalties,
    )
