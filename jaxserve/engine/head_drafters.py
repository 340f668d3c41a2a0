"""Drafters that read the target's hidden states: EAGLE, EAGLE-3 and Medusa heads.

After a step, when its tokens are drawn, a head is shown the hidden states of all tokens that count: `observe`. So it keeps
up with every sequence, prompts included, and the hidden state that its next draft begins with is there before the host
knows of it. Steps that the scheduler does not have shown leave gaps in what it has seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxserve.engine.decode_state import decode_batch, with_prefill
from jaxserve.engine.drafters import Drafter, DraftStep
from jaxserve.engine.model_drafter import Draws, is_row
from jaxserve.models.batch import Batch
from jaxserve.models.eagle import EagleConfig, EagleParams, eagle_forward, eagle_logits, take_in
from jaxserve.models.kv_cache import KVCache
from jaxserve.models.medusa import MedusaParams, medusa_logits
from jaxserve.models.params import LlamaParams
from jaxserve.models.speculative_sampling import Drafts
from jaxserve.sharding.collectives import Collectives


class Seen(NamedTuple):
    """What a step has left for those who read hidden states.

    Attributes:
        features: of all its tokens, those of decode rows first, as `ProgramFactory` gives them.
        following: of each prefill row, the token after its chunk; not looked at where the row samples.
        counts: of each decode row, how many of its tokens count.
    """

    features: Float[Array, "tokens size"]
    following: Int32[Array, " prefill_rows"]
    counts: Int32[Array, " rows"]

    def padded(self, num_rows: int, width: int) -> Seen:
        """The same of a step without prompts, with so many decode rows of `width` tokens."""
        missing = num_rows - self.counts.shape[0]
        return self._replace(
            features=jnp.pad(self.features, ((0, missing * width), (0, 0))),
            counts=jnp.pad(self.counts, (0, missing), constant_values=1),
        )


class HeadDrafter(Drafter, Protocol):
    """A drafter that reads hidden states of the target.

    Attributes:
        tap_layers: layers of the target whose inputs it reads; (): the hidden state after the final norm.
    """

    @property
    def tap_layers(self) -> tuple[int, ...]: ...

    def observe(self, params: Any, memory: Any, step: DraftStep, seen: Seen) -> Any:
        """Takes in a step when its tokens are drawn.

        Args:
            step: with the state after that.
        """
        ...


@struct.dataclass
class HeadArrays:
    """What a head reads: its own arrays, and the target's without layers, which are no copies."""

    head: Any
    target: LlamaParams


@struct.dataclass
class EagleMemory:
    """Of an EAGLE head: keys and values of all pairs, and what it makes of each slot's last one."""

    cache: KVCache
    hidden: Float[Array, "slots hidden"]


@dataclass(frozen=True)
class EagleDrafter:
    """Drafts by one decoder layer for each token, all of them in one program.

    A pair's keys and values lie where the target has those of its hidden state's token. In the last place of a page that
    several prompts share, the pair's token is that of whoever wrote it: drafts of the others may be a little worse for it.

    Attributes:
        config: as the devices run it.
        collectives: of the mesh.
        params_specs, memory_specs: of its `HeadArrays` and `EagleMemory`.
    """

    config: EagleConfig
    collectives: Collectives
    params_specs: Any
    memory_specs: Any
    has_probabilities: bool = True
    reads_prompts: bool = False
    uses_target_cache: bool = False
    looks_back: bool = False

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.config.tap_layers

    def draft(self, params: HeadArrays, memory: EagleMemory, step: DraftStep) -> tuple[EagleMemory, Drafts]:
        """See `Drafter`."""
        num_drafts, rows = step.bucket.num_drafts, step.num_rows
        hidden = jnp.take(memory.hidden, step.slots, axis=0, mode="clip")
        draws = Draws(step)
        token, counts, log_q = draws.draw(self._logits(params, hidden), jnp.int32(0), draws.counts)
        tokens = jnp.zeros((rows, num_drafts), jnp.int32).at[:, 0].set(token)
        all_log_q = None
        if log_q is not None:
            all_log_q = jnp.zeros((rows, num_drafts, log_q.shape[1]), jnp.float32).at[:, 0].set(log_q)

        def next_draft(index: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            cache, hidden, tokens, counts, all_log_q = carry
            last = lax.dynamic_index_in_dim(tokens, index - 1, 1)  # [rows, 1]
            places = step.kv_lens[:, None] - 1 + index
            is_wanted = (index < step.wanted)[:, None] & is_row(step)
            batch = decode_batch(step.state, step.slots, last, places, is_wanted, step.sizes)
            hidden, cache = self._forward(params, cache, batch, hidden)
            token, counts, log_q = draws.draw(self._logits(params, hidden), index, counts)
            tokens = lax.dynamic_update_index_in_dim(tokens, token, index, 1)
            if log_q is not None:
                all_log_q = lax.dynamic_update_index_in_dim(all_log_q, log_q, index, 1)
            return cache, hidden, tokens, counts, all_log_q

        carry = memory.cache, hidden, tokens, counts, all_log_q
        cache, _, tokens, _, all_log_q = lax.fori_loop(1, num_drafts, next_draft, carry)
        memory = EagleMemory(cache=cache, hidden=memory.hidden)
        return memory, Drafts(token_ids=tokens, counts=step.wanted, log_probabilities=all_log_q)

    def feed(self, params: HeadArrays, memory: EagleMemory, step: DraftStep) -> EagleMemory:
        """See `Drafter`: prompts come with their hidden states, in `observe`."""
        del params, step
        return memory

    def observe(self, params: HeadArrays, memory: EagleMemory, step: DraftStep, seen: Seen) -> EagleMemory:
        """See `HeadDrafter`."""
        batch = _pairs(step, seen)
        hidden = take_in(params.head, seen.features, config=self.config)
        hidden, cache = self._forward(params, memory.cache, batch, hidden)
        return EagleMemory(cache=cache, hidden=_keep_last(memory.hidden, hidden, step, seen))

    def _forward(self, params: HeadArrays, cache: KVCache, batch: Batch, hidden: Array) -> tuple[Array, KVCache]:
        head: EagleParams = params.head
        return eagle_forward(
            head, params.target, cache, batch, hidden, config=self.config, collectives=self.collectives
        )

    def _logits(self, params: HeadArrays, hidden: Array) -> Array:
        return eagle_logits(params.head, params.target, hidden, config=self.config, collectives=self.collectives)


@dataclass(frozen=True)
class MedusaDrafter:
    """Drafts by one head for each token, from each slot's last hidden state, which is all of its memory.

    Attributes:
        vocab_size: of the target.
        collectives: of the mesh.
        params_specs, memory_specs: of its `HeadArrays` and its memory [slots, hidden].
    """

    vocab_size: int
    collectives: Collectives
    params_specs: Any
    memory_specs: Any
    tap_layers: tuple[int, ...] = ()
    has_probabilities: bool = True
    reads_prompts: bool = False
    uses_target_cache: bool = False
    looks_back: bool = False

    def draft(self, params: HeadArrays, memory: Array, step: DraftStep) -> tuple[Array, Drafts]:
        """See `Drafter`."""
        heads: MedusaParams = params.head
        hidden = jnp.take(memory, step.slots, axis=0, mode="clip")
        draws = Draws(step)
        tokens, log_qs, counts = [], [], draws.counts
        for index, head in enumerate(heads.heads[: step.bucket.num_drafts]):
            logits = medusa_logits(head, hidden, collectives=self.collectives)[:, : self.vocab_size]
            token, counts, log_q = draws.draw(logits, jnp.int32(index), counts)
            tokens.append(token)
            log_qs.append(log_q)
        return memory, Drafts(
            token_ids=jnp.stack(tokens, axis=1),
            counts=step.wanted,
            log_probabilities=None if log_qs[0] is None else jnp.stack(log_qs, axis=1),
        )

    def feed(self, params: HeadArrays, memory: Array, step: DraftStep) -> Array:
        """See `Drafter`: prompts come with their hidden states, in `observe`."""
        del params, step
        return memory

    def observe(self, params: HeadArrays, memory: Array, step: DraftStep, seen: Seen) -> Array:
        """See `HeadDrafter`."""
        del params
        return _keep_last(memory, seen.features, step, seen)


def _pairs(step: DraftStep, seen: Seen) -> Batch:
    """The forward pass over a step's tokens again, where each is taken with the token that follows it."""
    ahead = jnp.arange(step.bucket.num_drafts + 1, dtype=jnp.int32)[None, :]
    places = (step.kv_lens - seen.counts)[:, None] + ahead
    history = step.history
    following = jnp.take_along_axis(history, jnp.clip(places + 1, 0, history.shape[1] - 1), axis=1)
    is_pair = is_row(step) & (ahead < seen.counts[:, None])
    batch = decode_batch(step.state, step.slots, following, places, is_pair, step.sizes)
    if not step.bucket.prefill_rows:
        return batch
    batch, last = with_prefill(batch, step.fields, step.bucket, step.sizes)
    drawn = jnp.take(step.state.last_tokens, step.fields["prefill_slots"], mode="clip")
    ends = jnp.where(step.fields["prefill_samples"] == 1, drawn, seen.following)
    tokens = jnp.roll(step.fields["prefill_token_ids"], -1)
    last = jnp.where(_is_chunk(step), last, tokens.shape[0])  # past the end: dropped
    tokens = tokens.at[last].set(ends, mode="drop")
    decode_tokens = batch.token_ids[: step.bucket.decode_tokens]
    return batch.replace(token_ids=jnp.concatenate([decode_tokens, tokens]))  # pyright: ignore[reportAttributeAccessIssue]


def _keep_last(
    kept: Float[Array, "slots size"], hidden: Float[Array, "tokens size"], step: DraftStep, seen: Seen
) -> Float[Array, "slots size"]:
    """Writes what belongs to the last token that counts, of every row of a step, to the row's slot."""
    width = step.bucket.num_drafts + 1
    last = jnp.arange(step.bucket.decode_rows, dtype=jnp.int32) * width + seen.counts - 1
    slots = step.slots
    if step.bucket.prefill_rows:
        ends = jnp.maximum(step.fields["prefill_query_starts"][1:] - 1, 0)
        last = jnp.concatenate([last, step.bucket.decode_tokens + ends])
        chunks = jnp.where(_is_chunk(step), step.fields["prefill_slots"], step.sizes.max_num_seqs)
        slots = jnp.concatenate([slots, chunks])
    return kept.at[slots].set(jnp.take(hidden, last, axis=0, mode="clip"), mode="drop")


def _is_chunk(step: DraftStep) -> Array:
    """Which prefill rows are none of padding."""
    return jnp.diff(step.fields["prefill_query_starts"]) > 0
