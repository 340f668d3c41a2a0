"""The two compiled programs of a step, as pure functions: forward for a bucket, sampling for a number of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int32

from jaxserve.config import ModelConfig
from jaxserve.engine.decode_state import (
    DecodeState,
    begin_step,
    begin_verification,
    end_step,
    sampling_arrays,
    set_history,
)
from jaxserve.engine.device_batch import Bucket, Sizes, unpack
from jaxserve.engine.processor_state import ProcessorState, count_tokens, rows_of, set_slot
from jaxserve.kernels.peer_memory import PeerMemory
from jaxserve.models import llama
from jaxserve.models.batch import Batch
from jaxserve.models.kv_cache import KVCache, kv_cache_specs
from jaxserve.models.logit_processors import Logprobs, mask_logits, process_logits, token_logprobs
from jaxserve.models.params import LayerParams, LlamaParams, param_specs
from jaxserve.models.sampling import row_keys, sample
from jaxserve.models.speculative_sampling import Drafts
from jaxserve.sampling_params import SamplingMode
from jaxserve.sharding.collectives import Collectives
from jaxserve.sharding.mesh import TENSOR_AXIS
from jaxserve.sharding.placement import partition_specs

PROMPT_LOGPROBS_BLOCK = 64  # rows of logits that are made at a time for log probabilities of prompts

_WHOLE = PartitionSpec()  # replicated


@struct.dataclass
class ForwardResult:
    """What a forward pass leaves on the device."""

    cache: KVCache
    state: DecodeState
    logits: Float[Array, "rows vocab"]
    slots: Int32[Array, " rows"]  # slot that each row samples for (with drafts: all rows of its); max_num_seqs: none
    hidden: Float[
        Array, "prefill_tokens hidden"
    ]  # of the prefill tokens after the final norm, padded to the most there are
    features: Float[Array, "tokens size"] | None = None  # of all tokens, for who reads them: see `ProgramFactory`


@struct.dataclass
class StepInputs:
    """What the layers of a step share."""

    batch: Batch
    logit_tokens: Int32[Array, " rows"]  # tokens whose hidden states get logits
    slots: Int32[Array, " rows"]


@dataclass(frozen=True)
class ProgramFactory:
    """Makes the step's functions for one model on one mesh; every one of them runs under `jax.shard_map`.

    Args of the functions that take params: `params` may lack what the function does not look at (`without_layers`).

    Attributes:
        tap_layers: layers whose inputs are given as features of all tokens, side by side; (): the hidden states after the
            final norm are; None: nobody reads any.
        has_peers: whether `forward` takes the devices' `PeerMemory` as its last argument, for sums over devices.
    """

    config: ModelConfig
    sizes: Sizes
    mesh: Mesh
    max_prefill_tokens: int
    tap_layers: tuple[int, ...] | None = None
    has_peers: bool = False

    def forward(self, bucket: Bucket, num_logits: int) -> Callable[..., ForwardResult]:
        """(params, cache, state, packed step) -> ForwardResult: the whole pass; cache and state may be donated.

        Where the bucket has drafts they are one more argument, without their probabilities; `has_peers` tells of another.

        Args:
            bucket: sizes of the step.
            num_logits: rows of logits, at least the bucket's; those beyond repeat the first token's and sample for no slot.
        """

        def per_device(
            params: LlamaParams, cache: KVCache, state: DecodeState, packed: Array, *more: Drafts | PeerMemory
        ) -> ForwardResult:
            peers = [each for each in more if isinstance(each, PeerMemory)]
            drafts = [each for each in more if isinstance(each, Drafts)]
            state, inputs = self._begin_step(state, packed, bucket, num_logits, *drafts)
            hidden, cache, taps = llama.forward_with_taps(
                params,
                cache,
                inputs.batch,
                config=self.config,
                collectives=self._collectives,
                peers=peers[0] if peers else None,
                tap_layers=self.tap_layers or (),
            )
            scores = self._logits(params, hidden, inputs.logit_tokens)
            return ForwardResult(
                cache=cache,
                state=state,
                logits=scores,
                slots=inputs.slots,
                hidden=self._prefill_hidden(hidden, bucket),
                features=self._features(hidden, taps),
            )

        specs = partition_specs(param_specs(self.config))
        whole: Any = _WHOLE
        result = ForwardResult(
            cache=self._cache_specs, state=whole, logits=whole, slots=whole, hidden=whole, features=whole
        )
        more = (_WHOLE,) if bucket.num_drafts else ()
        if self.has_peers:
            more = (*more, PartitionSpec(TENSOR_AXIS))
        return self._shard_map(per_device, (specs, self._cache_specs, _WHOLE, _WHOLE, *more), result)

    def begin(self, bucket: Bucket, num_logits: int) -> Callable[..., tuple[DecodeState, llama.Stream, StepInputs]]:
        """(params without layers, state, packed step) -> (state, hidden states, StepInputs); state may be donated.

        Drafts as in `forward`.
        """

        def per_device(
            params: LlamaParams, state: DecodeState, packed: Array, *drafts: Drafts
        ) -> tuple[DecodeState, llama.Stream, StepInputs]:
            state, inputs = self._begin_step(state, packed, bucket, num_logits, *drafts)
            x = llama.embed_tokens(params, inputs.batch, collectives=self._collectives)
            return state, x, inputs

        specs = without_layers(partition_specs(param_specs(self.config)))
        more = (_WHOLE,) if bucket.num_drafts else ()
        return self._shard_map(per_device, (specs, _WHOLE, _WHOLE, *more), _WHOLE)

    def layer(self, like: int) -> Callable[..., tuple[llama.Stream, KVCache]]:
        """(layer params, layer index, hidden states, cache, StepInputs) -> (hidden states, cache): one layer.

        Args:
            like: number of a layer: any with the same arrays can be given.
        """

        def per_device(
            layer: LayerParams, index: Array, x: llama.Stream, cache: KVCache, inputs: StepInputs
        ) -> tuple[llama.Stream, KVCache]:
            return llama.decoder_layer(
                layer,
                index,
                x,
                cache,
                inputs.batch,
                llama.rotary_tables(inputs.batch, config=self.config),
                config=self.config,
                collectives=self._collectives,
            )

        specs = partition_specs(param_specs(self.config)).layers[like]
        return self._shard_map(
            per_device, (specs, _WHOLE, _WHOLE, self._cache_specs, _WHOLE), (_WHOLE, self._cache_specs)
        )

    def tap(self) -> Callable[[llama.Stream], Array]:
        """(hidden states) -> what goes into the layer that they are given to."""
        return self._shard_map(llama.stream_sum, (_WHOLE,), _WHOLE)

    def end(self, bucket: Bucket) -> Callable[..., tuple[Array, Array, Array | None]]:
        """(params without layers, hidden states, StepInputs, *what `tap` gave of each of `tap_layers`) -> (logits, hidden
        states, features, both as in ForwardResult).
        """

        def per_device(
            params: LlamaParams, x: llama.Stream, inputs: StepInputs, *taps: Array
        ) -> tuple[Array, Array, Array | None]:
            hidden = llama.final_norm(params, x, config=self.config)
            scores = self._logits(params, hidden, inputs.logit_tokens)
            return scores, self._prefill_hidden(hidden, bucket), self._features(hidden, taps)

        specs = without_layers(partition_specs(param_specs(self.config)))
        taps = (_WHOLE,) * len(self.tap_layers or ())
        return self._shard_map(per_device, (specs, _WHOLE, _WHOLE, *taps), _WHOLE)

    def prompt_logprobs(self) -> Callable[..., Logprobs]:
        """(params without layers, hidden states of ForwardResult, next token of each, first row) -> Logprobs of a block.

        The block is `PROMPT_LOGPROBS_BLOCK` rows from the first one on: one program serves every length.
        """

        def per_device(params: LlamaParams, hidden: Array, next_ids: Array, first: Array) -> Logprobs:
            size = min(PROMPT_LOGPROBS_BLOCK, hidden.shape[0])
            rows = lax.dynamic_slice_in_dim(hidden, first, size)
            tokens = lax.dynamic_slice_in_dim(next_ids, first, size)
            return token_logprobs(self._scores(params, rows), tokens)

        specs = without_layers(partition_specs(param_specs(self.config)))
        return self._shard_map(per_device, (specs, _WHOLE, _WHOLE, _WHOLE), _WHOLE)

    def sample(
        self, mode: SamplingMode
    ) -> Callable[[DecodeState, Array, Array], tuple[DecodeState, Int32[Array, " rows"]]]:
        """(state, logits, slots) -> (state, token of each row); the caller donates state."""

        def per_device(state: DecodeState, logits: Array, slots: Array) -> tuple[DecodeState, Array]:
            with jax.named_scope("sample"):
                params, seeds, counters = sampling_arrays(state, slots)
                tokens = sample(logits, params, row_keys(seeds, counters), mode=mode)
                return end_step(state, slots, tokens), tokens

        return self._shard_map(per_device, (_WHOLE, _WHOLE, _WHOLE), (_WHOLE, _WHOLE))

    def sample_full(
        self,
    ) -> Callable[..., tuple[DecodeState, ProcessorState, Int32[Array, " rows"], Logprobs]]:
        """(state, processors, logits, slots) -> (state, processors, tokens, Logprobs); the first two may be donated.

        Serves every row, with penalties and biases or without; the log probabilities are of the raw logits.
        """

        def per_device(
            state: DecodeState, processors: ProcessorState, logits: Array, slots: Array
        ) -> tuple[DecodeState, ProcessorState, Array, Logprobs]:
            with jax.named_scope("sample_full"):
                params, seeds, counters = sampling_arrays(state, slots)
                changed = process_logits(logits, rows_of(processors, state.processed, slots), counters)
                tokens = sample(changed, params, row_keys(seeds, counters), mode="full")
                logprobs = token_logprobs(logits, tokens)
                return end_step(state, slots, tokens), count_tokens(processors, slots, tokens), tokens, logprobs

        return self._shard_map(per_device, (_WHOLE,) * 4, (_WHOLE,) * 4)

    def sample_masked(self, mode: SamplingMode) -> Callable[..., tuple[DecodeState, Int32[Array, " rows"]]]:
        """(state, logits, slots, masks [rows, words]) -> as `sample`: only tokens whose bit is set are drawn."""

        def per_device(state: DecodeState, logits: Array, slots: Array, masks: Array) -> tuple[DecodeState, Array]:
            with jax.named_scope("sample_masked"):
                params, seeds, counters = sampling_arrays(state, slots)
                tokens = sample(mask_logits(logits, masks), params, row_keys(seeds, counters), mode=mode)
                return end_step(state, slots, tokens), tokens

        return self._shard_map(per_device, (_WHOLE,) * 4, (_WHOLE, _WHOLE))

    def sample_masked_full(self) -> Callable[..., tuple[DecodeState, ProcessorState, Int32[Array, " rows"], Logprobs]]:
        """(state, processors, logits, slots, masks [rows, words]) -> as `sample_full`, from tokens whose bit is set."""

        def per_device(
            state: DecodeState, processors: ProcessorState, logits: Array, slots: Array, masks: Array
        ) -> tuple[DecodeState, ProcessorState, Array, Logprobs]:
            with jax.named_scope("sample_masked_full"):
                params, seeds, counters = sampling_arrays(state, slots)
                changed = process_logits(logits, rows_of(processors, state.processed, slots), counters)
                masked = mask_logits(changed, masks)
                # Where only an end may follow and min_tokens forbids that, the mask decides.
                is_stuck = jnp.max(masked, axis=-1, keepdims=True) == -jnp.inf
                masked = jnp.where(is_stuck, mask_logits(logits, masks), masked)
                tokens = sample(masked, params, row_keys(seeds, counters), mode="full")
                logprobs = token_logprobs(logits, tokens)
                return end_step(state, slots, tokens), count_tokens(processors, slots, tokens), tokens, logprobs

        return self._shard_map(per_device, (_WHOLE,) * 5, (_WHOLE,) * 4)

    def set_slot(self) -> Callable[..., ProcessorState]:
        """(processors, fields of SlotProcessors) -> processors, which may be donated."""
        return self._shard_map(set_slot, (_WHOLE,) * 9, _WHOLE)

    def set_history(self) -> Callable[[DecodeState, Array, Array], DecodeState]:
        """(state, slot, tokens [longest]) -> state, which may be donated."""
        return self._shard_map(set_history, (_WHOLE,) * 3, _WHOLE)

    @property
    def _collectives(self) -> Collectives:
        return Collectives(self.mesh.shape[TENSOR_AXIS])

    @property
    def _cache_specs(self) -> KVCache:
        return partition_specs(kv_cache_specs(self.config, self.sizes.num_pages, self.sizes.page_size))

    def _begin_step(
        self, state: DecodeState, packed: Array, bucket: Bucket, num_logits: int, *drafts: Drafts
    ) -> tuple[DecodeState, StepInputs]:
        with jax.named_scope("begin_step"):
            fields = unpack(packed, bucket, self.sizes)
            if bucket.num_drafts:
                return _with_inputs(begin_verification(state, fields, drafts[0], self.sizes))
            state, batch, logit_tokens, slots = begin_step(state, fields, bucket, self.sizes)
            padding = (0, num_logits - bucket.rows)
            return state, StepInputs(
                batch=batch,
                logit_tokens=jnp.pad(logit_tokens, padding),
                slots=jnp.pad(slots, padding, constant_values=self.sizes.max_num_seqs),
            )

    def _prefill_hidden(self, hidden: Array, bucket: Bucket) -> Array:
        if bucket.prefill_rows == 0:
            return hidden[:0]
        return jnp.pad(hidden[bucket.decode_rows :], ((0, self.max_prefill_tokens - bucket.prefill_tokens), (0, 0)))

    @property
    def features_size(self) -> int:
        """Of a token's features, where there are any."""
        return max(1, len(self.tap_layers or ())) * self.config.hidden_size

    def _features(self, hidden: Array, taps: tuple[Array, ...]) -> Array | None:
        if self.tap_layers is None:
            return None
        return jnp.concatenate(taps, axis=1) if taps else hidden

    def _logits(self, params: LlamaParams, hidden: Array, logit_tokens: Array) -> Array:
        rows = jnp.take(hidden, logit_tokens, axis=0, mode="clip")
        return self._scores(params, rows)

    def _scores(self, params: LlamaParams, rows: Array) -> Array:
        """Of every token that there is: what a vocabulary is padded with, so that it divides, ends here."""
        scores = llama.logits(params, rows, collectives=self._collectives)
        vocab_size = self.config.vocab_size
        return scores if scores.shape[1] == vocab_size else scores[:, :vocab_size]

    def _shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        # Replication is not checked: Pallas kernels are opaque to that analysis.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _with_inputs(step: tuple[DecodeState, Batch, Array, Array]) -> tuple[DecodeState, StepInputs]:
    state, batch, logit_tokens, slots = step
    return state, StepInputs(batch=batch, logit_tokens=logit_tokens, slots=slots)


def without_layers(params: LlamaParams) -> LlamaParams:
    """The same params with no layers: for programs that do not look at them."""
    return params.replace(layers=())  # pyright: ignore[reportAttributeAccessIssue]
