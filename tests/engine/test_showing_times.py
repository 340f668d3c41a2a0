"""What showing a step to a drafter is said to take, from what was measured."""

from __future__ import annotations

import pytest

from jaxserve.engine.buckets import make_buckets
from jaxserve.engine.device_batch import Bucket
from jaxserve.engine.showing_times import ShowingTimes

ON_A_GPU = make_buckets(64, 2048, 16, few_programs=False, num_speculative_tokens=3)
ON_A_CPU = make_buckets(8, 256, 4, few_programs=True, num_speculative_tokens=3)


def test_each_step_takes_what_its_padded_size_takes() -> None:
    seconds = {Bucket(64, 16, size): size * 1e-6 for size in (256, 512, 1024, 2048)}
    times = ShowingTimes(ON_A_GPU, seconds)
    assert times(0, 1) == times(60, 256) == pytest.approx(256e-6)
    assert times(0, 257) == times(3, 512) == pytest.approx(512e-6)
    assert times(0, 2048) == pytest.approx(2048e-6)


def test_sizes_that_were_not_measured_take_as_much_for_each_token() -> None:
    times = ShowingTimes(ON_A_CPU, {Bucket(7, 4, 64): 78e-3})  # two tokens of each row
    assert times(0, 10) == pytest.approx(78e-3)
    assert times(7, 200) == pytest.approx(270e-3)


def test_where_nothing_was_measured_showing_counts_for_nothing() -> None:
    assert ShowingTimes(ON_A_GPU, {})(10, 100) == 0.0
