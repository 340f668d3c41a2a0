"""EAGLE heads, over pages in chunks and one pair at a time, against the papers' formulas over the whole sequence."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve.config import ModelConfig
from jaxserve.models.batch import Batch
from jaxserve.models.eagle import EagleConfig, default_tap_layers, eagle_forward, eagle_logits, eagle_specs, take_in
from jaxserve.models.kv_cache import KVCache, kv_cache_specs
from jaxserve.models.llama import forward, forward_with_taps
from jaxserve.models.params import LlamaParams
from jaxserve.sharding.collectives import Collectives
from jaxserve.sharding.mesh import make_mesh
from jaxserve.sharding.placement import named_shardings, partition_specs
from tests.models.head_cases import LAYER, drawn, eagle_reference, norm, taken_in
from tests.tiny_engine import random_params

EAGLE = EagleConfig(version=1, layer=LAYER, target_hidden_size=16)
WITH_BIAS = dataclasses.replace(EAGLE, has_bias=True, has_embedding=True)
EAGLE3 = EagleConfig(version=3, layer=LAYER, target_hidden_size=16, tap_layers=(2, 3, 3), draft_vocab_size=10)
NORMED_TOGETHER = dataclasses.replace(EAGLE3, input_norm="together", tap_layers=(2, 3, 3, 5))
NORMED_EACH = dataclasses.replace(EAGLE3, input_norm="each", norms_output=True)
NORMED = dataclasses.replace(EAGLE3, norms_residual=True, target_hidden_size=12, has_embedding=True)

PAGE, NUM_PAGES, LENGTH, CHUNK = 4, 5, 14, 9
PAGES = np.array([3, 0, 4, 1], np.int32)
WHOLE = PartitionSpec()


def batch_of(tokens: np.ndarray, start: int) -> Batch:
    """A chunk that begins at a place; a single token as a decode row."""
    places = np.arange(start, start + len(tokens), dtype=np.int32)
    decodes = len(tokens) == 1
    end = np.array([start + len(tokens)], np.int32)
    table, no_table, nothing = PAGES[None], np.zeros((0, 4), np.int32), np.zeros(0, np.int32)
    return Batch(
        token_ids=tokens.astype(np.int32),  # pyright: ignore[reportArgumentType]
        positions=places,  # pyright: ignore[reportArgumentType]
        write_pages=PAGES[places // PAGE],  # pyright: ignore[reportArgumentType]
        write_offsets=places % PAGE,  # pyright: ignore[reportArgumentType]
        decode_page_table=table if decodes else no_table,  # pyright: ignore[reportArgumentType]
        decode_kv_lens=end if decodes else nothing,  # pyright: ignore[reportArgumentType]
        prefill_page_table=no_table if decodes else table,  # pyright: ignore[reportArgumentType]
        prefill_query_starts=np.zeros(1, np.int32) if decodes else np.array([0, len(tokens)], np.int32),  # pyright: ignore[reportArgumentType]
        prefill_kv_lens=nothing if decodes else end,  # pyright: ignore[reportArgumentType]
    )


def empty_cache(config: ModelConfig, mesh: Any) -> KVCache:
    specs = kv_cache_specs(config, NUM_PAGES, PAGE)
    arrays = KVCache(k_pages=jnp.zeros(specs.k_pages.shape), v_pages=jnp.zeros(specs.v_pages.shape))
    return jax.device_put(arrays, named_shardings(specs, mesh))


@pytest.mark.parametrize(
    ("config", "devices"),
    [
        (EAGLE, 1),
        (WITH_BIAS, 2),
        (EAGLE3, 2),
        (NORMED, 1),
        pytest.param(NORMED_TOGETHER, 1, marks=pytest.mark.long),
        (NORMED_EACH, 1),
    ],
    ids=["eagle", "eagle with a bias", "eagle3", "with a normed residual", "of normed inputs", "eagle3.1"],
)
def test_hidden_states_and_scores_are_those_of_the_paper(config: EagleConfig, devices: int) -> None:
    specs = eagle_specs(config)
    params = drawn(specs)
    target = drawn(LlamaParams(embedding=specs_of_embedding(), layers=(), final_norm=None, lm_head=specs_of_head()), 1)
    mesh, collectives = make_mesh(jax.devices("cpu"), devices), Collectives(devices)
    target_specs = LlamaParams(
        embedding=PartitionSpec("tp"), layers=(), final_norm=None, lm_head=PartitionSpec(None, "tp")
    )
    cache_specs = partition_specs(kv_cache_specs(LAYER, NUM_PAGES, PAGE))

    def run(params: Any, target: Any, cache: Any, batch: Batch, features: Any) -> Any:
        hidden = take_in(params, features, config=config) if features.shape[1] == config.num_inputs else features
        hidden, cache = eagle_forward(params, target, cache, batch, hidden, config=config, collectives=collectives)
        return hidden, eagle_logits(params, target, hidden, config=config, collectives=collectives), cache

    program = jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(partition_specs(specs), target_specs, cache_specs, WHOLE, WHOLE),
            out_specs=(WHOLE, WHOLE, cache_specs),
            check_vma=False,
        )
    )
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, LAYER.vocab_size, LENGTH)
    width = 16 if config.version == 1 else config.num_inputs
    features = rng.standard_normal((LENGTH, width)).astype(np.float32)
    hidden = features if config.version == 1 else taken_in(params, config, features)
    embedding = params.embedding if config.has_embedding else target.embedding

    placed = jax.device_put(params, named_shardings(specs, mesh))
    cache, outs, scores = empty_cache(LAYER, mesh), [], []
    for start, end in [(0, CHUNK), *((place, place + 1) for place in range(CHUNK, LENGTH))]:
        out, score, cache = program(placed, target, cache, batch_of(tokens[start:end], start), features[start:end])
        outs.append(out)
        scores.append(score)
    wanted = eagle_reference(params, config, embedding, tokens, hidden)
    np.testing.assert_allclose(np.concatenate(outs), wanted, rtol=1e-3, atol=1e-4)
    if config.version == 1:
        wanted_scores = wanted @ target.lm_head
    else:
        wanted_scores = np.full((LENGTH, LAYER.vocab_size), -np.inf, np.float32)
        normed = wanted if config.norms_output else norm(wanted, params.final_norm, config.layer.rms_norm_eps)
        wanted_scores[:, params.token_ids] = normed @ params.lm_head
    np.testing.assert_allclose(np.concatenate(scores), wanted_scores, rtol=1e-3, atol=1e-4)

    # The next pair takes in what the head gave for the last one.
    drafted = int(np.argmax(wanted_scores[-1]))
    out, _, _ = program(placed, target, cache, batch_of(np.array([drafted]), LENGTH), outs[-1][-1:])
    longer = np.concatenate([hidden, wanted[-1:]])
    wanted = eagle_reference(params, config, embedding, np.append(tokens, drafted), longer)
    np.testing.assert_allclose(out[0], wanted[-1], rtol=1e-3, atol=1e-4)


def specs_of_embedding() -> Any:
    return eagle_specs(WITH_BIAS).embedding


def specs_of_head() -> Any:
    return dataclasses.replace(eagle_specs(EAGLE3).lm_head, shape=(16, LAYER.vocab_size))


def test_what_goes_into_layers_is_what_models_of_fewer_layers_leave() -> None:
    config = dataclasses.replace(LAYER, num_layers=4)
    params = random_params(config)
    mesh, collectives = make_mesh(jax.devices("cpu"), 1), Collectives(1)
    batch = batch_of(np.arange(6), 0)

    def taps(params: LlamaParams) -> Any:
        return forward_with_taps(
            params, empty_cache(config, mesh), batch, config=config, collectives=collectives, tap_layers=(2, 4, 0)
        )

    @jax.jit
    def whole(params: LlamaParams) -> Any:
        return forward(params, empty_cache(config, mesh), batch, config=config, collectives=collectives)[0]

    hidden, _, (second, last, first) = jax.jit(taps)(params)
    np.testing.assert_allclose(first, params.embedding[:6], rtol=1e-5)
    for layers, tapped in ((2, second), (4, last)):
        shorter = params.replace(layers=params.layers[:layers])  # pyright: ignore[reportAttributeAccessIssue]
        out = whole(shorter)
        np.testing.assert_allclose(
            norm(np.asarray(tapped), params.final_norm, config.rms_norm_eps), out, rtol=1e-4, atol=1e-5
        )
    np.testing.assert_allclose(out, hidden, rtol=1e-5, atol=1e-6)


def test_sizes_that_do_not_go_together_are_told_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="hidden_size=16 of the head must be the model's, 12"):
        dataclasses.replace(EAGLE, target_hidden_size=12)
    with pytest.raises(ValueError, match="EAGLE-3 has both"):
        dataclasses.replace(EAGLE, tap_layers=(1, 2, 3))
    assert default_tap_layers(32) == (2, 16, 29)
