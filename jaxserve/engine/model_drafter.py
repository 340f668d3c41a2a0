"""A model as the drafter: a small one with its own KV cache, or the first layers of the target with the target's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxserve.config import ModelConfig
from jaxserve.engine.decode_state import decode_batch, sampling_arrays, with_prefill
from jaxserve.engine.drafters import DraftStep
from jaxserve.engine.processor_state import rows_of
from jaxserve.models import llama
from jaxserve.models.batch import Batch
from jaxserve.models.kv_cache import KVCache
from jaxserve.models.logit_processors import process_logits
from jaxserve.models.params import LlamaParams
from jaxserve.models.sampling import log_probabilities, row_keys, sample
from jaxserve.models.speculative_sampling import Drafts
from jaxserve.sharding.collectives import Collectives


@dataclass(frozen=True)
class ModelDrafter:
    """Drafts by a forward pass for each token, all of them in one program.

    Its keys and values lie in pages of the same numbers as the target's, so that they are managed with those: shared by
    prompts that begin alike, and given back with them.

    Attributes:
        config: of the model that drafts, as the devices run it.
        vocab_size: of the target. Where the two differ it is in what pads them: ids that only one has are never drafted.
        collectives: of the mesh.
        params_specs, memory_specs: of its `LlamaParams` and `KVCache`.
        uses_target_cache: it is the first layers of the target: what they write while drafting is what the target writes
            again in the same places.

    A draft is drawn with the noise that the target draws with at that place, and from logits that are processed as the
    target's are: the two then agree as often as they can, and where the text is bound to a seed they must.
    """

    config: ModelConfig
    vocab_size: int
    collectives: Collectives
    params_specs: Any
    memory_specs: Any
    uses_target_cache: bool = False
    has_probabilities: bool = True

    @property
    def reads_prompts(self) -> bool:
        return not self.uses_target_cache

    @property
    def looks_back(self) -> bool:
        return not self.uses_target_cache

    def draft(self, params: LlamaParams, memory: KVCache, step: DraftStep) -> tuple[KVCache, Drafts]:
        """See `Drafter`."""
        num_drafts, rows = step.bucket.num_drafts, step.num_rows
        width = 1 if self.uses_target_cache else 2
        logits, memory = self._logits(params, memory, self._latest(step, width), width)
        first = Draws(step)
        token, counts, log_q = first.draw(logits, jnp.int32(0), first.counts)
        tokens = jnp.zeros((rows, num_drafts), jnp.int32).at[:, 0].set(token)
        all_log_q = None
        if log_q is not None:
            all_log_q = jnp.zeros((rows, num_drafts, log_q.shape[1]), jnp.float32).at[:, 0].set(log_q)

        def next_draft(index: Array, carry: tuple[KVCache, Array, Any, Any]) -> tuple[KVCache, Array, Any, Any]:
            memory, tokens, counts, all_log_q = carry
            last = lax.dynamic_index_in_dim(tokens, index - 1, 1)  # [rows, 1]
            is_wanted = (index < step.wanted)[:, None]
            places = step.kv_lens[:, None] + index
            batch = decode_batch(step.state, step.slots, last, places, is_wanted & is_row(step), step.sizes)
            logits, memory = self._logits(params, memory, batch, 1)
            token, counts, log_q = first.draw(logits, index, counts)
            tokens = lax.dynamic_update_index_in_dim(tokens, token, index, 1)
            if log_q is not None:
                all_log_q = lax.dynamic_update_index_in_dim(all_log_q, log_q, index, 1)
            return memory, tokens, counts, all_log_q

        carry = memory, tokens, counts, all_log_q
        memory, tokens, _, all_log_q = lax.fori_loop(1, num_drafts, next_draft, carry)
        return memory, Drafts(token_ids=tokens, counts=step.wanted, log_probabilities=all_log_q)

    def feed(self, params: LlamaParams, memory: KVCache, step: DraftStep) -> KVCache:
        """See `Drafter`: those who decode beside the prompts go on in its cache as well."""
        batch, _ = with_prefill(self._latest(step, 2), step.fields, step.bucket, step.sizes)
        _, memory = llama.forward(params, memory, batch, config=self.config, collectives=self.collectives)
        return memory

    def _latest(self, step: DraftStep, width: int) -> Batch:
        """The last `width` tokens of every decode row.

        Two are what is not in the cache from one step with drafts to the next: the row's last token, and the last draft, if
        it was kept. Those before it were inputs of the drafting itself.
        """
        places = step.kv_lens[:, None] + jnp.arange(1 - width, 1, dtype=jnp.int32)[None, :]
        tokens = jnp.take_along_axis(step.history, jnp.maximum(places, 0), axis=1)
        return decode_batch(step.state, step.slots, tokens, places, (places >= 0) & is_row(step), step.sizes)

    def _logits(
        self, params: LlamaParams, memory: KVCache, batch: Batch, width: int
    ) -> tuple[Float[Array, "rows vocab"], KVCache]:
        """Scores of what follows the last of each row's `width` tokens."""
        hidden, memory = llama.forward(params, memory, batch, config=self.config, collectives=self.collectives)
        hidden = hidden[width - 1 :: width]
        shared = min(self.config.vocab_size, self.vocab_size)
        scores = llama.logits(params, hidden, collectives=self.collectives)[:, :shared]
        return jnp.pad(scores, ((0, 0), (0, self.vocab_size - shared)), constant_values=-jnp.inf), memory


class Draws:
    """Draws the drafts of a step."""

    def __init__(self, step: DraftStep) -> None:
        self._step = step
        self._params, self._seeds, self._counters = sampling_arrays(step.state, step.slots)
        self._processors = None
        if step.processors is not None:
            self._processors = rows_of(step.processors, step.state.processed, step.slots)

    @property
    def counts(self) -> Int32[Array, "rows vocab"] | None:
        """How often each row's output holds each token, before the first draft; None: it does not matter."""
        return None if self._processors is None else self._processors.output_counts

    def draw(
        self, logits: Float[Array, "rows vocab"], index: Int32[Array, ""], counts: Int32[Array, "rows vocab"] | None
    ) -> tuple[Int32[Array, " rows"], Int32[Array, "rows vocab"] | None, Float[Array, "rows vocab"] | None]:
        """The next draft of each row; the counts with it; the log of the distribution that it was drawn from."""
        mode, counters = self._step.mode, self._counters + index
        if self._processors is None or counts is None:
            return sample(logits, self._params, row_keys(self._seeds, counters), mode="greedy"), None, None
        arrays = self._processors.replace(output_counts=counts)  # pyright: ignore[reportAttributeAccessIssue]
        changed = process_logits(logits, arrays, counters)
        tokens = sample(changed, self._params, row_keys(self._seeds, counters), mode=mode)
        counts = counts.at[jnp.arange(tokens.shape[0], dtype=jnp.int32), tokens].add(1)
        return tokens, counts, log_probabilities(changed, self._params, mode=mode)


def is_row(step: DraftStep) -> Bool[Array, "rows 1"]:
    """Which decode rows are none of padding."""
    return (step.slots < step.sizes.max_num_seqs)[:, None]
