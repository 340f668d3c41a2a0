"""EAGLE, EAGLE-3 and Medusa heads in the whole engine: the text stays, and heads that are right are believed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.build_heads import check_head, head_specs, random_head
from jaxserve.engine.client import EngineClient
from jaxserve.engine.draft_lengths import DraftLengths
from jaxserve.engine.head_showing import HeadShowing
from jaxserve.engine.speculative_programs import SpeculativePrograms
from jaxserve.models.batch import Batch
from jaxserve.models.draft_head import DraftHead
from jaxserve.models.eagle import EagleConfig
from jaxserve.models.kv_cache import KVCache, kv_cache_specs
from jaxserve.models.llama import forward_with_taps
from jaxserve.models.medusa import MedusaConfig
from jaxserve.models.params import LlamaParams
from jaxserve.sharding.collectives import Collectives
from jaxserve.speculative_config import HEAD_METHODS, SpeculativeConfig
from tests.engine.json_answers import check_json_answers
from tests.engine.lean_engine import lean_engine
from tests.engine.test_engine import compilations, until_idle
from tests.engine.test_speculative import check_mixed_batch, greedy, repetitive_requests
from tests.tiny_engine import MODEL_CONFIG, VOCAB_SIZE, Answer, ask, tiny_params

DRAFTS, LENGTH = 3, 40
HIDDEN = MODEL_CONFIG.hidden_size
LAYER = dataclasses.replace(MODEL_CONFIG, num_layers=1)
PROMPTS = [[3, 4, 5] * 4, list(range(2, 30)), [9, 31, 40, 22, 60], [50, 51] * 9]


def zero_like(tree: Any) -> Any:
    return jax.tree.map(np.zeros_like, tree)


def target_params() -> LlamaParams:
    """A model that is one layer in truth, whose embeddings are normed already: an EAGLE head can be a copy of it."""
    params = tiny_params()
    embedding = params.embedding / np.sqrt(np.mean(params.embedding**2, axis=1, keepdims=True))
    first, second = params.layers
    second = dataclasses.replace(second, wo=np.zeros_like(second.wo), w_down=np.zeros_like(second.w_down))
    return dataclasses.replace(params, embedding=embedding, layers=(first, second))


class Text(NamedTuple):
    """What the target says, and what goes on in it there."""

    tokens: np.ndarray  # [LENGTH]
    num_known: int
    hidden: np.ndarray  # [LENGTH, hidden], after the final norm
    taps: np.ndarray  # [LENGTH, 3 * hidden]


@pytest.fixture(scope="module")
def target() -> LlamaParams:
    return target_params()


@pytest.fixture(scope="module")
def plain(target: LlamaParams) -> Iterator[EngineClient]:
    with lean_engine(params=target) as engine:
        yield engine


@pytest.fixture(scope="module")
def texts(plain: EngineClient, target: LlamaParams) -> list[Text]:
    """What the model says after each of the prompts, and its hidden states."""
    specs = kv_cache_specs(MODEL_CONFIG, 1, LENGTH)
    places = np.arange(LENGTH, dtype=np.int32)

    @jax.jit
    def states(params: LlamaParams, tokens: jax.Array) -> Any:
        batch = Batch(
            token_ids=tokens,
            positions=jnp.asarray(places),
            write_pages=jnp.zeros(LENGTH, jnp.int32),
            write_offsets=jnp.asarray(places),
            decode_page_table=jnp.zeros((0, 1), jnp.int32),
            decode_kv_lens=jnp.zeros(0, jnp.int32),
            prefill_page_table=jnp.zeros((1, 1), jnp.int32),
            prefill_query_starts=jnp.array([0, LENGTH], jnp.int32),
            prefill_kv_lens=jnp.array([LENGTH], jnp.int32),
        )
        cache = KVCache(k_pages=jnp.zeros(specs.k_pages.shape), v_pages=jnp.zeros(specs.v_pages.shape))
        hidden, _, taps = forward_with_taps(
            params, cache, batch, config=MODEL_CONFIG, collectives=Collectives(1), tap_layers=(0, 1, 2)
        )
        return hidden, jnp.concatenate(taps, axis=1)

    said = []
    for prompt in PROMPTS:
        tokens = prompt + ask(plain, prompt, greedy(max_tokens=LENGTH - len(prompt)))
        hidden, taps = states(target, jnp.asarray(tokens, jnp.int32))
        said.append(Text(np.asarray(tokens), len(prompt), np.asarray(hidden), np.asarray(taps)))
    return said


def fitted(inputs: list[np.ndarray], outputs: list[np.ndarray]) -> np.ndarray:
    """The matrix that turns ones into the others as well as any."""
    return np.linalg.lstsq(np.concatenate(inputs), np.concatenate(outputs), rcond=1e-4)[0].astype(np.float32)


def eagle_head(target: LlamaParams) -> DraftHead:
    """The target's first layer; of its inputs the embedding alone."""
    config = EagleConfig(version=1, layer=LAYER, target_hidden_size=HIDDEN)
    head = random_head(SpeculativeConfig("eagle", DRAFTS, model="none"), MODEL_CONFIG, 0)
    layer = dataclasses.replace(target.layers[0], attention_norm=None)
    fc = np.concatenate([np.eye(HIDDEN, dtype=np.float32), np.zeros((HIDDEN, HIDDEN), np.float32)])
    return DraftHead(config, head.params.replace(fc=fc, layer=layer))  # pyright: ignore[reportAttributeAccessIssue]


def eagle3_head(target: LlamaParams, texts: list[Text]) -> DraftHead:
    """Finds the next hidden state in those of all depths, for its first draft; it has not all of the tokens."""
    ids = np.delete(np.arange(VOCAB_SIZE, dtype=np.int32), [7, 8, 60])
    config = EagleConfig(
        version=3, layer=LAYER, target_hidden_size=HIDDEN, tap_layers=(0, 1, 2), draft_vocab_size=len(ids)
    )
    head = random_head(SpeculativeConfig("eagle3", DRAFTS, model="none"), MODEL_CONFIG, 0)
    layer = dataclasses.replace(
        head.params.layer, wo=zero_like(target.layers[0].wo), w_down=zero_like(target.layers[0].w_down)
    )  # pyright: ignore
    fc = fitted([text.taps[:-1] for text in texts], [text.hidden[1:] for text in texts])
    params = head.params.replace(fc=fc, layer=layer, lm_head=target.lm_head[:, ids], token_ids=ids)  # pyright: ignore
    return DraftHead(config, params)


def medusa_heads(texts: list[Text]) -> DraftHead:
    """Each finds the token of its place in the last hidden state."""
    config = MedusaConfig(num_heads=DRAFTS, num_blocks=1, hidden_size=HIDDEN, vocab_size=VOCAB_SIZE)
    one_hot = np.eye(VOCAB_SIZE, dtype=np.float32)
    heads = []
    for number, head in enumerate(zero_like(random_medusa().params.heads)):
        ahead = number + 2
        scores = fitted([text.hidden[:-ahead] for text in texts], [one_hot[text.tokens[ahead:]] for text in texts])
        heads.append(head.replace(lm_head=scores))
    return DraftHead(config, random_medusa().params.replace(heads=tuple(heads)))  # pyright: ignore[reportAttributeAccessIssue]


def random_medusa() -> DraftHead:
    return random_head(SpeculativeConfig("medusa", DRAFTS, model="none"), MODEL_CONFIG, 0)


@pytest.fixture(scope="module", params=["eagle", "eagle3", pytest.param("medusa", marks=pytest.mark.long)])
def engine(request: pytest.FixtureRequest, target: LlamaParams, texts: list[Text]) -> Iterator[EngineClient]:
    heads = {
        "eagle": lambda: eagle_head(target),
        "eagle3": lambda: eagle3_head(target, texts),
        "medusa": lambda: medusa_heads(texts),
    }
    config = SpeculativeConfig(request.param, DRAFTS, model="of the test")
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "eagle":
            patch.setattr(SpeculativePrograms, "fewest_rows", 8)  # as on a GPU
        with lean_engine(config, heads[request.param](), params=target) as engine:
            yield engine


def test_a_head_that_is_right_is_believed_and_the_text_stays(engine: EngineClient, texts: list[Text]) -> None:
    stats = engine.stats().speculative
    assert stats is not None
    before = stats.num_drafts, stats.accepted_per_position
    for text in texts:
        prompt = text.tokens[: text.num_known].tolist()
        assert ask(engine, prompt, greedy(max_tokens=LENGTH - len(prompt))) == text.tokens[text.num_known :].tolist()
    stats = engine.stats().speculative
    assert stats is not None
    drafts = stats.num_drafts - before[0]
    kept = [now - then for now, then in zip(stats.accepted_per_position, before[1], strict=True)]
    assert kept[0] > (0.2 if stats.method == "eagle3" else 0.5) * drafts, (kept, drafts)  # by chance: 0.02
    if stats.method == "eagle":  # the only one that is right at all places
        assert kept[-1] > 0.5 * drafts, (kept, drafts)


def test_a_mixed_batch_gives_what_each_request_gives_without_speculation(
    plain: EngineClient, engine: EngineClient
) -> None:
    check_mixed_batch(plain, engine, repetitive_requests(12, seed=5), more_kept_than=0)


def test_json_is_what_it_is_without_speculation(plain: EngineClient, engine: EngineClient) -> None:
    check_json_answers(plain, engine)


def test_nothing_is_compiled_while_heads_draft(engine: EngineClient) -> None:
    with compilations() as events:
        answers = [Answer(engine, *request) for request in repetitive_requests(4, seed=4)]
        for answer in answers:
            answer.wait()
        until_idle(engine)
    assert not events


def test_a_whole_pass_writes_what_it_gives_over_what_the_step_before_gave(
    target: LlamaParams, texts: list[Text]
) -> None:
    """Features and drafts too: XLA changes the launch graph of a program for each array that moves."""
    config, [text, *_] = SpeculativeConfig("eagle3", DRAFTS, model="of the test"), texts
    with lean_engine(config, eagle3_head(target, texts), params=target, layerwise=False) as engine:
        prompt = text.tokens[: text.num_known].tolist()
        assert ask(engine, prompt, greedy(max_tokens=LENGTH - len(prompt))) == text.tokens[text.num_known :].tolist()
        stats, runner = engine.stats().speculative, engine._loop._runner
        assert stats is not None and stats.num_accepted_tokens > 0
        assert runner._speculator is not None
        programs = [program for program, _ in runner._speculator._draft.values()]
        programs += [executor.programs[0] for executor in runner._forward.values()]
        for program in programs:
            use = program.memory_analysis()
            assert use.output_size_in_bytes - use.alias_size_in_bytes <= 16 * program.out_tree.num_leaves  # pointers


def test_a_head_of_another_model_is_refused_with_both_numbers() -> None:
    config = SpeculativeConfig("medusa", DRAFTS, model="of the test")
    head = random_medusa()
    with pytest.raises(ValueError, match="hidden_size=32 of the head must be the model's, 48"):
        check_head(config, dataclasses.replace(MODEL_CONFIG, hidden_size=48), head)
    with pytest.raises(ValueError, match="vocab_size=64 of the head must be the model's, 65"):
        check_head(config, dataclasses.replace(MODEL_CONFIG, vocab_size=65), head)
    with pytest.raises(ValueError, match="num_speculative_tokens=4 must not be above the 3 Medusa heads"):
        check_head(dataclasses.replace(config, num_speculative_tokens=4), MODEL_CONFIG, head)
    with pytest.raises(ValueError, match="'eagle' takes no head of kind 'medusa'"):
        check_head(dataclasses.replace(config, method="eagle"), MODEL_CONFIG, head)


def test_a_head_that_was_not_shown_all_drafts_on_and_the_text_stays(
    target: LlamaParams, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = [True]

    def decide() -> bool:
        """By turns, some steps are shown and some are not."""
        decided.append(len(decided) % 12 > 5)
        return decided[-1]

    def decide_decoding(*_: object) -> tuple[bool, bool]:
        before, now = decided[-1], decide()
        return before and now, now

    monkeypatch.setattr(HeadShowing, "shows_prompts", lambda *_: decide())
    monkeypatch.setattr(HeadShowing, "shows_decoding", decide_decoding)
    config = SpeculativeConfig("eagle", DRAFTS, model="of the test")
    lengths = DraftLengths("eagle", (DRAFTS,), 3, adaptive=False, reads_states=True)
    with lean_engine(config, eagle_head(target), params=target, lengths=lengths) as engine:
        for text in texts:
            prompt = text.tokens[: text.num_known].tolist()
            said = ask(engine, prompt, greedy(max_tokens=LENGTH - len(prompt)))
            assert said == text.tokens[text.num_known :].tolist()
        stats = engine.stats().speculative
    assert stats is not None
    assert stats.num_drafts > 5
    assert stats.num_accepted_tokens > 0.2 * stats.num_draft_tokens


@pytest.mark.long
def test_a_head_over_two_devices_drafts_as_on_one(target: LlamaParams, texts: list[Text]) -> None:
    config = SpeculativeConfig("eagle", DRAFTS, model="of the test")
    with lean_engine(config, eagle_head(target), params=target, tensor_parallel_size=2) as engine:
        for text in texts:
            prompt = text.tokens[: text.num_known].tolist()
            said = ask(engine, prompt, greedy(max_tokens=LENGTH - len(prompt)))
            assert said == text.tokens[text.num_known :].tolist()
        stats = engine.stats().speculative
        assert stats is not None
        assert stats.accepted_per_position[-1] > 0.5 * stats.num_drafts


@pytest.mark.parametrize("method", HEAD_METHODS)
def test_random_heads_have_the_arrays_that_are_declared(method: Any) -> None:
    head = random_head(SpeculativeConfig(method, DRAFTS, model="none"), MODEL_CONFIG, 0)
    check_head(SpeculativeConfig(method, DRAFTS, model="none"), MODEL_CONFIG, head)
    declared = head_specs(head.config)
    assert jax.tree.map(lambda array: array.shape, head.params) == jax.tree.map(lambda spec: spec.shape, declared)
