"""What drafts tokens: pure functions of one device, between the engine's state and the models.

A drafter runs as one compiled program for each step with drafts, before the target's forward pass: the host sees none of
the tokens in between. What a drafter needs beside the state that every slot has is its `params`, which are only read, and
its `memory`, which each of its programs is given and gives back: donated device arrays, such as a KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxserve.engine.decode_state import DecodeState, SpeculationState
from jaxserve.engine.device_batch import Bucket, Sizes
from jaxserve.engine.processor_state import ProcessorState
from jaxserve.models.prompt_lookup import look_up
from jaxserve.models.speculative_sampling import Drafts
from jaxserve.sampling_params import SamplingMode


class DraftStep(NamedTuple):
    """One step as a drafter sees it.

    Attributes:
        state: with what the host sent for the step.
        processors: penalties and biases of every slot; None where `mode` is "greedy".
        fields: of the packed step.
    """

    state: DecodeState
    processors: ProcessorState | None
    fields: dict[str, Array]
    bucket: Bucket
    sizes: Sizes
    mode: SamplingMode

    @property
    def num_rows(self) -> int:
        """Decode rows, those of padding too."""
        return self.fields["decode_slots"].shape[0]

    @property
    def slots(self) -> Int32[Array, " rows"]:
        """Of the decode rows; max_num_seqs: padding."""
        return self.fields["decode_slots"]

    @property
    def wanted(self) -> Int32[Array, " rows"]:
        """Drafts of each decode row that there is room for."""
        return self.fields["decode_num_drafts"]

    @property
    def kv_lens(self) -> Int32[Array, " rows"]:
        """Of the decode rows: tokens before their last one."""
        return jnp.take(self.state.kv_lens, self.slots, mode="clip")

    @property
    def history(self) -> Int32[Array, "rows length"]:
        """Of the decode rows: their tokens, the last one at place `kv_lens`; of prompts if the drafter `looks_back`."""
        return jnp.take(speculation_of(self.state).history, self.slots, axis=0, mode="clip")

    def padded(self, fewest: int) -> DraftStep:
        """The same with so many decode rows at least."""
        rows = max(fewest, self.num_rows)
        missing = (0, rows - self.num_rows)
        return self._replace(
            bucket=replace(self.bucket, decode_rows=rows),
            fields=self.fields
            | {
                "decode_slots": jnp.pad(self.slots, missing, constant_values=self.sizes.max_num_seqs),
                "decode_num_drafts": jnp.pad(self.wanted, missing),
            },
        )


def speculation_of(state: DecodeState) -> SpeculationState:
    """Raises:
    ValueError: the engine was built without speculation.
    """
    if state.speculation is None:
        raise ValueError("the engine was built without speculation: its slots have no history")
    return state.speculation


class Drafter(Protocol):
    """How tokens are drafted. Both functions run under `jax.shard_map`.

    Attributes:
        has_probabilities: whether drafts come with those, so that rejection sampling can serve rows without a seed.
        reads_prompts: whether `feed` must see all tokens but those of steps with drafts.
        uses_target_cache: whether `memory` is the target's own KV cache.
        looks_back: whether it looks at `DraftStep.history` before the last tokens that were drawn, where prompts are.
        params_specs, memory_specs: `PartitionSpec`s of both, as `jax.shard_map` takes them.
    """

    @property
    def has_probabilities(self) -> bool: ...
    @property
    def reads_prompts(self) -> bool: ...
    @property
    def uses_target_cache(self) -> bool: ...
    @property
    def looks_back(self) -> bool: ...
    @property
    def params_specs(self) -> Any: ...
    @property
    def memory_specs(self) -> Any: ...

    def draft(self, params: Any, memory: Any, step: DraftStep) -> tuple[Any, Drafts]:
        """Drafts `bucket.num_drafts` tokens for each decode row, of which no more count than the row wants."""
        ...

    def feed(self, params: Any, memory: Any, step: DraftStep) -> Any:
        """Takes in the chunks of a step in which nothing is drafted, and the last two tokens of each of its decode rows.

        Chunks are prompts, or what the drafter has not seen of sequences that decode. Two tokens are what a sequence that
        drafted in the step before may lack.
        """
        ...


@dataclass(frozen=True)
class PromptLookup:
    """Drafts what followed the last tokens where they stood before; see `jaxserve.models.prompt_lookup`."""

    longest: int
    shortest: int
    has_probabilities: bool = False
    reads_prompts: bool = False
    uses_target_cache: bool = False
    looks_back: bool = True
    params_specs: Any = ()
    memory_specs: Any = ()

    def draft(self, params: Any, memory: Any, step: DraftStep) -> tuple[Any, Drafts]:
        del params
        tokens, found = look_up(
            step.history,
            step.kv_lens + 1,
            num_drafts=step.bucket.num_drafts,
            longest=self.longest,
            shortest=self.shortest,
        )
        return memory, Drafts(token_ids=tokens, counts=jnp.minimum(found, step.wanted))

    def feed(self, params: Any, memory: Any, step: DraftStep) -> Any:
        del params, step
        return memory
