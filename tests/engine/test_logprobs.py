"""Log probabilities, penalties and biases through the whole engine: beside others, in chunks, across preemptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Tokens

import numpy as np
import pytest

from jaxserve.engine.client import EngineClient
from jaxserve.engine.request import RequestError, TokenLogprobs
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence
from jaxserve.sampling_params import SamplingParams
from tests.tiny_engine import VOCAB_SIZE, Answer, ask

RNG = np.random.default_rng(0)
PROMPT = RNG.integers(2, VOCAB_SIZE, 37).tolist()  # three chunks


@pytest.fixture
def engine(small_engine: EngineClient) -> EngineClient:
    return small_engine


def greedy(max_tokens: int = 10, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **changes)  # pyright: ignore[reportArgumentType]


class Scored(Answer):
    """An answer with one choice and its log probabilities."""

    def __init__(self, engine: EngineClient, prompt: Tokens[int], sampling: SamplingParams) -> None:
        super().__init__(engine, prompt, sampling)
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []

    def finish(self) -> Scored:
        while not self.reasons[0]:
            output = self.next()
            self.logprobs += output.logprobs or ()
            self.prompt_logprobs += output.prompt_logprobs or ()
        return self


def test_logprobs_change_no_token_and_there_is_one_for_each(engine: EngineClient) -> None:
    plain = ask(engine, PROMPT, greedy())
    scored = Scored(engine, PROMPT, greedy(logprobs=5)).finish()
    assert scored.choices[0] == plain == [entry.token_id for entry in scored.logprobs]
    for entry in scored.logprobs:
        assert entry.top[0] == (entry.token_id, entry.logprob)  # greedy takes the most likely one
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert len(entry.top) == 5


def test_a_prompt_scores_what_the_engine_drew(engine: EngineClient) -> None:
    """The same tokens have the same log probabilities as output and as prompt, whatever chunks the prompt came in."""
    drawn = Scored(engine, PROMPT, greedy(logprobs=3)).finish()
    tokens = PROMPT + drawn.choices[0]
    scored = Scored(engine, tokens, greedy(max_tokens=1, prompt_logprobs=3)).finish()
    assert scored.prompt_logprobs[0] is None
    assert [entry.token_id for entry in scored.prompt_logprobs if entry] == tokens[1:]
    as_prompt = [entry for entry in scored.prompt_logprobs[len(PROMPT) :] if entry]
    np.testing.assert_allclose(
        [entry.logprob for entry in as_prompt], [entry.logprob for entry in drawn.logprobs], atol=1e-5
    )
    assert [[token for token, _ in entry.top] for entry in as_prompt] == [
        [token for token, _ in entry.top] for entry in drawn.logprobs
    ]


@pytest.mark.parametrize("changes", [{"temperature": 2.0, "seed": 1}, {"top_p": 0.1, "temperature": 1.0, "seed": 1}])
def test_logprobs_are_of_the_raw_logits(engine: EngineClient, changes: dict[str, float]) -> None:
    first = Scored(engine, PROMPT, greedy(max_tokens=1, logprobs=20)).finish().logprobs[0]
    settings = {"max_tokens": 1, "logprobs": 20, "presence_penalty": 1.0, "logit_bias": ((3, 50.0),)} | changes
    other = Scored(engine, PROMPT, SamplingParams(**settings)).finish().logprobs[0]  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose([value for _, value in other.top], [value for _, value in first.top], atol=1e-6)
    assert sum(np.exp(value) for _, value in other.top) <= 1.0 + 1e-6


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0.0}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_p": 0.1}, {"presence_penalty": 2.0}],
    ids=str,
)
def test_a_token_outside_the_list_has_its_own_value(engine: EngineClient, changes: dict[str, float]) -> None:
    likely = Scored(engine, PROMPT, greedy(max_tokens=1, logprobs=20)).finish().logprobs[0].top
    token = next(token for token in range(2, VOCAB_SIZE) if token not in dict(likely))
    settings = {"max_tokens": 1, "seed": 1, "logprobs": 2, "logit_bias": ((token, 100.0),)} | changes
    entry = Scored(engine, PROMPT, SamplingParams(**settings)).finish().logprobs[0]  # pyright: ignore[reportArgumentType]
    assert entry.token_id == token
    np.testing.assert_allclose([value for _, value in entry.top], [value for _, value in likely[:2]], atol=1e-5)
    np.testing.assert_allclose(entry.logprob, scored_logprob(engine, PROMPT, token), atol=1e-5)


def scored_logprob(engine: EngineClient, prompt: list[int], token: int) -> float:
    """Log probability of a token after a prompt, told of it as a part of a longer prompt."""
    scored = Scored(engine, [*prompt, token], greedy(max_tokens=1, prompt_logprobs=0)).finish()
    last = scored.prompt_logprobs[-1]
    assert last is not None
    return last.logprob


@pytest.mark.parametrize("token", [0, 7])
@pytest.mark.parametrize("with_mates", [False, True])
def test_penalties_count_neither_prompt_nor_padding(engine: EngineClient, token: int, with_mates: bool) -> None:
    """The token is likelier than any other by less than a penalty takes; padding is token 0."""
    clean = [other for other in PROMPT if other != token][:17]
    cases: list[tuple[list[int], dict[str, float]]] = [
        ([*clean, *[token] * 40], {"frequency_penalty": 2.0}),
        ([*clean, *[token] * 40], {"presence_penalty": 2.0}),
        (clean, {"frequency_penalty": 2.0, "presence_penalty": 2.0}),
        (clean, {"repetition_penalty": 50.0}),
    ]
    for prompt, penalties in cases:
        best = Scored(engine, prompt, greedy(max_tokens=1, logprobs=1)).finish().logprobs[0].logprob
        bias = best - scored_logprob(engine, prompt, token) + 1.0
        mates = [Answer(engine, [9] * count, greedy(max_tokens=6)) for count in (3, 5)] if with_mates else []
        drawn = ask(engine, prompt, greedy(max_tokens=2, logit_bias=((token, bias),), **penalties))
        for mate in mates:
            mate.wait()
        assert drawn[0] == token, (len(prompt), penalties)


def test_a_bias_draws_a_token_and_bans_another(engine: EngineClient) -> None:
    assert ask(engine, PROMPT, greedy(max_tokens=4, logit_bias=((7, 100.0),))) == [7] * 4
    first = ask(engine, PROMPT, greedy(max_tokens=1))[0]
    assert first not in ask(engine, PROMPT, greedy(logit_bias=((first, -100.0),)))


def test_frequency_penalty_counts_the_output_alone(engine: EngineClient) -> None:
    """A token is drawn by its bias until it was drawn often enough; that the prompt is full of it does not count."""
    prompt = [7] * 20
    tokens = ask(engine, prompt, greedy(max_tokens=6, logit_bias=((7, 20.0),), frequency_penalty=2.0))
    without = ask(engine, prompt, greedy(max_tokens=6, logit_bias=((7, 20.0),)))
    assert without == [7] * 6
    assert tokens[:3] == [7] * 3


def test_min_tokens_holds_back_stop_tokens(engine: EngineClient) -> None:
    plain = ask(engine, PROMPT, greedy())
    stops = (plain[0],)
    assert ask(engine, PROMPT, greedy(stop_token_ids=stops)) == plain[:1]
    held = ask(engine, PROMPT, greedy(stop_token_ids=stops, min_tokens=5))
    assert len(held) >= 5
    assert plain[0] not in held[:5]


def test_a_slot_keeps_nothing_of_whoever_had_it_before(engine: EngineClient) -> None:
    plain = ask(engine, PROMPT, greedy())
    for _ in range(4):  # every slot
        ask(engine, PROMPT, greedy(logit_bias=((7, 100.0),), frequency_penalty=2.0))
        assert ask(engine, PROMPT, greedy()) == plain
        assert Scored(engine, PROMPT, greedy(logprobs=1)).finish().choices[0] == plain


def test_preempted_requests_give_what_they_give_alone(engine: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: Counter[str] = Counter()
    preempt = Scheduler._preempt

    def count(scheduler: Scheduler, sequence: Sequence) -> None:
        preempted[sequence.request.request_id] += 1
        preempt(scheduler, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", count)
    settings = [
        {"temperature": 0.9, "seed": 3, "frequency_penalty": 1.0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3, "logprobs": 0},
        {"temperature": 0.0, "presence_penalty": 0.5, "min_tokens": 9, "prompt_logprobs": 0},
        {"temperature": 0.7, "seed": 5, "frequency_penalty": 1.0, "logprobs": 2},
    ]
    sampling = [SamplingParams(max_tokens=50, ignore_eos=True, **chosen) for chosen in settings]  # pyright: ignore[reportArgumentType]
    prompt = PROMPT[:13]  # short, so that all begin together, and do not all stay
    alone = [Scored(engine, prompt, each).finish() for each in sampling]
    before = engine.stats().num_preemptions
    together = [Scored(engine, prompt, each) for each in sampling]
    for one, other in zip(alone, [each.finish() for each in together], strict=True):
        assert other.choices == one.choices
        assert len(other.logprobs) == len(one.logprobs)
        assert len(other.prompt_logprobs) == len(one.prompt_logprobs)
        np.testing.assert_allclose(
            [entry.logprob for entry in other.logprobs], [entry.logprob for entry in one.logprobs], atol=1e-4
        )
    assert engine.stats().num_preemptions > before  # else this tests nothing
    assert max(preempted.values()) > 1  # one of them again, with what it had said since
    assert engine.stats().num_free_pages == engine.stats().num_pages


@pytest.mark.parametrize("changes", [{"logit_bias": ((VOCAB_SIZE, 1.0),)}, {"stop_token_ids": (VOCAB_SIZE,)}])
def test_token_ids_outside_the_vocabulary_are_refused(engine: EngineClient, changes: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=f"token id {VOCAB_SIZE} is outside") as refused:
        ask(engine, PROMPT, greedy(**changes))
    assert refused.value.parameter == next(iter(changes))
