"""Speculation in the whole engine: what comes out is what comes out without it, whatever is drafted."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.engine.build_drafting import Model
from jaxserve.engine.client import EngineClient
from jaxserve.engine.draft_lengths import DraftLengths, Trial
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.speculative_programs import SpeculativePrograms
from jaxserve.models.params import LlamaParams
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative_config import SpeculativeConfig
from tests.engine.json_answers import check_json_answers
from tests.engine.lean_engine import lean_engine
from tests.engine.test_constraints import WordRule
from tests.engine.test_engine import compilations, mixed_requests, until_idle
from tests.tiny_engine import MODEL_CONFIG, VOCAB_SIZE, Answer, ask, tiny_params

NGRAM = SpeculativeConfig("ngram", 3, prompt_lookup_max=3, prompt_lookup_min=1)
DRAFT_MODEL = SpeculativeConfig("draft_model", 3, model="of the test")
EARLY_EXIT = SpeculativeConfig("early_exit", 3, num_layers=1)

Request = tuple[list[int], SamplingParams]


def nearly(params: LlamaParams) -> LlamaParams:
    """A model that often says the same."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda array: array * (1 + 0.05 * rng.standard_normal(array.shape, np.float32)), params)


def with_vocabulary(model: Model, size: int) -> Model:
    """The model with fewer tokens, or padded with ones that mean nothing, and that it would like to say."""
    params, more = model.params, max(0, size - model.config.vocab_size)
    rng = np.random.default_rng(2)
    extra = 3 * rng.standard_normal((model.config.hidden_size, more)).astype(np.float32)
    embedding = np.concatenate([np.asarray(params.embedding), extra.T])[:size]
    lm_head = np.concatenate([np.asarray(params.lm_head), extra], axis=1)[:, :size]
    return Model(
        dataclasses.replace(model.config, vocab_size=size),
        dataclasses.replace(params, embedding=embedding, lm_head=lm_head),
    )


@pytest.fixture(scope="module")
def plain() -> Iterator[EngineClient]:
    with lean_engine() as engine:
        yield engine


@pytest.fixture(
    scope="module",
    params=[NGRAM, DRAFT_MODEL, pytest.param(EARLY_EXIT, marks=pytest.mark.long)],
    ids=lambda config: config.method,
)
def engine(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    draft = None
    with pytest.MonkeyPatch.context() as patch:
        if request.param is DRAFT_MODEL:  # it does not have all of the tokens; and it pads rows, as on a GPU
            draft = with_vocabulary(Model(MODEL_CONFIG, nearly(tiny_params())), 61)
            patch.setattr(SpeculativePrograms, "fewest_rows", 8)
        with lean_engine(request.param, draft) as engine:
            yield engine


def repetitive_requests(count: int, seed: int) -> list[Request]:
    """Of every kind; half of them with prompts and answers in which much comes again."""
    rng = random.Random(seed)
    requests = mixed_requests(count, seed)
    for index in range(0, count, 2):
        sampling = dataclasses.replace(requests[index][1], max_tokens=rng.choice([8, 20, 32]), ignore_eos=True)
        requests[index] = ([rng.randrange(2, 12) for _ in range(4)] * rng.randint(1, 6), sampling)
    return requests


def constrained() -> SamplingParams:
    words = tuple(tuple(range(first, first + 5)) for first in range(2, 26))
    return SamplingParams(temperature=0.0, max_tokens=24, constraint=WordRule(words, shortest=24))


def accepted(engine: EngineClient) -> int:
    stats = engine.stats().speculative
    assert stats is not None
    return stats.num_accepted_tokens


def check_mixed_batch(
    plain: EngineClient, engine: EngineClient, requests: list[Request], *, more_kept_than: int
) -> None:
    """Requests of all kinds, one more that is aborted, too few pages: each gets what it gets without speculation."""
    requests = [*requests, ([5] * 9, constrained()), ([6, 7, 8] * 3, constrained())]
    random.Random(1).shuffle(requests)
    before, preemptions = accepted(engine), engine.stats().num_preemptions
    answers = [Answer(engine, *request) for request in requests]
    aborted = Answer(engine, [9, 8] * 8, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    aborted.next()
    engine.abort(aborted.request_id)
    together = [answer.wait()[0] for answer in answers]
    aborted.wait()
    until_idle(engine)
    assert aborted.reasons == ["abort"]
    assert accepted(engine) > before + more_kept_than
    assert engine.stats().num_preemptions > preemptions
    for request, tokens, answer in zip(requests, together, answers, strict=True):
        alone = Answer(plain, *request)
        assert tokens == alone.wait()[0]
        assert answer.reasons == alone.reasons


def test_a_mixed_batch_gives_what_each_request_gives_without_speculation(
    plain: EngineClient, engine: EngineClient
) -> None:
    check_mixed_batch(plain, engine, repetitive_requests(16, seed=1), more_kept_than=10)


def test_json_is_what_it_is_without_speculation(plain: EngineClient, engine: EngineClient) -> None:
    before = accepted(engine)
    check_json_answers(plain, engine)
    assert accepted(engine) > before + 20


def outputs(engine: EngineClient, request: Request) -> list[Any]:
    """Of the only choice: every output's tokens, log probabilities and end."""
    answer = Answer(engine, *request)
    heard = [answer.next()]
    while heard[-1].finish_reason is None:
        heard.append(answer.next())
    return heard


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, **more)


def test_log_probabilities_are_those_without_speculation(plain: EngineClient, engine: EngineClient) -> None:
    request = [3, 4, 5] * 4, greedy(max_tokens=24, logprobs=3)
    wanted = [told for output in outputs(plain, request) for told in output.logprobs]
    heard = outputs(engine, request)
    told = [told for output in heard for told in output.logprobs]
    assert any(len(output.token_ids) > 1 for output in heard)
    assert all(len(output.logprobs) == len(output.token_ids) for output in heard)
    assert [each.token_id for each in told] == [each.token_id for each in wanted]
    assert [each.logprob for each in told] == pytest.approx([each.logprob for each in wanted], abs=1e-4)
    assert [[token for token, _ in each.top] for each in told] == [[token for token, _ in each.top] for each in wanted]


def test_an_end_within_kept_drafts_cuts_what_comes_after(plain: EngineClient, engine: EngineClient) -> None:
    prompt = [3, 4, 5] * 4
    tokens = ask(plain, prompt, greedy(max_tokens=32))
    drafted = [output.token_ids for output in outputs(engine, (prompt, greedy(max_tokens=32)))]
    ends = [sum(map(len, drafted[:index])) + 2 for index, step in enumerate(drafted) if len(step) > 2]  # amid a run
    assert ends
    for length in {*range(1, 8), *ends}:
        heard = outputs(engine, (prompt, greedy(max_tokens=length)))
        assert [token for output in heard for token in output.token_ids] == tokens[:length]
        assert heard[-1].finish_reason == "length"
    stop = next(tokens[end - 1] for end in ends)
    first = tokens.index(stop)
    heard = outputs(engine, (prompt, greedy(max_tokens=32, stop_token_ids=(stop,))))
    assert [token for output in heard for token in output.token_ids] == tokens[: first + 1]
    assert (heard[-1].finish_reason, heard[-1].stop_token_id) == ("stop", stop)
    before = engine.stats().generation_tokens
    ask(engine, prompt, greedy(max_tokens=5))
    assert engine.stats().generation_tokens == before + 5


def test_nothing_is_compiled_while_drafts_are_made_and_verified(engine: EngineClient) -> None:
    until_idle(engine)
    with compilations() as events:
        for request in repetitive_requests(6, seed=3):
            ask(engine, *request)
        answers = [Answer(engine, *request) for request in repetitive_requests(9, seed=4)]
        answers.append(Answer(engine, [2, 3] * 4, constrained()))
        for answer in answers:
            answer.wait()
        until_idle(engine)
    assert not events


class InTurns(DraftLengths):
    """Many steps without drafts, then some with them."""

    def choose(self, ready: Rows[Sequence], others: int = 0, trial: Trial | None = None) -> int:
        self.step = getattr(self, "step", 0) + 1
        return super().choose(ready, others, trial) if self.step % 50 > 44 else 0


@pytest.mark.long
@pytest.mark.parametrize("config", [DRAFT_MODEL, EARLY_EXIT], ids=lambda config: config.method)
def test_a_drafter_catches_up_on_steps_without_drafts(plain: EngineClient, config: SpeculativeConfig) -> None:
    whole = dataclasses.replace(config, num_layers=None)
    draft = with_vocabulary(Model(MODEL_CONFIG, tiny_params()), 70) if config is DRAFT_MODEL else None
    with lean_engine(whole, draft, lengths=InTurns(config.method, (3,), 3, adaptive=False)) as engine:
        prompt = [3, 9, 4]
        tokens = ask(plain, prompt, greedy(max_tokens=61))
        # The same again, where a part of it is forced, and appended without a step for each token.
        sets = [(token,) if 20 <= place < 30 else tuple(range(VOCAB_SIZE)) for place, token in enumerate(tokens)]
        forced = greedy(max_tokens=61, constraint=WordRule(tuple(sets), shortest=61))
        before = 0
        for sampling in (greedy(max_tokens=61), forced):
            assert ask(engine, prompt, sampling) == tokens
            stats = engine.stats().speculative
            assert stats is not None
            assert stats.num_draft_tokens > before
            if config is DRAFT_MODEL:  # the target itself, which is right as long as it has seen everything
                assert stats.num_accepted_tokens == stats.num_draft_tokens
            before = stats.num_draft_tokens
        assert engine.stats().forced_tokens > 0
        for seed in range(8):
            prompt = random.Random(seed).choices(range(VOCAB_SIZE), k=3)
            drawn = SamplingParams(max_tokens=61, temperature=1.0, seed=seed)
            assert ask(engine, prompt, drawn) == ask(plain, prompt, drawn)
        stats = engine.stats().speculative
        assert stats is not None
        if config is DRAFT_MODEL:  # what was missed longest ago comes first: what follows looks at it
            assert stats.num_accepted_tokens == stats.num_draft_tokens


@pytest.mark.long
@pytest.mark.parametrize("config", [NGRAM, DRAFT_MODEL, EARLY_EXIT], ids=lambda config: config.method)
def test_devices_that_share_the_model_share_the_drafter(plain: EngineClient, config: SpeculativeConfig) -> None:
    nearly_the_same = Model(MODEL_CONFIG, nearly(tiny_params()))
    draft = with_vocabulary(nearly_the_same, 62) if config is DRAFT_MODEL else None
    requests = repetitive_requests(6, seed=7)
    with lean_engine(config, draft, tensor_parallel_size=2) as engine:
        answers = [Answer(engine, *request) for request in requests]
        together = [answer.wait()[0] for answer in answers]
        assert accepted(engine) > 0
    assert together == [ask(plain, *request) for request in requests]


def test_a_prompt_found_in_the_cache_goes_on_with_drafts(plain: EngineClient, engine: EngineClient) -> None:
    prompt = [7, 9, 11, 13] * 5
    tokens = ask(plain, prompt, greedy(max_tokens=30))
    for _ in range(2):  # pages that hold kept drafts are shared as well
        assert ask(engine, prompt, greedy(max_tokens=30)) == tokens
    longer = prompt + tokens[:20]
    assert ask(engine, longer, greedy(max_tokens=20)) == ask(plain, longer, greedy(max_tokens=20))
    assert engine.stats().cached_prompt_tokens > 0


class OfEachRow(DraftLengths):
    """As many as there are in every step, of which each row brings all or none; remembers which."""

    def choose(self, ready: Rows[Sequence], others: int = 0, trial: Trial | None = None) -> int:
        return 1 if ready else 0

    def of_rows(self, drafting: Rows[Sequence], length: int) -> list[int]:
        counts = super().of_rows(drafting, length)
        self.told = getattr(self, "told", {})
        if len(drafting) > 1:
            for sequence, count in zip(drafting, counts, strict=True):
                self.told.setdefault(sequence.request.request_id, []).append(count)
        return counts


def test_a_sequence_of_a_batch_whose_own_drafts_never_hold_brings_none(plain: EngineClient) -> None:
    half = VOCAB_SIZE // 2
    params = tiny_params()
    lm_head = np.array(params.lm_head)
    lm_head[:, half:] *= -1
    # It is the model itself where the text is of the first half of the tokens, and wrong where it is of the others.
    draft = Model(MODEL_CONFIG, dataclasses.replace(params, lm_head=lm_head))
    halves = [tuple((token, -100.0) for token in tokens) for tokens in (range(half, VOCAB_SIZE), range(half))]
    lengths = OfEachRow("draft_model", (1,), 3)
    config = dataclasses.replace(DRAFT_MODEL, num_speculative_tokens=1)
    with lean_engine(config, draft, lengths=lengths) as engine:
        for sampling in greedy(), SamplingParams(ignore_eos=True, temperature=0.3, seed=3):
            requests = [
                ([3, 9, 4], dataclasses.replace(sampling, max_tokens=44, logit_bias=halves[0])),
                ([3, 9, 4], dataclasses.replace(sampling, max_tokens=22, logit_bias=halves[1])),
            ]
            answers = [Answer(engine, *request) for request in requests]
            together = [answer.wait()[0] for answer in answers]
            predictable, unpredictable = (lengths.told[answer.request_id] for answer in answers)
            assert set(predictable) == {1}
            assert set(unpredictable[:8]) == {1} and unpredictable[-1] == 0, unpredictable
            assert together == [ask(plain, *request) for request in requests]
