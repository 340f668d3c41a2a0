"""Prompts are shown to a drafter where drafts save more than that takes: the rules."""

from __future__ import annotations

import math

import pytest

from jaxserve.engine.draft_lengths import DraftLengths
from jaxserve.engine.draft_showing import DraftShowing, PromptPieces


class Saving(DraftLengths):
    """Knows what drafts save with each token."""

    def __init__(self, seconds: float | None, *, adaptive: bool = True) -> None:
        super().__init__("saving", (3,), 64, adaptive=adaptive)
        self.seconds = seconds

    def saving(self, num_rows: int) -> float | None:
        return self.seconds


def showing(seconds: float | None, *, takes: float = 3.0, adaptive: bool = True) -> tuple[DraftShowing, Saving]:
    lengths = Saving(seconds, adaptive=adaptive)
    return DraftShowing(lengths, lambda rows, tokens: takes), lengths


def test_a_few_prompts_are_shown_before_it_is_known_what_drafts_save() -> None:
    policy, lengths = showing(None)
    shown = [policy.shows_prompts(3, 1, PromptPieces(100)) for _ in range(100)]
    assert 4 < sum(shown) < 40
    assert shown == sorted(shown, reverse=True)
    assert policy.shows_prompts(60, 1, PromptPieces(100))  # of another number of sequences nothing is known
    lengths.seconds = 1.0
    assert not policy.shows_prompts(3, 1, PromptPieces(100))


def test_prompts_are_shown_where_the_tokens_between_them_save_more() -> None:
    for steps_between, is_worth_it in ((2, False), (5, True)):
        policy, _ = showing(1.0, takes=3.0)
        for _ in range(400):
            shown = policy.shows_prompts(3, 1, PromptPieces(100))
            for _ in range(steps_between):
                policy.count_decoding(4, 1.0)
        assert shown == is_worth_it
    policy, _ = showing(1.0, takes=3.0)
    for _ in range(400):
        shown = policy.shows_prompts(3, 1, PromptPieces(100))
        policy.count_decoding(4, 5.0)  # the same in a step with drafts
    assert shown


def test_drafts_that_save_nothing_are_worth_no_showing_however_little_it_takes() -> None:
    for seconds in (0.0, -1.0, -math.inf):
        policy, _ = showing(seconds, takes=0.0)
        policy.count_decoding(4, 100.0)
        assert not policy.shows_prompts(3, 1, PromptPieces(100))


def test_it_takes_more_to_begin_again_than_to_go_on() -> None:
    policy, lengths = showing(1.0, takes=1.0)
    for _ in range(100):
        policy.count_decoding(4, 1.1)
        policy.shows_prompts(3, 1, PromptPieces(100))
    assert policy.pays(4)
    lengths.seconds = 0.5
    assert not policy.pays(4)
    lengths.seconds = 1.0
    assert not policy.pays(4)
    lengths.seconds = 1.3
    assert policy.pays(4)


def test_what_is_caught_up_on_counts_as_shown() -> None:
    policy, _ = showing(1.0, takes=1.0)
    policy.shows_prompts(3, 1, PromptPieces(100))
    policy.count_decoding(4, 10.0)
    assert policy.pays(4)
    policy.spend(4, 8.0)
    assert policy.pays(4)
    policy.spend(4, 8.0)
    assert not policy.pays(4)


def test_catching_up_may_take_what_waiting_has_cost() -> None:
    policy, lengths = showing(1.0)
    policy.count_decoding(8, 100.0)
    for _ in range(4):
        policy.wait(8, 2, most=10.0)  # two of eight bring no drafts
    assert policy.may_spend == pytest.approx(1.0)
    policy.spend(8, 0.75)
    assert policy.may_spend == pytest.approx(0.25)
    for _ in range(100):
        policy.wait(8, 8, most=10.0)
    assert policy.may_spend == 10.0  # no more than it takes
    policy.wait(8, 0, most=0.0)
    assert policy.may_spend == 0.0  # nobody waits
    policy.wait(8, 8, most=10.0)
    lengths.seconds = -1.0
    policy.wait(8, 8, most=10.0)
    assert policy.may_spend == 0.0  # for nothing


def test_without_adapting_everything_is_shown_and_caught_up_on_at_once() -> None:
    policy, _ = showing(-1.0, adaptive=False)
    assert all(policy.shows_prompts(60, 1, PromptPieces(1000)) for _ in range(100))
    assert policy.may_spend == math.inf
