"""Programs of speculation by themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.build import build_engine
from jaxserve.engine.build_heads import make_head_drafting, place_head, random_head
from jaxserve.engine.decode_state import empty_state
from jaxserve.engine.device_batch import Bucket, Sizes, pack
from jaxserve.engine.processor_state import count_verified, empty_processors, rows_of
from jaxserve.engine.request import Request
from jaxserve.engine.schedule import DecodeRow, ScheduledBatch
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.speculative_programs import SpeculativePrograms, process_positions, resize_features
from jaxserve.models.eagle import eagle_forward
from jaxserve.models.logit_processors import process_logits
from jaxserve.models.speculative_sampling import Drafts
from jaxserve.progress import NoProgress
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import make_mesh
from jaxserve.speculative_config import SpeculativeConfig
from tests.tiny_engine import MODEL_CONFIG, tiny_params

VOCAB = 11
SLOTS = 4


def test_features_of_a_step_lie_where_those_of_a_larger_one_do() -> None:
    step, larger = Bucket(2, 4, 3), Bucket(4, 4, 5)
    features = jnp.asarray(np.arange(1, 6, dtype=np.float32)[:, None] * np.ones((1, 2), np.float32))
    resized = jax.jit(resize_features(step, larger))(features)
    assert np.asarray(resized)[:, 1].tolist() == [1, 2, 0, 0, 3, 4, 5, 0, 0]


def test_penalties_and_min_tokens_at_a_position_know_the_drafts_before_it() -> None:
    rng = np.random.default_rng(0)
    processors = dataclasses.replace(
        empty_processors(SLOTS, VOCAB),
        output_counts=jnp.asarray(rng.integers(0, 2, (SLOTS, VOCAB)), jnp.int32),
        penalties=jnp.asarray(rng.uniform(0.5, 1.5, (SLOTS, 3)), jnp.float32),
        min_tokens=jnp.full((SLOTS,), 6, jnp.int32),
    )
    stops = processors.stop_ids.at[:, 0].set(3)
    processors = dataclasses.replace(processors, stop_ids=stops)
    state = dataclasses.replace(
        empty_state(Sizes(SLOTS, 2, 4, 4), speculates=True),
        processed=jnp.array([True, True, False, True]),
        output_counts=jnp.array([5, 4, 4, 9], jnp.int32),
    )
    slots = jnp.array([1, 0, 3, 2], jnp.int32)
    drafts = Drafts(
        token_ids=jnp.asarray(rng.integers(0, VOCAB, (4, 3)), jnp.int32), counts=jnp.full((4,), 3, jnp.int32)
    )
    logits = rng.normal(0, 2, (4, 4, VOCAB)).astype(np.float32)
    together = jax.jit(process_positions)(jnp.asarray(logits.reshape(-1, VOCAB)), state, processors, slots, drafts)
    together = np.asarray(together).reshape(4, 4, VOCAB)
    for position in range(4):
        alone = jax.jit(process_logits)(
            jnp.asarray(logits[:, position]),
            jax.jit(rows_of)(processors, state.processed, slots),
            jnp.take(state.output_counts, slots) + position,
        )
        np.testing.assert_allclose(together[:, position], np.asarray(alone), rtol=1e-6)
        if position < 3:
            one = jnp.ones((4,), jnp.int32)
            processors = jax.jit(count_verified)(processors, slots, drafts.token_ids[:, position : position + 1], one)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_head_sees_the_same_where_its_rows_are_padded(
    method: Any, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two rows, in a step without prompts; on a GPU products of fewer than eight rows are padded."""
    rng, bucket, sizes = np.random.default_rng(0), Bucket(2, 0, 0, num_drafts), Sizes(4, 4, 16, 4)
    mesh = make_mesh(jax.devices("cpu"), 1)
    config = SpeculativeConfig(method, 3, model="random")
    params = jax.tree.map(jnp.asarray, tiny_params())
    head = place_head(random_head(config, MODEL_CONFIG, 0), jnp.dtype(jnp.float32), mesh)
    drafting = make_head_drafting(config, MODEL_CONFIG, params, head, sizes, mesh, jnp.dtype(jnp.float32))
    assert drafting.reader is not None
    state = empty_state(sizes, speculates=True)
    history = jnp.asarray(rng.integers(0, MODEL_CONFIG.vocab_size, (4, sizes.longest)), jnp.int32)
    state = dataclasses.replace(
        state,
        kv_lens=jnp.array([6, 9, 5, 7], jnp.int32),
        page_table=jnp.arange(16, dtype=jnp.int32).reshape(4, 4),
        speculation=dataclasses.replace(state.speculation, history=history),  # pyright: ignore
    )
    request = Request("request", (1,), SamplingParams(), arrival_time=0.0)
    rows = [DecodeRow(Sequence(request, 0, 0, frozenset(), 9), slot, -1, -1, num_drafts) for slot in (2, 1)]
    packed = jnp.asarray(pack(ScheduledBatch(tuple(rows), (), num_drafts=num_drafts), bucket, sizes))
    size = max(1, len(drafting.reader.tap_layers)) * MODEL_CONFIG.hidden_size
    features = jnp.asarray(rng.standard_normal((bucket.decode_tokens, size), np.float32))
    verified = [] if not num_drafts else [jnp.zeros((2, num_drafts + 3), jnp.int32).at[:, -2].set(jnp.array([1, 3]))]
    following = jnp.zeros((0,), jnp.int32)
    seen, num_tokens = [], []

    def forward(head: Any, target: Any, cache: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        num_tokens.append(batch.token_ids.shape[0])
        return eagle_forward(head, target, cache, batch, *rest, **more)

    monkeypatch.setattr("jaxserve.engine.head_drafters.eagle_forward", forward)
    for fewest in (1, 8):
        monkeypatch.setattr(SpeculativePrograms, "fewest_rows", fewest)
        programs = SpeculativePrograms(drafting.drafter, sizes, mesh)
        observe = jax.jit(programs.observe(drafting.reader, bucket))
        seen.append(observe(drafting.params, drafting.memory, state, packed, features, following, *verified))
    if method != "medusa":
        assert num_tokens == [bucket.decode_tokens, 8]
    before = jax.tree.leaves(drafting.memory)
    for old, alone, padded in zip(before, *map(jax.tree.leaves, seen), strict=True):
        assert not np.array_equal(old, alone)
        np.testing.assert_allclose(alone, padded, atol=1e-6)


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        (SpeculativeConfig("early_exit", 2, num_layers=2), "num_layers=2 must be below the model's 2 layers"),
        (SpeculativeConfig("draft_model", 2, model="x"), "needs a draft model"),
    ],
)
def test_drafters_that_do_not_fit_the_engine_are_refused(speculative: SpeculativeConfig, message: str) -> None:
    config = EngineConfig(max_model_len=64, max_num_seqs=1, page_size=4, num_pages=18, speculative_config=speculative)
    with pytest.raises(ValueError, match=message):
        build_engine(MODEL_CONFIG, tiny_params(), config, NoProgress())
