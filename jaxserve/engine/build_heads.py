"""From a head that drafts to a drafter with its arrays on the engine's devices."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.config import ModelConfig
from jaxserve.engine.device_batch import Sizes
from jaxserve.engine.head_drafters import EagleDrafter, EagleMemory, HeadArrays, HeadDrafter, MedusaDrafter
from jaxserve.engine.programs import without_layers
from jaxserve.engine.runner import zero_cache
from jaxserve.engine.speculator import Drafting
from jaxserve.models.draft_head import DraftHead
from jaxserve.models.eagle import EagleConfig, default_tap_layers, eagle_specs
from jaxserve.models.kv_cache import kv_bytes_per_token, kv_cache_specs
from jaxserve.models.medusa import MedusaConfig, medusa_specs
from jaxserve.models.param_spec import ParamSpec
from jaxserve.models.params import LlamaParams, is_declared, param_specs
from jaxserve.models.rope import with_longest_sequence
from jaxserve.sharding.collectives import Collectives
from jaxserve.sharding.placement import named_shardings, partition_specs, replicated
from jaxserve.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)

_DRAFT_VOCAB_SIZE = 32000  # of published EAGLE-3 heads


def check_head(config: SpeculativeConfig, target: ModelConfig, head: DraftHead) -> None:
    """Raises:
    ValueError: the head is of another kind than is asked for, or of another model, or drafts fewer tokens.
    """
    sizes = head.config
    kind = "medusa" if isinstance(sizes, MedusaConfig) else "eagle" if sizes.version == 1 else "eagle3"
    if kind != config.method:
        raise ValueError(f"speculative method {config.method!r} takes no head of kind {kind!r}")
    hidden, vocab = (
        (sizes.hidden_size, sizes.vocab_size)
        if isinstance(sizes, MedusaConfig)
        else (sizes.target_hidden_size, sizes.layer.vocab_size)
    )
    for name, own, wanted in (
        ("hidden_size", hidden, target.hidden_size),
        ("vocab_size", vocab, target.vocab_size),
    ):
        if own != wanted:
            raise ValueError(
                f"{name}={own} of the head must be the model's, {wanted}: it was trained for another model"
            )
    if isinstance(sizes, MedusaConfig) and sizes.num_heads < config.num_speculative_tokens:
        raise ValueError(
            f"num_speculative_tokens={config.num_speculative_tokens} must not be above the {sizes.num_heads} Medusa heads "
            "that there are: each drafts one token"
        )
    if isinstance(sizes, EagleConfig) and any(layer > target.num_layers for layer in sizes.tap_layers):
        raise ValueError(f"the head looks at layers {sizes.tap_layers}, the model has {target.num_layers}")


def head_bytes_per_token(head: DraftHead, cache_dtype: jnp.dtype) -> int:
    """Bytes that the head's own KV cache takes for each token, over all devices."""
    return kv_bytes_per_token(head.config.layer, cache_dtype) if isinstance(head.config, EagleConfig) else 0


def place_head(head: DraftHead, dtype: jnp.dtype, mesh: Mesh) -> DraftHead:
    """The head on the engine's devices, in the target's element type.

    Raises:
        ValueError: it does not divide over the devices.
    """
    specs = head_specs(head.config)

    def cast(spec: ParamSpec, array: Any) -> np.ndarray:
        return np.asarray(array).astype(spec.element_type(dtype))

    arrays = jax.tree.map(cast, specs, head.params, is_leaf=is_declared)
    return DraftHead(head.config, jax.device_put(arrays, named_shardings(specs, mesh)))


def make_head_drafting(
    config: SpeculativeConfig,
    target: ModelConfig,
    params: LlamaParams,
    head: DraftHead,
    sizes: Sizes,
    mesh: Mesh,
    cache_dtype: jnp.dtype,
) -> Drafting:
    """The drafter with its memory.

    Args:
        params, head: placed on the mesh, with configs as its devices run them.
    """
    head = _with_shared_embedding(head, params)
    specs = HeadArrays(
        head=partition_specs(head_specs(head.config)), target=without_layers(partition_specs(param_specs(target)))
    )
    collectives, dtype = Collectives(mesh.size), params.embedding.dtype
    whole = PartitionSpec()

    def last_states(size: int) -> jax.Array:
        return jax.device_put(jnp.zeros((sizes.max_num_seqs, size), dtype), replicated(mesh))

    drafter: HeadDrafter
    if isinstance(head.config, EagleConfig):
        layer = with_longest_sequence(head.config.layer, sizes.longest)
        eagle = dataclasses.replace(head.config, layer=layer)
        cache_specs = partition_specs(kv_cache_specs(layer, sizes.num_pages, sizes.page_size))
        drafter = EagleDrafter(eagle, collectives, specs, EagleMemory(cache=cache_specs, hidden=whole))  # pyright: ignore[reportArgumentType]
        memory: Any = EagleMemory(
            cache=zero_cache(layer, sizes, mesh, cache_dtype), hidden=last_states(layer.hidden_size)
        )
    else:
        drafter = MedusaDrafter(target.vocab_size, collectives, specs, whole)
        memory = last_states(head.config.hidden_size)
    return Drafting(
        drafter,
        HeadArrays(head=head.params, target=without_layers(params)),
        memory,
        f"{config} {head.config} {dtype}",
        config.synthetic_acceptance,
        reader=drafter,
    )


def head_specs(config: EagleConfig | MedusaConfig) -> Any:
    """The declarations of a head's arrays."""
    return medusa_specs(config) if isinstance(config, MedusaConfig) else eagle_specs(config)


def _with_shared_embedding(head: DraftHead, params: LlamaParams) -> DraftHead:
    """Leaves out an embedding that is a copy of the target's, as it is in most published EAGLE heads."""
    if isinstance(head.config, MedusaConfig) or not head.config.has_embedding:
        return head
    own = head.params.embedding  # pyright: ignore[reportAttributeAccessIssue] - an EAGLE head's
    if own.shape != params.embedding.shape or not jnp.array_equal(own, params.embedding):
        return head
    logger.info("the head's embedding is the model's: it is held once")
    shared = head.params.replace(embedding=None)  # pyright: ignore[reportAttributeAccessIssue]
    return DraftHead(dataclasses.replace(head.config, has_embedding=False), shared)


def random_head(config: SpeculativeConfig, target: ModelConfig, seed: int) -> DraftHead:
    """A head with seeded random weights, of the shape that published heads have beside such a model: for benchmarks."""
    layer = dataclasses.replace(target, num_layers=1, quantization=None, tie_word_embeddings=False, qk_norm=False)
    sizes: EagleConfig | MedusaConfig
    if config.method == "medusa":
        sizes = MedusaConfig(config.num_speculative_tokens, 1, target.hidden_size, target.vocab_size)
    elif config.method == "eagle":
        sizes = EagleConfig(version=1, layer=layer, target_hidden_size=target.hidden_size)
    else:
        taps = tuple(min(max(0, each), target.num_layers) for each in default_tap_layers(target.num_layers))
        sizes = EagleConfig(
            version=3,
            layer=layer,
            target_hidden_size=target.hidden_size,
            tap_layers=taps,
            draft_vocab_size=min(_DRAFT_VOCAB_SIZE, target.vocab_size),
        )
    rng = np.random.default_rng(seed)

    def draw(spec: ParamSpec) -> np.ndarray:
        if spec.dtype is not None:
            return np.arange(spec.size, dtype=spec.dtype).reshape(spec.shape)
        if spec.standard_deviation is None:
            return np.ones(spec.shape, np.float32)
        return rng.standard_normal(spec.shape, np.float32) * np.float32(spec.standard_deviation)

    return DraftHead(sizes, jax.tree.map(draw, head_specs(sizes), is_leaf=is_declared))
