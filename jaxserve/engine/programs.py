"""The two compiled programs of a step, as pure functions: forward for a bucket, sampling for a number of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int32

from jaxserve.config import ModelConfig
from jaxserve.engine.decode_state import DecodeState, begin_step, end_step, sampling_arrays
from jaxserve.engine.device_batch import Bucket, Sizes, unpack
from jaxserve.models import llama
from jaxserve.models.kv_cache import KVCache, kv_cache_specs
from jaxserve.models.params import LlamaParams, param_specs
from jaxserve.models.sampling import SamplingMode, row_keys, sample
from jaxserve.sharding.collectives import Collectives
from jaxserve.sharding.mesh import TENSOR_AXIS
from jaxserve.sharding.placement import partition_specs


@struct.dataclass
class ForwardResult:
    """What a forward program leaves on the device."""

    cache: KVCache
    state: DecodeState
    logits: Float[Array, "rows vocab"]
    slots: Int32[Array, "rows"]  # slot that each row samples for; max_num_seqs: none


@dataclass(frozen=True)
class ProgramFactory:
    """Makes the step's functions for one model on one mesh; every one of them runs under `jax.shard_map`."""

    config: ModelConfig
    sizes: Sizes
    mesh: Mesh

    def forward(self, bucket: Bucket) -> Callable[[LlamaParams, KVCache, DecodeState, Array], ForwardResult]:
        """(params, cache, state, packed step) -> ForwardResult; the caller donates cache and state."""
        collectives = Collectives(self.mesh.shape[TENSOR_AXIS])

        def per_device(params: LlamaParams, cache: KVCache, state: DecodeState, packed: Array) -> ForwardResult:
            with jax.named_scope("begin_step"):
                fields = unpack(packed, bucket, self.sizes)
                state, batch, logit_tokens, slots = begin_step(state, fields, bucket, self.sizes)
            hidden, cache = llama.forward(params, cache, batch, config=self.config, collectives=collectives)
            scores = llama.logits(params, jnp.take(hidden, logit_tokens, axis=0, mode="clip"), collectives=collectives)
            return ForwardResult(cache=cache, state=state, logits=scores, slots=slots)

        whole = PartitionSpec()
        cache_specs = partition_specs(kv_cache_specs(self.config, self.sizes.num_pages, self.sizes.page_size))
        return jax.shard_map(
            per_device,
            mesh=self.mesh,
            in_specs=(partition_specs(param_specs(self.config)), cache_specs, whole, whole),
            out_specs=ForwardResult(cache=cache_specs, state=whole, logits=whole, slots=whole),  # pyright: ignore[reportArgumentType]
            check_vma=False,
        )

    def sample(
        self, mode: SamplingMode
    ) -> Callable[[DecodeState, Array, Array], tuple[DecodeState, Int32[Array, "rows"]]]:
        """(state, logits, slots) -> (state, token of each row); the caller donates state."""

        def per_device(state: DecodeState, logits: Array, slots: Array) -> tuple[DecodeState, Array]:
            with jax.named_scope("sample"):
                params, seeds, counters = sampling_arrays(state, slots)
                tokens = sample(logits, params, row_keys(seeds, counters), mode=mode)
                return end_step(state, slots, tokens), tokens

        whole = PartitionSpec()
        return jax.shard_map(
            per_device, mesh=self.mesh, in_specs=(whole, whole, whole), out_specs=(whole, whole), check_vma=False
        )
