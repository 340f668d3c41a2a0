"""From a speculative configuration to a drafter with its arrays on the engine's devices."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import ModelConfig
from jaxserve.engine.build_heads import check_head, head_bytes_per_token, make_head_drafting
from jaxserve.engine.device_batch import Sizes
from jaxserve.engine.drafters import PromptLookup
from jaxserve.engine.model_drafter import ModelDrafter
from jaxserve.engine.runner import zero_cache
from jaxserve.engine.speculator import Drafting
from jaxserve.models.draft_head import DraftHead
from jaxserve.models.kv_cache import kv_bytes_per_token, kv_cache_specs
from jaxserve.models.params import LlamaParams, param_specs
from jaxserve.sharding.collectives import Collectives
from jaxserve.sharding.placement import partition_specs
from jaxserve.speculative_config import HEAD_METHODS, SpeculativeConfig

_PADDING = 512  # tokens by which the vocabularies of one family differ at most, since they are padded to multiples


@dataclass(frozen=True)
class Model:
    """A model and its arrays: as a checkpoint has them, or as devices run them."""

    config: ModelConfig
    params: LlamaParams


def check_draft_model(config: SpeculativeConfig | None, target: ModelConfig, draft: Model | DraftHead | None) -> None:
    """Raises:
    ValueError: a draft model (or head) that is missing, not asked for, or a head of another model.

    Whether a draft model has the same tokens its tokenizer tells, which the engine does not know; the sizes of the
    vocabularies may differ, for models of one family are padded to sizes of their own.
    """
    wants_head = config is not None and config.method in HEAD_METHODS
    wants_one = wants_head or (config is not None and config.method == "draft_model")
    if wants_one != (draft is not None):
        raise ValueError(
            f"speculative_config={config} {'needs a' if wants_one else 'takes no'} draft model beside the one that is served"
        )
    if config is None or draft is None:
        return
    if isinstance(draft, DraftHead) != wants_head:
        raise ValueError(f"speculative method {config.method!r} takes {'a head' if wants_head else 'no head'}")
    if isinstance(draft, DraftHead):
        check_head(config, target, draft)


def check_depth(config: SpeculativeConfig | None, target: ModelConfig) -> None:
    """Before there are any weights: whether an early exit leaves layers out.

    Raises:
        ValueError: it does not.
    """
    if config is not None and config.method == "early_exit":
        _num_early_layers(config, target)


def check_vocabulary_size(target: ModelConfig, draft: ModelConfig) -> None:
    """Of models with random weights, which have no tokens to compare: their numbers must be alike, up to padding.

    Raises:
        ValueError: the draft model is of another family.
    """
    if abs(target.vocab_size - draft.vocab_size) >= _PADDING:
        raise ValueError(
            f"the draft model has vocab_size={draft.vocab_size}, the model {target.vocab_size}: it has other tokens; use a "
            "draft model of the same family"
        )


def draft_bytes_per_token(draft: Model | DraftHead | None, cache_dtype: jnp.dtype) -> int:
    """Bytes that the draft model's own KV cache takes for each token, over all devices."""
    if isinstance(draft, DraftHead):
        return head_bytes_per_token(draft, cache_dtype)
    return 0 if draft is None else kv_bytes_per_token(draft.config, cache_dtype)


def make_drafting(
    config: SpeculativeConfig,
    target: Model,
    draft: Model | DraftHead | None,
    sizes: Sizes,
    mesh: Mesh,
    cache_dtype: jnp.dtype,
) -> Drafting:
    """The drafter that the configuration asks for.

    Args:
        target, draft: placed on the mesh, with configs as its devices run them.

    Raises:
        ValueError: it does not go with the model's sizes.
    """
    if config.method == "ngram":
        lookup = PromptLookup(config.longest_lookup, config.shortest_lookup)
        return Drafting(lookup, (), (), f"{config}", config.synthetic_acceptance)
    if isinstance(draft, DraftHead):
        return make_head_drafting(config, target.config, target.params, draft, sizes, mesh, cache_dtype)
    if draft is not None:
        memory = zero_cache(draft.config, sizes, mesh, cache_dtype)
        return _model_drafting(config, draft, target.config, memory, sizes, mesh)
    return _model_drafting(config, early_layers(config, target), target.config, None, sizes, mesh)


def early_layers(config: SpeculativeConfig, target: Model) -> Model:
    """The first layers of the target, with its own final norm and head; the arrays are the target's.

    Raises:
        ValueError: it has no layer fewer than that.
    """
    layers = _num_early_layers(config, target.config)
    params = target.params.replace(layers=target.params.layers[:layers])  # pyright: ignore[reportAttributeAccessIssue]
    return Model(dataclasses.replace(target.config, num_layers=layers), params)


def _num_early_layers(config: SpeculativeConfig, target: ModelConfig) -> int:
    layers = config.num_layers or max(1, target.num_layers // 4)
    if layers >= target.num_layers:
        raise ValueError(
            f"speculative num_layers={layers} must be below the model's {target.num_layers} layers: an early exit "
            "leaves some of them out"
        )
    return layers


def _model_drafting(
    config: SpeculativeConfig, model: Model, target: ModelConfig, memory: object, sizes: Sizes, mesh: Mesh
) -> Drafting:
    """Args:
    memory: the drafter's own KV cache; None: it uses the target's.
    """
    cache_config = target if memory is None else model.config
    drafter = ModelDrafter(
        config=model.config,
        vocab_size=target.vocab_size,
        collectives=Collectives(mesh.size),
        params_specs=partition_specs(param_specs(model.config)),
        memory_specs=partition_specs(kv_cache_specs(cache_config, sizes.num_pages, sizes.page_size)),
        uses_target_cache=memory is None,
    )
    dtype = model.params.embedding.dtype
    return Drafting(drafter, model.params, memory, f"{config} {model.config} {dtype}", config.synthetic_acceptance)
