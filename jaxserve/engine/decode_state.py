"""State of every slot that stays on the device from step to step, so that the host sends only what changed."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxserve.engine.device_batch import Bucket, Sizes, as_float, as_unsigned
from jaxserve.models.batch import Batch
from jaxserve.models.sampling import SamplingArrays
from jaxserve.models.speculative_sampling import Drafts, Verified


@struct.dataclass
class DecodeState:
    """One row for each slot; donated to every step."""

    last_tokens: Int32[Array, " slots"]  # sampled last, input of the next decode step
    kv_lens: Int32[Array, " slots"]  # tokens whose keys and values are in the cache
    output_counts: Int32[Array, " slots"]  # output tokens drawn so far: the random counter
    page_table: Int32[Array, "slots pages_per_seq"]
    seeds: UInt32[Array, "slots 2"]
    temperature: Float[Array, " slots"]
    top_p: Float[Array, " slots"]
    top_k: Int32[Array, " slots"]
    min_p: Float[Array, " slots"]
    processed: Bool[Array, " slots"]  # whether penalties or biases change the slot's logits
    speculation: SpeculationState | None = None  # only where the engine speculates


@struct.dataclass
class SpeculationState:
    """What speculation needs to know of every slot besides."""

    history: Int32[Array, "slots length"]  # prompt and output; the token at place p is the one whose keys go to place p
    seeded: Bool[Array, " slots"]  # whether its text must be the one that its seed gives without speculation


def empty_state(sizes: Sizes, *, speculates: bool = False) -> DecodeState:
    slots = sizes.max_num_seqs
    speculation = None
    if speculates:
        speculation = SpeculationState(
            history=jnp.zeros((slots, sizes.longest), jnp.int32), seeded=jnp.zeros((slots,), jnp.bool_)
        )
    return DecodeState(
        last_tokens=jnp.zeros((slots,), jnp.int32),
        kv_lens=jnp.zeros((slots,), jnp.int32),
        output_counts=jnp.zeros((slots,), jnp.int32),
        page_table=jnp.zeros((slots, sizes.pages_per_seq), jnp.int32),
        seeds=jnp.zeros((slots, 2), jnp.uint32),
        temperature=jnp.zeros((slots,), jnp.float32),
        top_p=jnp.ones((slots,), jnp.float32),
        top_k=jnp.zeros((slots,), jnp.int32),
        min_p=jnp.zeros((slots,), jnp.float32),
        processed=jnp.zeros((slots,), jnp.bool_),
        speculation=speculation,
    )


def take_step(state: DecodeState, fields: dict[str, Array]) -> DecodeState:
    """Takes in what the host sent for a step: new prompts, and new pages of those who decode."""
    state = _take_prefill_rows(state, fields)
    return dataclasses.replace(
        state,
        page_table=state.page_table.at[fields["decode_slots"], fields["decode_new_page_indices"]].set(
            fields["decode_new_pages"], mode="drop"
        ),
    )


def begin_verification(
    state: DecodeState, fields: dict[str, Array], drafts: Drafts, sizes: Sizes
) -> tuple[DecodeState, Batch, Int32[Array, " tokens"], Int32[Array, " rows"]]:
    """As `begin_step`, for a step of decode rows that bring drafts: all their tokens get logits.

    Every token is a decode row of the forward pass by itself, so that drafts are attended to by the same kernel, with the
    same rounding, as without speculation, and few long sequences are spread over the device as well as many. The lengths
    of the cache stay: how many of the tokens count is known after the verification.
    """
    state = take_step(state, fields)
    slots = fields["decode_slots"]
    last = jnp.take(state.last_tokens, slots, mode="clip")
    token_ids = jnp.concatenate([last[:, None], drafts.token_ids], axis=1)
    ahead = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
    is_token = (slots < sizes.max_num_seqs)[:, None] & (ahead <= drafts.counts[:, None])
    places = jnp.take(state.kv_lens, slots, mode="clip")[:, None] + ahead
    batch = decode_batch(state, slots, token_ids, places, is_token, sizes)
    return state, batch, jnp.arange(token_ids.size, dtype=jnp.int32), slots


def decode_batch(
    state: DecodeState,
    slots: Int32[Array, " rows"],
    token_ids: Int32[Array, "rows width"],
    positions: Int32[Array, "rows width"],
    is_token: Bool[Array, "rows width"],
    sizes: Sizes,
) -> Batch:
    """A forward pass of several tokens of each slot, each as a decode row; those that are none are padding."""
    page_table = jnp.take(state.page_table, slots, axis=0, mode="clip")
    positions = jnp.where(is_token, positions, 0)
    pages = jnp.take_along_axis(page_table, positions // sizes.page_size, axis=1, mode="clip")
    nothing = jnp.zeros((0,), jnp.int32)
    return Batch(
        token_ids=token_ids.reshape(-1),
        positions=positions.reshape(-1),
        write_pages=jnp.where(is_token, pages, sizes.num_pages).reshape(-1),
        write_offsets=(positions % sizes.page_size).reshape(-1),
        decode_page_table=page_table if token_ids.shape[1] == 1 else jnp.repeat(page_table, token_ids.shape[1], axis=0),
        decode_kv_lens=jnp.where(is_token, positions + 1, 0).reshape(-1),
        prefill_page_table=jnp.zeros((0, page_table.shape[1]), jnp.int32),
        prefill_query_starts=jnp.zeros((1,), jnp.int32),
        prefill_kv_lens=nothing,
    )


def begin_step(
    state: DecodeState, fields: dict[str, Array], bucket: Bucket, sizes: Sizes
) -> tuple[DecodeState, Batch, Int32[Array, " rows"], Int32[Array, " rows"]]:
    """Takes in what the host sent for a step without drafts.

    Returns:
        The new state; the forward pass's batch; which of its tokens get logits [rows]; and the slot that each of those rows
        samples for [rows] (max_num_seqs: none).
    """
    state = take_step(state, fields)
    slots = fields["decode_slots"]
    is_row = slots < sizes.max_num_seqs
    places = jnp.take(state.kv_lens, slots, mode="clip")
    last_tokens = jnp.take(state.last_tokens, slots, mode="clip")
    batch = decode_batch(state, slots, last_tokens[:, None], places[:, None], is_row[:, None], sizes)
    state = dataclasses.replace(state, kv_lens=state.kv_lens.at[slots].add(1, mode="drop"))
    batch, last_tokens = with_prefill(batch, fields, bucket, sizes)
    logit_tokens = jnp.concatenate([jnp.arange(bucket.decode_rows, dtype=jnp.int32), bucket.decode_rows + last_tokens])
    sampling_prefill = jnp.where(fields["prefill_samples"] == 1, fields["prefill_slots"], sizes.max_num_seqs)
    return state, batch, logit_tokens, jnp.concatenate([slots, sampling_prefill])


def _take_prefill_rows(state: DecodeState, fields: dict[str, Array]) -> DecodeState:
    """Sets the whole state of every slot that a prefill chunk belongs to."""
    slots = fields["prefill_slots"]
    lengths = jnp.diff(fields["prefill_query_starts"])
    floats = as_float(fields["prefill_float_bits"])  # [rows, 3]

    def put(array: Array, values: Array) -> Array:
        return array.at[slots].set(values, mode="drop")

    return dataclasses.replace(
        state,
        kv_lens=put(state.kv_lens, fields["prefill_starts"] + lengths),
        output_counts=put(state.output_counts, fields["prefill_output_indices"]),
        page_table=put(state.page_table, fields["prefill_page_table"]),
        seeds=put(state.seeds, as_unsigned(fields["prefill_seeds"])),
        temperature=put(state.temperature, floats[:, 0]),
        top_p=put(state.top_p, floats[:, 1]),
        min_p=put(state.min_p, floats[:, 2]),
        top_k=put(state.top_k, fields["prefill_top_k"]),
        processed=put(state.processed, fields["prefill_processed"] == 1),
        speculation=None
        if state.speculation is None
        else dataclasses.replace(
            state.speculation, seeded=put(state.speculation.seeded, fields["prefill_seeded"] == 1)
        ),
    )


def with_prefill(
    decode: Batch, fields: dict[str, Array], bucket: Bucket, sizes: Sizes
) -> tuple[Batch, Int32[Array, " prefill_rows"]]:
    """A step's prefill chunks after its decode rows, and the index of each chunk's last token among the chunks' tokens."""
    prefill, last_tokens = _prefill_tokens(fields, bucket, sizes)
    token_ids, positions, write_pages = (
        jnp.concatenate([getattr(decode, name), prefill[name]]) for name in ("token_ids", "positions", "write_pages")
    )
    batch = Batch(
        token_ids=token_ids,
        positions=positions,
        write_pages=write_pages,
        write_offsets=positions % sizes.page_size,
        decode_page_table=decode.decode_page_table,
        decode_kv_lens=decode.decode_kv_lens,
        prefill_page_table=fields["prefill_page_table"],
        prefill_query_starts=fields["prefill_query_starts"],
        prefill_kv_lens=fields["prefill_starts"] + jnp.diff(fields["prefill_query_starts"]),
    )
    return batch, last_tokens


def _prefill_tokens(
    fields: dict[str, Array], bucket: Bucket, sizes: Sizes
) -> tuple[dict[str, Array], Int32[Array, " prefill_rows"]]:
    """Token ids, positions and pages of the chunks' tokens, and the index of each chunk's last token."""
    starts = fields["prefill_query_starts"]
    if bucket.prefill_rows == 0:
        nothing = jnp.zeros((0,), jnp.int32)
        return {"token_ids": nothing, "positions": nothing, "write_pages": nothing}, nothing
    index = jnp.arange(bucket.prefill_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(starts[1:], index, side="right").astype(jnp.int32)  # prefill_rows for padding
    is_token = index < starts[-1]
    row = jnp.minimum(row, bucket.prefill_rows - 1)
    positions = jnp.where(is_token, fields["prefill_starts"][row] + index - starts[row], 0)
    pages = fields["prefill_page_table"][row, positions // sizes.page_size]
    tokens = {
        "token_ids": fields["prefill_token_ids"],
        "positions": positions,
        "write_pages": jnp.where(is_token, pages, sizes.num_pages),
    }
    return tokens, jnp.maximum(starts[1:] - 1, 0)


def sampling_arrays(
    state: DecodeState, slots: Int32[Array, " rows"]
) -> tuple[SamplingArrays, UInt32[Array, "rows 2"], Int32[Array, " rows"]]:
    """Sampling parameters, seeds and random counters of the rows that sample for these slots."""

    def rows(array: Array) -> Array:
        return jnp.take(array, slots, axis=0, mode="clip")

    params = SamplingArrays(
        temperature=rows(state.temperature), top_p=rows(state.top_p), top_k=rows(state.top_k), min_p=rows(state.min_p)
    )
    return params, rows(state.seeds), rows(state.output_counts)


def end_step(state: DecodeState, slots: Int32[Array, " rows"], tokens: Int32[Array, " rows"]) -> DecodeState:
    """Keeps the sampled tokens as the next step's input."""
    return dataclasses.replace(
        state,
        last_tokens=state.last_tokens.at[slots].set(tokens, mode="drop"),
        output_counts=state.output_counts.at[slots].add(1, mode="drop"),
        speculation=_remember(state, slots, tokens[:, None], jnp.ones_like(slots), ahead=0),
    )


def end_verification(state: DecodeState, slots: Int32[Array, " rows"], verified: Verified) -> DecodeState:
    """Takes in what the rows of a step with drafts go on with; the keys and values of refused drafts are overwritten."""
    last = jnp.take_along_axis(verified.token_ids, verified.counts[:, None] - 1, axis=1)[:, 0]
    return dataclasses.replace(
        state,
        last_tokens=state.last_tokens.at[slots].set(last, mode="drop"),
        kv_lens=state.kv_lens.at[slots].add(verified.counts, mode="drop"),
        output_counts=state.output_counts.at[slots].add(verified.counts, mode="drop"),
        speculation=_remember(state, slots, verified.token_ids, verified.counts, ahead=1),
    )


def _remember(
    state: DecodeState,
    slots: Int32[Array, " rows"],
    tokens: Int32[Array, "rows width"],
    counts: Int32[Array, " rows"],
    *,
    ahead: int,
) -> SpeculationState | None:
    """Appends tokens to the slots' histories; `ahead`: of what is in the cache, the place of the first one."""
    if state.speculation is None:
        return None
    history = state.speculation.history
    width = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    places = jnp.take(state.kv_lens, slots, mode="clip")[:, None] + ahead + width
    places = jnp.where(width < counts[:, None], places, history.shape[1])  # past the end: dropped
    return dataclasses.replace(state.speculation, history=history.at[slots[:, None], places].set(tokens, mode="drop"))


def set_history(state: DecodeState, slot: Int32[Array, ""], tokens: Int32[Array, " length"]) -> DecodeState:
    """Writes the known tokens of a sequence that begins to decode; those past them are padding."""
    if state.speculation is None:
        raise ValueError("this engine does not speculate: it keeps no histories")
    history = state.speculation.history.at[slot].set(tokens, mode="drop")
    return dataclasses.replace(state, speculation=dataclasses.replace(state.speculation, history=history))
