"""The compiled programs of speculation, as pure functions: drafting, feeding the drafter, verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int32

from jaxserve.engine.decode_state import DecodeState, end_verification, sampling_arrays, take_step
from jaxserve.engine.device_batch import Bucket, Sizes, unpack
from jaxserve.engine.drafters import Drafter, DraftStep, speculation_of
from jaxserve.engine.head_drafters import HeadDrafter, Seen
from jaxserve.engine.processor_state import ProcessorState, count_verified, rows_of
from jaxserve.models.logit_processors import Logprobs, mask_logits, process_logits, token_logprobs
from jaxserve.models.speculative_sampling import Drafts, Verified, position_counters, repeat_rows, verify
from jaxserve.sampling_params import SamplingMode

_WHOLE = PartitionSpec()  # replicated

# Rows that a drafter has on a GPU: XLA turns products of a single one into sums over weights that it converts to float32
# first, and what a step of the model itself has instead (kernels that are tried out) is not made for a drafter's programs.
_FEWEST_ROWS = 8


@dataclass(frozen=True)
class SpeculativePrograms:
    """Makes the functions for one drafter on one mesh; all of them run under `jax.shard_map`."""

    drafter: Drafter
    sizes: Sizes
    mesh: Mesh
    synthetic_acceptance: float | None = None

    @property
    def fewest_rows(self) -> int:
        """Rows of a product that a drafter is given; less are padded."""
        return _FEWEST_ROWS if self.mesh.devices.flat[0].platform == "gpu" else 1

    def draft(self, bucket: Bucket, mode: SamplingMode) -> Callable[..., tuple[Any, Drafts]]:
        """(params, memory, state, packed step[, processors]) -> (memory, drafts); memory may be donated.

        The processors come with every mode but "greedy".
        """

        def per_device(
            params: Any, memory: Any, state: DecodeState, packed: Array, *processors: ProcessorState
        ) -> tuple[Any, Drafts]:
            with jax.named_scope("draft"):
                step = self._step(state, packed, bucket, mode, *processors).padded(self.fewest_rows)
                memory, drafts = self.drafter.draft(params, memory, step)
                return memory, jax.tree.map(lambda array: array[: bucket.decode_rows], drafts)

        more = () if mode == "greedy" else (_WHOLE,)
        specs = self.drafter.memory_specs
        return self._shard_map(per_device, (self.drafter.params_specs, specs, _WHOLE, _WHOLE, *more), (specs, _WHOLE))

    def feed(self, bucket: Bucket) -> Callable[..., Any]:
        """(params, memory, state, packed step) -> memory, which may be donated."""

        def per_device(params: Any, memory: Any, state: DecodeState, packed: Array) -> Any:
            with jax.named_scope("feed_drafter"):
                return self.drafter.feed(params, memory, self._step(state, packed, bucket, "greedy"))

        specs = self.drafter.memory_specs
        return self._shard_map(per_device, (self.drafter.params_specs, specs, _WHOLE, _WHOLE), specs)

    def observe(self, reader: HeadDrafter, bucket: Bucket) -> Callable[..., Any]:
        """(params, memory, state after the step, packed step, features, following[, `pack_verified`]) -> memory.

        Memory may be donated; features and following as in `Seen`. What was verified comes with drafts.
        """

        def per_device(
            params: Any,
            memory: Any,
            state: DecodeState,
            packed: Array,
            features: Array,
            following: Array,
            *verified: Array,
        ) -> Any:
            with jax.named_scope("show_drafter"):
                counts = verified[0][:, -2] if verified else jnp.ones((bucket.decode_rows,), jnp.int32)
                seen = Seen(features=features, following=following, counts=counts)
                step = self._step(state, packed, bucket, "greedy")
                if not bucket.prefill_rows:  # else there are tokens enough
                    width = bucket.num_drafts + 1
                    step = step.padded(-(-self.fewest_rows // width))
                    seen = seen.padded(step.num_rows, width)
                return reader.observe(params, memory, step, seen)

        specs = reader.memory_specs
        step = (_WHOLE,) * (5 if bucket.num_drafts else 4)
        return self._shard_map(per_device, (reader.params_specs, specs, *step), specs)

    def verify(self, mode: SamplingMode, *, masked: bool = False) -> Callable[..., tuple[DecodeState, Array]]:
        """(state, logits, slots, drafts[, masks]) -> (state, `pack_verified`); the caller donates state.

        Masks [rows of logits, words] say which tokens each position may draw; a draft that its position's does not hold is
        refused.
        """

        def per_device(
            state: DecodeState, logits: Array, slots: Array, drafts: Drafts, *masks: Array
        ) -> tuple[DecodeState, Array]:
            with jax.named_scope("verify"):
                verified = self._verify(state, _masked(logits, *masks), slots, drafts, mode)
                return end_verification(state, slots, verified), pack_verified(verified, drafts)

        return self._shard_map(per_device, (_WHOLE,) * (5 if masked else 4), (_WHOLE, _WHOLE))

    def verify_full(
        self, *, masked: bool = False
    ) -> Callable[..., tuple[DecodeState, ProcessorState, Array, Logprobs]]:
        """(state, processors, logits, slots, drafts[, masks]) -> (state, processors, `pack_verified`, Logprobs).

        The first two may be donated. Penalties at a position count the drafts before it; log probabilities are of the raw
        logits, those of one row's tokens after the other's.
        """

        def per_device(
            state: DecodeState, processors: ProcessorState, logits: Array, slots: Array, drafts: Drafts, *masks: Array
        ) -> tuple[DecodeState, ProcessorState, Array, Logprobs]:
            with jax.named_scope("verify_full"):
                changed = process_positions(logits, state, processors, slots, drafts)
                limited = _masked(changed, *masks)
                if masks:
                    # Where only an end may follow and min_tokens forbids that, the mask decides.
                    is_stuck = jnp.max(limited, axis=-1, keepdims=True) == -jnp.inf
                    limited = jnp.where(is_stuck, _masked(logits, *masks), limited)
                verified = self._verify(state, limited, slots, drafts, "full")
                logprobs = token_logprobs(logits, verified.token_ids.reshape(-1))
                processors = count_verified(processors, slots, verified.token_ids, verified.counts)
                return end_verification(state, slots, verified), processors, pack_verified(verified, drafts), logprobs

        return self._shard_map(per_device, (_WHOLE,) * (6 if masked else 5), (_WHOLE,) * 4)

    def _verify(self, state: DecodeState, logits: Array, slots: Array, drafts: Drafts, mode: SamplingMode) -> Verified:
        params, seeds, counters = sampling_arrays(state, slots)
        rejects = ~jnp.take(speculation_of(state).seeded, slots, mode="clip")
        return verify(
            logits,
            drafts,
            params,
            seeds,
            counters,
            rejects,
            mode=mode,
            synthetic_acceptance=self.synthetic_acceptance,
        )

    def _step(
        self, state: DecodeState, packed: Array, bucket: Bucket, mode: SamplingMode, *processors: ProcessorState
    ) -> DraftStep:
        fields = unpack(packed, bucket, self.sizes)
        return DraftStep(
            state=take_step(state, fields),
            processors=processors[0] if processors else None,
            fields=fields,
            bucket=bucket,
            sizes=self.sizes,
            mode=mode,
        )

    def _shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        # Replication is not checked: Pallas kernels are opaque to that analysis.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def resize_features(bucket: Bucket, larger: Bucket) -> Callable[[Array], Array]:
    """(features of a step without drafts [tokens, size]) -> the same, where they lie in a larger step's."""

    def resize(features: Array) -> Array:
        decode, prefill = jnp.split(features, [bucket.decode_rows])
        rows, tokens = larger.decode_rows - bucket.decode_rows, larger.prefill_tokens - bucket.prefill_tokens
        return jnp.concatenate([jnp.pad(decode, ((0, rows), (0, 0))), jnp.pad(prefill, ((0, tokens), (0, 0)))])

    return resize


def process_positions(
    logits: Float[Array, "rows_times_width vocab"],
    state: DecodeState,
    processors: ProcessorState,
    slots: Int32[Array, " rows"],
    drafts: Drafts,
) -> Float[Array, "rows_times_width vocab"]:
    """Logits to draw from at every position of each row, where its output holds the drafts before that position too."""
    rows, num_drafts = drafts.token_ids.shape
    width = num_drafts + 1
    arrays = jax.tree.map(lambda array: repeat_rows(array, width), rows_of(processors, state.processed, slots))
    row, place, draft = (
        jnp.arange(size, dtype=jnp.int32).reshape(shape)
        for size, shape in ((rows, (-1, 1, 1)), (width, (1, -1, 1)), (num_drafts, (1, 1, -1)))
    )
    is_before = jnp.broadcast_to(draft < place, (rows, width, num_drafts)).astype(jnp.int32)
    counts = arrays.output_counts.reshape(rows, width, -1)
    counts = counts.at[row, place, drafts.token_ids[:, None, :]].add(is_before)
    _, _, counters = sampling_arrays(state, slots)
    return process_logits(
        logits,
        arrays.replace(output_counts=counts.reshape(arrays.output_counts.shape)),  # pyright: ignore[reportAttributeAccessIssue]
        position_counters(counters, width),
    )


def pack_verified(verified: Verified, drafts: Drafts) -> Int32[Array, "rows width_plus_2"]:
    """For the host, in one array: each row's tokens, how many count, and how many were drafted."""
    numbers = jnp.stack([verified.counts, drafts.counts], axis=1)
    return jnp.concatenate([verified.token_ids, numbers], axis=1)


def _masked(logits: Array, *masks: Array) -> Array:
    return mask_logits(logits, masks[0]) if masks else logits
