"""Two runs set against each other: what is beyond the noise, and what they were not measured alike in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.bench.compare import Difference, compare
from jaxserve.bench.records import Load
from jaxserve.bench.results import Series, read_series
from tests.bench.bench_command import bench
from tests.bench.made_up_runs import LOADS, RATES, write_run


def of(differences: list[Difference], metric: str) -> list[Difference]:
    return [difference for difference in differences if difference.metric == metric]


def test_what_lies_beyond_the_noise_is_said_to_and_what_does_not_is_not(tmp_path: Path) -> None:
    before = read_series(write_run(tmp_path / "a", "TP1", seed=1))
    same = read_series(write_run(tmp_path / "b", "TP1", seed=2))
    slower = read_series(write_run(tmp_path / "c", "TP1", tpot_ms=5.5, seed=2))
    quiet = [difference for difference in compare([before], [same]).differences if difference.metric == "TPOT"]
    assert sum(difference.is_beyond_noise for difference in quiet) <= 1
    loud = [difference for difference in compare([before], [slower]).differences if difference.metric == "TPOT"]
    assert len(loud) == len(LOADS)
    assert all(
        difference.is_beyond_noise and difference.low < difference.change < difference.high for difference in loud
    )
    assert "slower by" in str(loud[0]) and "no difference beyond the noise" in str(
        min(quiet, key=lambda d: abs(d.change))
    )


def test_rounds_that_differ_widen_the_interval(tmp_path: Path) -> None:
    """Requests of one round have much in common: as many requests of one round each are worth less."""

    def rounds(series: Series, shift: float) -> Series:
        points = []
        for point in series.points:
            shifted = [
                replace(record, round=number, last_token=record.last_token + shift * number * record.output_tokens)
                for number in range(3)
                for record in point.records
            ]
            points.append(replace(point, records=shifted))
        return replace(series, points=points)

    base = read_series(write_run(tmp_path, "TP1"))
    narrow, wide = (
        [each for each in compare([rounds(base, shift)], [rounds(base, shift)]).differences if each.metric == "TPOT"][
            -1
        ]
        for shift in (0.0, 0.002)
    )
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)


def test_runs_with_nothing_in_common_cannot_be_compared(tmp_path: Path) -> None:
    one = read_series(write_run(tmp_path / "a", "TP1", loads=LOADS[:1]))
    other = read_series(write_run(tmp_path / "b", "TP1", loads=LOADS[1:2]))
    with pytest.raises(ValueError, match="in common"):
        compare([one], [other])


def test_loads_that_only_one_side_has_are_told(tmp_path: Path) -> None:
    one = read_series(write_run(tmp_path / "a", "TP1", loads=LOADS[:3]))
    other = read_series(write_run(tmp_path / "b", "TP1", loads=(*LOADS[2:4], *RATES[:1])))
    assert compare([one], [other]).notes == ["only A has TP1 at 1, 4", "only B has TP1 at 16, 1/s"]
    assert compare([one], [one]).notes == []
    with pytest.raises(ValueError, match="in common; only A has TP1 at 1; only B has TP1 at 4"):
        compare([replace(one, points=one.points[:1])], [replace(one, points=one.points[1:2])])


@pytest.mark.parametrize("failures", [(0, 7), (7, 0), (1, 7)])
def test_who_refuses_requests_is_not_called_faster(failures: tuple[int, int], tmp_path: Path) -> None:
    for side, failed, tpot in zip("ab", failures, (5.0, 1.0), strict=True):
        write_run(tmp_path / side, "TP1", loads=LOADS[:1], failures=failed, tpot_ms=tpot)
    code, output = bench("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 0 and "not judged, since requests failed" in output
    assert "faster by" not in output and "more by" not in output
    assert output.endswith("nothing is judged: requests failed at each load that the two have in common\n")
    for side, failed in zip("AB", failures, strict=True):
        assert (f"TP1 at 1 in {side}: {failed} of 8 requests failed: status 500" in output) == bool(failed)


def test_compare_on_the_command_line(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "TP1", loads=LOADS[:2])
    write_run(tmp_path / "b", "other", loads=LOADS[:2], tpot_ms=6.0)
    code, output = bench("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 0
    assert "TP1 at 4, TPOT: " in output and "slower by" in output and "of 6 differences are beyond" in output
    assert bench("compare", str(tmp_path / "a"), str(tmp_path / "none"))[0] == 1


def test_the_figures_of_the_table_are_compared(tmp_path: Path) -> None:
    before = read_series(write_run(tmp_path / "a", "TP1", loads=(*LOADS[-1:], *RATES[-1:])))
    after = read_series(write_run(tmp_path / "b", "TP1", loads=(*LOADS[-1:], *RATES[-1:]), tpot_ms=6.0, seed=3))
    found = compare([before], [after]).differences
    held = {each.metric: each for each in found if each.load == "64"}
    assert set(held) == {"TPOT", "TPOT p90", "TTFT", "TTFT p90", "throughput"}  # made-up runs note no ITL
    # What was sent a second is not what the engine can.
    assert {each.metric for each in found if each.load == "8/s"} == {"TPOT", "TPOT p90", "TTFT", "TTFT p90"}
    rate = held["throughput"]
    [first, second] = (series.of_kind("concurrency")[0].summary for series in (before, after))
    assert (rate.before, rate.after) == (first.output_tokens_per_second, second.output_tokens_per_second)
    assert rate.is_beyond_noise and rate.low < rate.change < rate.high < 0
    assert f"{rate.before:.2f} -> {rate.after:.2f} tok/s, less by" in str(rate)
    tpots = [record.tpot * 1e3 for record in before.of_kind("concurrency")[0].records if record.tpot]
    assert held["TPOT p90"].before == pytest.approx(np.percentile(tpots, 90))
    assert held["TPOT p90"].low < held["TPOT p90"].change < held["TPOT p90"].high


def test_itl_is_compared_where_it_was_noted(tmp_path: Path) -> None:
    series = read_series(write_run(tmp_path, "TP1", loads=LOADS[3:4]))

    def paused(milliseconds: float) -> Series:
        records = [replace(record, gaps_ms=[5.0] * 40 + [milliseconds]) for record in series.points[0].records]
        return replace(series, points=[replace(series.points[0], records=records)])

    [itl] = of(compare([paused(20.0)], [paused(50.0)]).differences, "ITL p99")
    assert (itl.before, itl.after) == (pytest.approx(20.0), pytest.approx(50.0))
    assert itl.is_beyond_noise


def test_few_requests_have_no_percentiles(tmp_path: Path) -> None:
    series = read_series(write_run(tmp_path, "TP1", loads=(Load("concurrency", 1),)))  # 8 requests
    assert {each.metric for each in compare([series], [series]).differences} == {"TPOT", "TTFT", "throughput"}


def test_what_was_not_measured_alike_is_said(tmp_path: Path) -> None:
    """Else a change of the model, the card or a setting would be told as one of the engine's speed."""
    alike = {"workload": "fixed:100/500", "settings": {"max_num_seqs": 8, "num_pages": 5}, "jax": "0.10",
             "git_commit": "aaa"}  # fmt: skip
    other = {"workload": "fixed:8/8", "settings": {"max_num_seqs": 4, "num_pages": 6}, "jax": "0.11", "model": "small",
             "git_commit": "bbb",
             "device": "another", "architecture": {"num_layers": 3}}  # fmt: skip
    write_run(tmp_path / "a", "TP1", loads=LOADS[:1], architecture={"num_layers": 2}, **alike)
    write_run(tmp_path / "b", "TP1", loads=LOADS[:1], **other)
    write_run(tmp_path / "b", "TP2", loads=LOADS[:1])
    code, output = bench("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 0, output
    only, unlike = output.splitlines()[:2]
    assert only == "only B has TP2"
    assert unlike.startswith("TP1 was not measured alike")
    for field in ("model tiny -> small", "device made up -> another", "workload fixed:100/500 -> fixed:8/8",
                  "max_num_seqs 8 -> 4", "num_layers 2 -> 3", "jax 0.10 -> 0.11", "git_commit aaa -> bbb"):  # fmt: skip
        assert field in unlike
    assert "num_pages" not in unlike  # which free memory decides
    assert "not measured alike" not in bench("compare", str(tmp_path / "a"), str(tmp_path / "a"))[1]
