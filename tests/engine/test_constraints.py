"""Constrained rows over a fake device: masks come when the tokens before are known, and rows beside them stay the same."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.constraint import ConstraintError
from jaxserve.engine.client import EngineClient
from jaxserve.engine.draft_lengths import DraftLengths
from jaxserve.engine.forced_tokens import choose_jumps
from jaxserve.engine.request import RequestOutput
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.token_masks import allow, num_words
from jaxserve.sampling_params import SamplingParams
from tests.engine.client_harness import EOS, MODEL_CONFIG, PROMPT, TIMEOUT
from tests.engine.drafting_device import DraftingRunner
from tests.engine.fake_device import FakeRunner, solo_tokens
from tests.engine.scheduler_harness import make_limits


class Words:
    """The output is a run of words, each from a set of its own; it may end after `shortest` of them."""

    def __init__(self, rule: WordRule) -> None:
        self._rule = rule
        self._position = 0
        self.batch = None

    @property
    def is_complete(self) -> bool:
        return self._position >= self._rule.shortest

    @property
    def is_final(self) -> bool:
        return self._position >= len(self._rule.sets)

    def accept(self, token_id: int) -> None:
        if self._position == self._rule.fails_at or token_id not in self._rule.sets[self._position]:
            raise ConstraintError(f"token {token_id} at {self._position}")
        self._position += 1

    def write_mask(self, mask: np.ndarray) -> None:
        allow(mask, self._rule.sets[self._position])

    def forced_run(self, most: int) -> tuple[int, ...]:
        run: list[int] = []
        for place in range(self._position, min(len(self._rule.sets), self._position + most)):
            if len(self._rule.sets[place]) != 1 or place >= self._rule.shortest or not self._rule.jumps:
                break
            run += self._rule.sets[place]
        return tuple(run)

    def look_ahead(self, drafts: Sequence[int], masks: np.ndarray) -> list[bool]:
        ahead, can_end = Words(self._rule), []
        ahead._position = self._position
        for draft, mask in zip(drafts, masks, strict=True):
            try:
                ahead.accept(draft)
            except ConstraintError:
                break
            if ahead.is_final:
                break
            ahead.write_mask(mask)
            can_end.append(ahead.is_complete)
        return can_end


@dataclass(frozen=True)
class WordRule:
    sets: tuple[tuple[int, ...], ...]
    shortest: int
    fails_at: int = -1
    jumps: bool = True

    def start(self) -> Words:
        return Words(self)


@contextmanager
def running_engine(accuracy: float | None = None, **limits: int) -> Iterator[tuple[EngineClient, FakeRunner]]:
    """Over a device that drafts with this accuracy; None: that does not."""
    if accuracy is None:
        scheduler = Scheduler(make_limits(**limits))
        runner = FakeRunner(scheduler.limits)
    else:
        lengths = DraftLengths("fake", (3,), 4, adaptive=False)
        scheduler = Scheduler(make_limits(**limits), drafting=lengths)
        runner = DraftingRunner(scheduler.limits, accuracy, seed=1)
    client = EngineClient(
        config=EngineConfig(), model_config=MODEL_CONFIG, scheduler=scheduler, runner=runner, device_kind="fake"
    )
    client.start()
    try:
        yield client, runner
    finally:
        client.shutdown()


class Heard:
    def __init__(self, engine: EngineClient, sampling: SamplingParams, prompt: Sequence[int] = PROMPT) -> None:
        self._outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        engine.submit_with_callback(prompt, sampling, self._outputs.put)

    def wait(self) -> tuple[list[int], RequestOutput]:
        tokens: list[int] = []
        while True:
            output = self._outputs.get(timeout=TIMEOUT)
            tokens += output.token_ids
            if output.finish_reason is not None:
                return tokens, output


def test_every_token_follows_the_rule() -> None:
    rule = WordRule(tuple((i, i + 1, i + 10) for i in range(12)), shortest=12)
    with running_engine() as (engine, _):
        tokens, last = Heard(engine, SamplingParams(max_tokens=40, seed=1, constraint=rule)).wait()
    assert last.finish_reason == "stop" and last.stop_token_id is None  # it is final: no end is drawn
    assert all(token in allowed for token, allowed in zip(tokens, rule.sets, strict=True))


def test_rows_beside_a_constrained_one_say_what_they_say_alone() -> None:
    rule = WordRule(((3,), (4,), (5,), (6,)), shortest=4)
    with running_engine() as (engine, _):
        heard = [
            Heard(
                engine, SamplingParams(max_tokens=20, seed=seed, ignore_eos=True, constraint=rule if seed % 2 else None)
            )
            for seed in range(4)
        ]
        answers = [one.wait()[0] for one in heard]
    assert answers[1] == answers[3] == [3, 4, 5, 6]
    assert answers[0] == solo_tokens(PROMPT, 0, 20) and answers[2] == solo_tokens(PROMPT, 2, 20)


def test_a_stop_token_ends_only_what_is_complete() -> None:
    anything = tuple(range(31))  # without the end-of-text token
    rule = WordRule((anything,) * 20, shortest=6)
    stops = tuple(range(16))
    with running_engine() as (engine, _):
        tokens, last = Heard(
            engine, SamplingParams(max_tokens=20, seed=3, stop_token_ids=stops, constraint=rule)
        ).wait()
    assert len(tokens) > 6 and any(token in stops for token in tokens[:6])
    assert last.finish_reason == "stop" and last.stop_token_id == tokens[-1]
    assert all(token not in (*stops, EOS) for token in tokens[6:-1])


def test_a_preempted_output_goes_on_where_it_was() -> None:
    rule = WordRule(tuple((i, i + 5) for i in range(20)), shortest=20)
    with running_engine(pages=14, max_len=48) as (engine, _):
        heard = [Heard(engine, SamplingParams(max_tokens=30, seed=seed, constraint=rule)) for seed in range(4)]
        crowded = [one.wait()[0] for one in heard]
        num_preemptions = engine.stats().num_preemptions
    with running_engine() as (engine, _):
        alone = [
            Heard(engine, SamplingParams(max_tokens=30, seed=seed, constraint=rule)).wait()[0] for seed in range(4)
        ]
    assert num_preemptions > 0
    assert crowded == alone


CHOICE = (2, 7, 11, 30)
RUNS = WordRule(
    (
        (1,),
        (2,),
        (3,),
        CHOICE,
        (4,),
        (5,),
        CHOICE,
        *((place % 32,) for place in range(9)),
        CHOICE,
        (1,),
        (2,),
        (3,),
        (4,),
    ),
    shortest=21,
)


def answers_of(
    rules: Sequence[WordRule], max_tokens: int, accuracy: float | None = None, **limits: int
) -> list[tuple[list[int], RequestOutput]]:
    """What choices of several seeds say side by side, and an unconstrained one among them."""
    with running_engine(accuracy, **limits) as (engine, runner):
        heard = [
            Heard(engine, SamplingParams(max_tokens=max_tokens, seed=seed, constraint=rule))
            for seed, rule in enumerate(rules)
        ]
        heard.append(Heard(engine, SamplingParams(max_tokens=max_tokens, seed=99, ignore_eos=True)))
        answers = [one.wait() for one in heard]
    assert accuracy is None or any(batch.num_drafts for batch in runner.launched)
    return answers


@pytest.mark.parametrize("max_tokens", [5, 13, 21, 30])
@pytest.mark.parametrize(
    "limits", [{}, {"pages": 16, "max_len": 48}, {"prefill_rows": 1}, {"prefill_rows": 2, "tokens": 4}]
)
def test_forced_tokens_change_nothing(max_tokens: int, limits: dict[str, int]) -> None:
    tail = dataclasses.replace(RUNS, shortest=19)  # may end before its last run has: no jump over that
    rules = [RUNS, tail, RUNS, RUNS, tail]
    jumping = answers_of(rules, max_tokens, **limits)
    walking = answers_of([dataclasses.replace(rule, jumps=False) for rule in rules], max_tokens, **limits)
    assert [tokens for tokens, _ in jumping] == [tokens for tokens, _ in walking]
    for (_, last), (_, expected) in zip(jumping, walking, strict=True):
        assert (last.finish_reason, last.stop_token_id) == (expected.finish_reason, expected.stop_token_id)
    assert jumping[-1][0] == solo_tokens(PROMPT, 99, max_tokens)


ANY = tuple(range(32))
ALMOST_ANY = tuple(token for token in range(32) if token % 8)
HALF = tuple(range(0, 32, 2))


@pytest.mark.parametrize("accuracy", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("limits", [{"tokens": 32}, {"pages": 18, "max_len": 48}, {"prefill_rows": 1}])
def test_drafts_change_nothing(accuracy: float, jumps: bool, limits: dict[str, int]) -> None:
    wide = WordRule((*(ALMOST_ANY, HALF, ALMOST_ANY) * 8,), shortest=9)
    ends = WordRule((ALMOST_ANY,) * 7, shortest=7)  # amid kept drafts nothing may follow
    stops = WordRule(
        (tuple(token for token in range(32) if token != EOS),) * 26, shortest=3
    )  # amid kept drafts it may end
    own = solo_tokens(PROMPT, 3, 26)
    forced = [(token,) for token in own[4:9]]  # which drafts foresee
    foreseen = WordRule((*[ANY] * 4, *forced, *[ANY] * 6, *forced, *RUNS.sets[:5]), shortest=25, jumps=jumps)
    rules = [wide, ends, stops, foreseen, dataclasses.replace(RUNS, jumps=jumps), stops, stops, stops]
    drafting = answers_of(rules, 26, accuracy, **limits)
    walking = answers_of([dataclasses.replace(rule, jumps=False) for rule in rules], 26, **limits)
    assert [tokens for tokens, _ in drafting] == [tokens for tokens, _ in walking]
    for (_, last), (_, expected) in zip(drafting, walking, strict=True):
        assert (last.finish_reason, last.stop_token_id) == (expected.finish_reason, expected.stop_token_id)
    assert drafting[-1][0] == solo_tokens(PROMPT, 99, 26)


def test_right_drafts_under_a_constraint_save_steps() -> None:
    def steps_of(accuracy: float | None) -> int:
        with running_engine(accuracy) as (engine, _):
            rule = WordRule((ANY,) * 40, shortest=40)
            tokens, last = Heard(engine, SamplingParams(max_tokens=40, seed=1, constraint=rule)).wait()
            assert len(tokens) == 40 and last.finish_reason == "stop"
            assert engine.stats().generation_tokens == 40
            return engine.stats().num_steps

    assert steps_of(1.0) <= steps_of(None) / 3


def test_the_host_waits_for_drafts_only_where_a_row_has_a_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine(0.9) as (engine, runner):
        waited: list[object] = []
        fetch = runner.fetch_drafts
        monkeypatch.setattr(runner, "fetch_drafts", lambda logits: waited.append(logits) or fetch(logits))
        unbound = [SamplingParams(max_tokens=20, seed=seed, ignore_eos=True) for seed in range(3)]
        for heard in [Heard(engine, sampling) for sampling in unbound]:
            heard.wait()
        assert any(batch.num_drafts for batch in runner.launched) and not waited
        Heard(engine, SamplingParams(max_tokens=20, seed=1, constraint=WordRule((ANY,) * 20, shortest=20))).wait()
        assert waited


def test_forced_tokens_save_steps() -> None:
    def steps_of(rule: WordRule) -> int:
        with running_engine() as (engine, _):
            tokens, last = Heard(engine, SamplingParams(max_tokens=40, seed=1, constraint=rule)).wait()
            assert len(tokens) == 21 and last.finish_reason == "stop"
            assert engine.stats().generation_tokens == 21
            assert engine.stats().forced_tokens == (3 + 9 + 4 if rule.jumps else 0)
            return engine.stats().num_steps

    assert steps_of(RUNS) <= steps_of(dataclasses.replace(RUNS, jumps=False)) - (2 + 8 + 3)


def test_a_short_run_holds_nobody_up() -> None:
    """A chunk makes a step longer for everybody; beside prompts, which have chunks anyway, it costs nothing."""
    short, long = (SimpleNamespace(forced_tokens=tuple(range(length))) for length in (3, 20))

    def chosen(forced: list[SimpleNamespace], num_running: int, max_chunks: int = 4, has_prompts: bool = False) -> list:
        return choose_jumps(forced, num_running, max_chunks, has_prompts)  # type: ignore[arg-type]

    assert chosen([short], 1) == [short]
    assert chosen([short], 64) == []
    assert chosen([short], 64, has_prompts=True) == [short]
    assert chosen([short, long], 64) == [long, short]
    assert chosen([short, long], 64, max_chunks=2, has_prompts=True) == [long]  # prompts keep half of the chunks
    assert chosen([short] * 9, 64) == []  # four of them would save eight steps
    assert chosen([short], 1, max_chunks=1, has_prompts=True) == []


def test_log_probabilities_are_told_of_forced_tokens_too() -> None:
    with running_engine() as (engine, runner):
        Heard(engine, SamplingParams(max_tokens=40, seed=1, constraint=RUNS, logprobs=0)).wait()
    assert sum(len(batch.prefill) for batch in runner.launched) == 1  # the prompt alone


@pytest.mark.parametrize(
    "rule", [WordRule(((3,), (4,), (5,)), shortest=3, fails_at=1), WordRule(((3,), ()), shortest=2)]
)
def test_a_constraint_that_fails_ends_its_own_choice_alone(rule: WordRule) -> None:
    with running_engine() as (engine, _):
        failing = Heard(engine, SamplingParams(max_tokens=9, seed=1, constraint=rule))
        beside = Heard(engine, SamplingParams(max_tokens=9, seed=2, ignore_eos=True))
        _, last = failing.wait()
        assert last.finish_reason == "error" and last.error and last.is_constraint_failure
        assert beside.wait()[0] == solo_tokens(PROMPT, 2, 9)
        assert engine.stats().num_running == 0


def test_masks_hold_one_bit_for_each_token() -> None:
    mask = np.zeros(num_words(70), np.int32)
    allow(mask, (0, 31, 32, 69))
    assert mask.view(np.uint32).tolist() == [0x80000001, 1, 0x20]
