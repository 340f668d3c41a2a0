"""Which configuration is said to be the best under a goal."""

from __future__ import annotations

from pathlib import Path

from jaxserve.bench.verdict import verdict
from tests.bench.made_up_runs import series_of


def test_the_verdict_names_the_best_under_the_goal_and_the_next(tmp_path: Path) -> None:
    one = series_of(tmp_path, "TP1", tpot_ms=5.0, growth_ms=0.1)  # 8 ms at 30
    two = series_of(tmp_path, "TP2", tpot_ms=3.0, growth_ms=0.1, num_devices=2)  # 6 ms at 30, 9.4 ms at 64
    text = verdict([one, two], 8.5)
    assert (
        "the best configuration is TP1 with 30 requests in flight: 3,750 output tokens a second for each device" in text
    )
    assert "TPOT 8.00 ms" in text
    assert "50% more than the next, TP2 with 30 requests in flight: 2,500." in text


def test_a_verdict_on_several_devices_tells_what_they_give_together(tmp_path: Path) -> None:
    text = verdict([series_of(tmp_path, "TP2", tpot_ms=3.0, growth_ms=0.1, num_devices=2)], 6.5)
    assert "2,500 output tokens a second for each device (5,000 on 2 devices)" in text


def test_a_goal_that_nobody_meets_is_told_with_the_fastest(tmp_path: Path) -> None:
    text = verdict([series_of(tmp_path, "TP1", tpot_ms=5.0)], 2.0)
    assert text == (
        "No configuration meets a goal of 2 ms per token (500 tokens a second for each user): "
        "the fastest is TP1 with 1 request in flight, with 5.06 ms."
    )


def test_static_batching_is_no_configuration_to_choose_and_is_named_with_what_it_gives(tmp_path: Path) -> None:
    """Else whoever asked for it reads a best configuration that the table beside it contradicts."""
    plain = series_of(tmp_path, "TP1", tpot_ms=5.0)
    static = series_of(tmp_path, "TP1 static", tpot_ms=1.0, settings={"static_batching": True})
    text = verdict([static, plain], 20.0)
    assert "best configuration is TP1 with" in text and "the next" not in text
    assert (
        "Not judged, since static batching has whoever comes wait for a whole batch: TP1 static (under the goal" in text
    )
    assert "13,223 output tokens a second for each device, with 64 requests in flight" in text
    alone = verdict([static], 0.5)
    assert alone.startswith("There is no load to judge. Not judged") and alone.endswith(": TP1 static.")


def test_a_server_that_refuses_most_requests_does_not_win(tmp_path: Path) -> None:
    """Those that it answers have it to themselves."""
    good = series_of(tmp_path, "TP1", tpot_ms=5.0)
    refusing = series_of(tmp_path, "peer", tpot_ms=1.0, failures=7)  # at each load
    text = verdict([good, refusing], 20.0)
    assert "the best configuration is TP1 with" in text and "the next, peer" not in text
    assert "Left out, since requests failed: peer at 1 (7 of 8), 4 (7 of 12)" in text and text.endswith(": status 500.")
    assert verdict([refusing], 20.0).startswith("There is no load to judge. Left out, since requests failed: peer at")
    assert "Left out" not in verdict([good], 20.0)


def test_the_others_are_named_where_only_one_meets_the_goal(tmp_path: Path) -> None:
    both = [series_of(tmp_path, "TP1", tpot_ms=9.0), series_of(tmp_path, "TP2", tpot_ms=3.0)]
    assert verdict(both, 5.0).endswith("None of the others meets it: TP1.")
