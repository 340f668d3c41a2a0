"""A real draft model that is not shown every step: the text stays, and when it has caught up it is right again."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows

import pytest

from jaxserve.engine.build_drafting import Model
from jaxserve.engine.client import EngineClient
from jaxserve.engine.draft_lengths import DraftLengths, Trial
from jaxserve.engine.sequence import Sequence
from jaxserve.sampling_params import SamplingParams
from tests.engine.lean_engine import lean_engine
from tests.engine.test_constraints import WordRule
from tests.engine.test_engine import until_idle
from tests.engine.test_speculative import DRAFT_MODEL, accepted, check_mixed_batch, greedy, repetitive_requests
from tests.tiny_engine import MODEL_CONFIG, VOCAB_SIZE, Answer, ask, tiny_params


class NowAndThen(DraftLengths):
    """Finds for some steps that drafts pay, then for some that they do not, prompts or not."""

    def __init__(self, num_without: int = 9, num_with: int = 6) -> None:
        super().__init__("draft_model", (3,), 3)
        self.num_without, self.num_with = num_without, num_with
        self.step = 0
        self.num_unshown = 0

    @property
    def pays(self) -> bool:
        return self.step % (self.num_without + self.num_with) >= self.num_without

    def choose(self, ready: Rows[Sequence], others: int = 0, trial: Trial | None = None) -> int:
        self.step += 1
        return 3 if ready and self.pays else 0

    def saving(self, num_rows: int) -> float | None:
        self.num_unshown += not self.pays
        return 1.0 if self.pays else -1.0


@pytest.fixture(scope="module")
def plain() -> Iterator[EngineClient]:
    with lean_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def lengths() -> NowAndThen:
    return NowAndThen()


@pytest.fixture(scope="module")
def engine(lengths: NowAndThen) -> Iterator[EngineClient]:
    """One whose draft model is the model itself: what it drafts is right as long as it has seen everything."""
    with lean_engine(DRAFT_MODEL, Model(MODEL_CONFIG, tiny_params()), lengths=lengths) as engine:
        yield engine


def check_all_right(engine: EngineClient, *, at_least: int) -> None:
    stats = engine.stats().speculative
    assert stats is not None
    assert stats.num_draft_tokens >= at_least
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_what_was_caught_up_on_is_as_good_as_what_was_shown(plain: EngineClient, engine: EngineClient) -> None:
    for seed, prompt in enumerate(([3, 9, 4], list(range(2, 40)), [7] * 25)):
        for sampling in (
            greedy(max_tokens=24),
            SamplingParams(max_tokens=24, temperature=1.0, seed=seed, ignore_eos=True),
        ):
            assert ask(engine, prompt, sampling) == ask(plain, prompt, sampling)
    check_all_right(engine, at_least=50)


def test_prompts_that_begin_alike_and_choices_of_one_share_what_is_caught_up_on(
    plain: EngineClient, engine: EngineClient
) -> None:
    shared = [11, 12, 13, 14, 15, 16, 17, 18, 19]
    requests = [([*shared, number], greedy(max_tokens=20)) for number in range(6)]
    answers = [Answer(engine, *request) for request in requests]
    choices = Answer(engine, shared, SamplingParams(n=3, max_tokens=20, temperature=1.0, seed=5, ignore_eos=True))
    for answer, request in zip(answers, requests, strict=True):
        assert answer.wait()[0] == ask(plain, *request)
    alone = Answer(plain, shared, SamplingParams(n=3, max_tokens=20, temperature=1.0, seed=5, ignore_eos=True))
    assert choices.wait() == alone.wait()
    assert engine.stats().cached_prompt_tokens > 0
    assert engine.stats().num_preemptions > 0
    check_all_right(engine, at_least=100)


def test_forced_tokens_are_caught_up_on(plain: EngineClient, engine: EngineClient) -> None:
    prompt = [3, 9, 4]
    tokens = ask(plain, prompt, greedy(max_tokens=50))
    before = engine.stats().forced_tokens
    for first in (8, 13, 20, 27):
        sets = [
            (token,) if first <= place < first + 9 else tuple(range(VOCAB_SIZE)) for place, token in enumerate(tokens)
        ]
        rule = WordRule(tuple(sets), shortest=50)
        assert ask(engine, prompt, greedy(max_tokens=50, constraint=rule)) == tokens
    assert engine.stats().forced_tokens > before
    check_all_right(engine, at_least=150)


def test_a_mixed_batch_gives_what_each_request_gives_without_speculation(
    plain: EngineClient, engine: EngineClient, lengths: NowAndThen
) -> None:
    unshown = lengths.num_unshown
    check_mixed_batch(plain, engine, repetitive_requests(16, seed=3), more_kept_than=10)
    until_idle(engine)
    assert lengths.num_unshown > unshown
    assert accepted(engine) > 0
