"""Which program serves a step, by what each takes."""

from __future__ import annotations

import pytest

from jaxserve.engine.device_batch import Bucket
from jaxserve.engine.program_choice import added_by_prompts, fastest_programs, is_settled

SMALL, MIDDLE, LARGE = Bucket(64, 16, 64), Bucket(64, 16, 96), Bucket(64, 16, 128)


def test_a_larger_program_serves_a_smaller_ones_steps_where_it_is_faster() -> None:
    chosen = fastest_programs({SMALL: 7.5, MIDDLE: 6.7, LARGE: 7.3})
    assert chosen == {SMALL: MIDDLE, MIDDLE: MIDDLE, LARGE: LARGE}


def test_a_gain_within_the_noise_changes_nothing() -> None:
    assert fastest_programs({SMALL: 7.4, LARGE: 7.3}) == {SMALL: SMALL, LARGE: LARGE}


def test_only_a_program_that_holds_every_step_of_the_other_one_takes_its_place() -> None:
    times = {
        Bucket(64, 16, 64): 9.0,
        Bucket(16, 16, 512): 1.0,  # too few decode rows
        Bucket(64, 0, 0): 1.0,  # no prompts
        Bucket(64, 16, 128, 3): 1.0,  # another kind of step
    }
    assert fastest_programs(times) == {bucket: bucket for bucket in times}


def test_a_step_in_which_nobody_decodes_may_run_in_a_program_with_decode_rows() -> None:
    assert fastest_programs({Bucket(0, 16, 64): 5.0, Bucket(16, 16, 64): 4.0})[Bucket(0, 16, 64)] == Bucket(16, 16, 64)


def test_steps_that_only_decode_keep_their_program_whatever_was_measured() -> None:
    assert fastest_programs({Bucket(1, 0, 0): 5.8, Bucket(16, 0, 0): 5.4})[Bucket(1, 0, 0)] == Bucket(1, 0, 0)


def test_a_time_is_known_when_its_two_quickest_rounds_agree() -> None:
    assert is_settled([9.0, 5.0, 5.1])
    assert not is_settled([9.0, 5.0, 5.3])
    assert not is_settled([5.0])
    assert not is_settled([])


def test_what_prompts_add_is_told_for_each_number_of_decode_rows() -> None:
    seconds = {
        Bucket(8, 0, 0): 4.0, Bucket(16, 0, 0): 4.5, Bucket(64, 0, 0): 5.5,
        Bucket(16, 16, 64): 5.0, Bucket(16, 16, 128): 4.5, Bucket(64, 16, 64): 7.5, Bucket(64, 16, 128): 7.0,
        Bucket(0, 16, 64): 4.1,
    }  # fmt: skip
    added = added_by_prompts(seconds)
    # The larger program serves 64 tokens, and beside 16 rows nothing is seen of what it adds.
    assert added == {16: {64: pytest.approx(0.09), 128: pytest.approx(0.09)}, 64: {64: 1.5, 128: 1.5}}
