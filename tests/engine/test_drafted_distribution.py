"""Drafters and verification together, in the engine's own programs: tokens are drawn as the target alone draws them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.build_drafting import Model, make_drafting
from jaxserve.engine.build_heads import random_head
from jaxserve.engine.decode_state import DecodeState, empty_state
from jaxserve.engine.device_batch import Bucket, Sizes, pack
from jaxserve.engine.drafters import speculation_of
from jaxserve.engine.processor_state import ProcessorState, empty_processors
from jaxserve.engine.programs import ProgramFactory
from jaxserve.engine.request import Request
from jaxserve.engine.runner import zero_cache
from jaxserve.engine.schedule import DecodeRow, ScheduledBatch
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.speculative_programs import SpeculativePrograms
from jaxserve.models.params import LlamaParams
from jaxserve.models.speculative_sampling import Drafts
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import make_mesh
from jaxserve.speculative_config import SpeculativeConfig
from tests.models.test_sampling import VOCAB
from tests.models.test_speculative_sampling import NUM_DRAFTS, OUTPUT_COUNTS, PENALTIES, Drawn, check_all, exact
from tests.optimized_programs import OPTIMIZED
from tests.tiny_engine import MODEL_CONFIG, random_params

CONFIG = dataclasses.replace(
    MODEL_CONFIG, vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1
)
ROWS = 2000  # sequences of a step: all of one token, which is the same
START = 3
SIZES = Sizes(max_num_seqs=ROWS, pages_per_seq=1, num_pages=ROWS, page_size=8)
BUCKET = Bucket(ROWS, 0, 0, NUM_DRAFTS)
FLOAT32 = jnp.dtype(jnp.float32)


class Programs(NamedTuple):
    """What the engine runs in a step with drafts."""

    draft: Any
    forward: Any
    verify: Any
    params: LlamaParams
    drafter_params: Any
    drafter_memory: Any  # None: the target's cache
    cache: Any
    packed: jax.Array


def sharp(params: LlamaParams, noise: float = 0.0) -> LlamaParams:
    """The model with clear likes and dislikes; with noise it is another, which often likes the same."""
    rng = np.random.default_rng(5)
    changed = jax.tree.map(lambda array: array * (1 + noise * rng.standard_normal(array.shape, np.float32)), params)
    return dataclasses.replace(changed, lm_head=1.5 * changed.lm_head)


@pytest.fixture(
    scope="module",
    params=["draft_model", *(pytest.param(each, marks=pytest.mark.long) for each in ("early_exit", "eagle", "medusa"))],
)
def programs(request: pytest.FixtureRequest) -> Programs:
    mesh = make_mesh(jax.devices("cpu"), 1)
    model = random_params(CONFIG)
    params = jax.tree.map(jnp.asarray, sharp(model))
    has_model = request.param in ("draft_model", "eagle", "medusa")
    config = SpeculativeConfig(request.param, NUM_DRAFTS, model="of the test" if has_model else None)
    draft: Any = None
    if request.param == "draft_model":
        draft = Model(CONFIG, jax.tree.map(jnp.asarray, sharp(model, noise=0.5)))
    elif has_model:
        draft = random_head(config, CONFIG, 0)
        draft = dataclasses.replace(draft, params=jax.tree.map(jnp.asarray, draft.params))
    drafting = make_drafting(config, Model(CONFIG, params), draft, SIZES, mesh, FLOAT32)
    factory = ProgramFactory(CONFIG, SIZES, mesh, 1)
    speculation = SpeculativePrograms(drafting.drafter, SIZES, mesh)
    memory: Any = None if drafting.drafter.uses_target_cache else drafting.memory
    if (
        drafting.reader is not None
    ):  # what the head makes of the last token is the same for all: what it is matters little
        hidden = jnp.broadcast_to(jnp.asarray(np.random.default_rng(6).standard_normal(16, np.float32)), (ROWS, 16))
        memory = hidden if request.param == "medusa" else dataclasses.replace(memory, hidden=hidden)
    one = Sequence(Request("request", (START,), SamplingParams(), arrival_time=0.0), 0, 0, frozenset(), 9)
    rows = tuple(DecodeRow(one, slot, -1, -1, NUM_DRAFTS) for slot in range(ROWS))
    return Programs(
        draft=jax.jit(speculation.draft(BUCKET, "full"), compiler_options=OPTIMIZED),
        forward=jax.jit(factory.forward(BUCKET, BUCKET.rows), compiler_options=OPTIMIZED),
        verify=jax.jit(speculation.verify_full(), compiler_options=OPTIMIZED),
        params=params,
        drafter_params=drafting.params,
        drafter_memory=memory,
        cache=zero_cache(CONFIG, SIZES, mesh, FLOAT32),
        packed=jnp.asarray(pack(ScheduledBatch(rows, (), num_drafts=NUM_DRAFTS), BUCKET, SIZES)),
    )


def begun(temperature: float, top_p: float) -> tuple[DecodeState, ProcessorState]:
    """Sequences of one token, whose outputs are said to hold `OUTPUT_COUNTS` before it."""
    state = empty_state(SIZES, speculates=True)
    speculation = speculation_of(state)
    state = dataclasses.replace(
        state,
        last_tokens=jnp.full((ROWS,), START, jnp.int32),
        page_table=jnp.arange(ROWS, dtype=jnp.int32)[:, None],
        temperature=jnp.full((ROWS,), temperature, jnp.float32),
        top_p=jnp.full((ROWS,), top_p, jnp.float32),
        processed=jnp.ones((ROWS,), jnp.bool_),
        speculation=dataclasses.replace(speculation, history=jnp.full((ROWS, SIZES.longest), START, jnp.int32)),
    )
    processors = dataclasses.replace(
        empty_processors(ROWS, VOCAB),
        output_counts=jnp.broadcast_to(jnp.asarray(OUTPUT_COUNTS), (ROWS, VOCAB)),
        penalties=jnp.broadcast_to(jnp.asarray(PENALTIES, jnp.float32), (ROWS, 3)),
    )
    return state, processors


def drawn(programs: Programs, state: DecodeState, processors: ProcessorState, draws: int) -> Drawn:
    """What many steps give, each of them with seeds of its own."""
    parts: list[tuple[np.ndarray, ...]] = []
    rng = np.random.default_rng(7)
    for _ in range(draws // ROWS):
        state = dataclasses.replace(state, seeds=jnp.asarray(rng.integers(0, 1 << 32, (ROWS, 2), np.uint32)))
        cache, memory = programs.cache, programs.drafter_memory
        memory, drafts = programs.draft(
            programs.drafter_params, cache if memory is None else memory, state, programs.packed, processors
        )
        cache = memory if programs.drafter_memory is None else cache
        bare = dataclasses.replace(drafts, log_probabilities=None)
        result = programs.forward(programs.params, cache, state, programs.packed, bare)
        _, _, packed, _ = programs.verify(result.state, processors, result.logits, result.slots, drafts)
        packed = np.asarray(packed)
        parts.append((np.asarray(drafts.token_ids), packed[:, : NUM_DRAFTS + 1], packed[:, NUM_DRAFTS + 1]))
    return Drawn(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def logits_after(programs: Programs, state: DecodeState) -> np.ndarray:
    """Of the target after the first token and any two that follow it: [VOCAB, VOCAB, places, VOCAB]."""
    pairs = np.stack(np.divmod(np.arange(ROWS) % VOCAB**2, VOCAB), axis=1).astype(np.int32)
    drafts = Drafts(token_ids=jnp.asarray(pairs), counts=jnp.full((ROWS,), NUM_DRAFTS, jnp.int32))
    result = programs.forward(programs.params, programs.cache, state, programs.packed, drafts)
    return np.asarray(result.logits).reshape(ROWS, NUM_DRAFTS + 1, VOCAB)[: VOCAB**2].reshape(VOCAB, VOCAB, -1, VOCAB)


@pytest.mark.parametrize(
    ("temperature", "draws"),
    [(0.7, 50_000), *(pytest.param(each, 200_000, marks=pytest.mark.long) for each in (0.7, 1.3))],
)
def test_with_penalties_each_token_is_distributed_as_the_target_alone_draws_it(
    programs: Programs, temperature: float, draws: int
) -> None:
    limits: dict[str, Any] = {"temperature": temperature, "top_p": 0.9}
    state, processors = begun(**limits)
    logits = logits_after(programs, state)

    def wanted(_: np.ndarray, before: list[int]) -> np.ndarray:
        first, second = [*before, 0, 0][:2]
        row = logits[first, second, len(before)]
        return exact(np.tile(row, (VOCAB + 1, 1)), before, PENALTIES, **limits)

    found = drawn(programs, state, processors, draws)
    check_all(found, wanted)
    kept = np.mean(found.counts > 1)
    assert 0.1 < kept < 0.98  # else one of the two ways was not taken
