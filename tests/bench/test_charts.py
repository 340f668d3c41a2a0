"""What charts show: which loads, where requests failed, and a floor where there is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.bench.records import Load, Snapshot
from jaxserve.bench.results import Series, find_series, read_series
from tests.bench.made_up_runs import LOADS, RATES, series_of, write_run

pytest.importorskip("matplotlib")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxserve.bench.chart_labels import LabelledCurve, label_curves
from jaxserve.bench.charts import Chart, latency, no_timeline, timeline, tradeoff, utilization
from jaxserve.bench.charts_choices import batching, parallelism, speculation


def test_batch_sizes_over_time_are_those_of_one_load(tmp_path: Path) -> None:
    for name, settings in (("TP1", {}), ("TP1 static", {"static_batching": True})):
        write_run(tmp_path, name, settings=settings)
    plain, static = find_series(tmp_path)
    short = [replace(each, timeline=each.timeline[:2]) if each is static.points[-1] else each for each in static.points]
    figure = batching([plain, replace(static, points=short)])
    assert figure is not None
    sizes = figure.axes[2]
    assert sizes.get_xlabel() == "seconds since the start, with 30 requests in flight"
    assert [max(line.get_ydata()) for line in sizes.lines] == [30, 30]


def test_a_trace_has_its_own_unit(tmp_path: Path) -> None:
    for name, settings in (("TP1", {}), ("TP1 static", {"static_batching": True})):
        write_run(tmp_path, name, settings=settings, loads=(Load("trace", 1), Load("trace", 2)))
    series = find_series(tmp_path)
    over_time, curve = batching(series), tradeoff(series)
    assert over_time is not None and over_time.axes[0].get_xlabel() == "times the trace's own speed"
    assert curve is not None and "labels: the load" in curve.axes[0].get_title()


@pytest.mark.parametrize(
    ("share", "title"), [(0.8, "; dashed: the floor)"), (0.001, "; the floor is out of view)"), (None, "in flight)")]
)
def test_the_title_tells_of_a_floor_that_can_be_seen(share: float | None, title: str, tmp_path: Path) -> None:
    figure = tradeoff([read_series(write_run(tmp_path, "TP1", floor_share=share))])
    assert figure is not None and figure.axes[0].get_title().endswith(title)


def test_labels_cover_no_point_and_no_other_label() -> None:
    figure = Figure()
    axes = figure.subplots()
    x = np.arange(8.0)
    curves = [
        LabelledCurve(x.tolist(), (shift + x**1.5).tolist(), [f"{shift}{n}" for n in range(8)], "k")
        for shift in range(4)
    ]
    for curve in curves:
        axes.plot(curve.x, curve.y)
    label_curves(figure, axes, curves)
    figure.canvas.draw()
    written = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert {f"{shift}{n}" for shift in range(4) for n in (0, 7)} <= set(written)  # ends always have theirs
    boxes = list(written.values())
    assert not any(one.overlaps(other) for n, one in enumerate(boxes) for other in boxes[:n])
    points = [axes.transData.transform((x, y)) for curve in curves for x, y in zip(curve.x, curve.y, strict=True)]
    assert not any(box.contains(*point) for box in boxes for point in points)


def test_steps_longer_than_the_time_between_two_looks_have_their_own_length(tmp_path: Path) -> None:
    series = read_series(write_run(tmp_path, "TP1", loads=LOADS[:1]))
    # One step of one second, three of them, looked at four times a second.
    looks = [Snapshot(number / 4, 1, 0, 1, 10, 2 * (number // 4), 0, number // 4) for number in range(13)]
    figure = timeline(replace(series, points=[replace(series.points[0], timeline=looks)]))
    assert figure is not None
    tokens, times = (figure.axes[panel].lines[0].get_ydata() for panel in (1, 3))
    assert list(tokens) == [2, 2, 2] and list(times) == [1000, 1000, 1000]


def hollow(axes: Axes) -> list[list[float]]:
    """Where points of each curve are hollow, left to right."""
    return [list(line.get_xdata()) for line in axes.lines if line.get_markerfacecolor() == "white"]


def legends(figure: Figure) -> list[str]:
    boxes = [*figure.legends, *(legend for axes in figure.axes if (legend := axes.get_legend()))]
    return [text.get_text() for box in boxes for text in box.get_texts()]


def failing_at_last(part: Series) -> Series:
    """Requests failed at the highest load."""
    *others, last = part.points
    return replace(part, points=[*others, replace(last, summary=replace(last.summary, num_failed=3))])


WAYS: dict[str, dict[str, Any]] = {
    "TP1": {"settings": {"tensor_parallel_size": 1}},
    "TP2": {"settings": {"tensor_parallel_size": 2}, "num_devices": 2},
    "TP1 speculation": {"settings": {"tensor_parallel_size": 1, "speculative_config": "{}"}},
    "TP1 static": {"settings": {"tensor_parallel_size": 1, "static_batching": True}},
}


@pytest.mark.parametrize(
    ("chart", "panels"),
    [
        (lambda series: latency(series, "concurrency"), 2),
        (utilization, 2),
        (parallelism, 1),
        (speculation, 2),
        (batching, 2),
    ],
    ids=["latency", "utilization", "parallelism", "speculation", "batching"],
)
def test_loads_at_which_requests_failed_are_hollow_and_the_legend_says_so(
    chart: Chart, panels: int, tmp_path: Path
) -> None:
    series = [series_of(tmp_path, name, **options) for name, options in WAYS.items()]
    figure = chart(series)
    assert figure is not None and "hollow: requests failed" not in legends(figure)
    figure = chart([failing_at_last(series[0]), *series[1:]])  # it is in every chart
    assert figure is not None and "hollow: requests failed" in legends(figure)
    for axes in figure.axes[:panels]:
        [[load]] = hollow(axes)
        assert load in (64, 128)  # two replicas have twice as many in flight


def test_failures_are_hollow_against_a_rate_and_in_the_trade_off_too(tmp_path: Path) -> None:
    part = failing_at_last(series_of(tmp_path, "TP1", loads=RATES))
    by_rate, curve = latency([part], "rate"), tradeoff([part])
    assert by_rate is not None and curve is not None
    assert [hollow(axes) for axes in by_rate.axes] == [[[8]], [[8]]]
    assert len(hollow(curve.axes[0])) == 1 and legends(curve) == ["TP1", "hollow: requests failed"]


def test_a_load_at_which_requests_failed_makes_no_crossing(tmp_path: Path) -> None:
    """As it makes none in the words of the report."""
    tensor = series_of(tmp_path, "TP2", tpot_ms=3.0, **WAYS["TP2"])
    data = series_of(tmp_path, "TP1 x DP2", num_devices=2, settings={"data_parallel_size": 2})
    *others, last = data.points
    fast = replace(last, summary=replace(last.summary, tpot_ms=dict.fromkeys(last.summary.tpot_ms, 0.1)))
    crossed = parallelism([tensor, replace(data, points=[*others, fast])])
    assert crossed is not None and [text.get_text()[:26] for text in crossed.axes[0].texts] == [
        "data parallelism is faster"
    ]
    failing = failing_at_last(replace(data, points=[*others, fast]))
    figure = parallelism([tensor, failing])
    assert figure is not None and not figure.axes[0].texts


@pytest.mark.parametrize("share", [0.8, None])
def test_no_title_tells_of_a_floor_where_there_is_none(share: float | None, tmp_path: Path) -> None:
    series = [series_of(tmp_path, name, floor_share=share, **options) for name, options in WAYS.items()]
    figures = [latency(series, "concurrency"), parallelism(series), speculation(series), batching(series)]
    titles = [text for figure in figures if figure is not None for text in titles_of(figure)]
    assert len(titles) == 9
    assert any("floor" in title for title in titles) == (share is not None)


def test_a_floor_at_one_load_is_no_line_to_be_told_of(tmp_path: Path) -> None:
    figure = latency([series_of(tmp_path, "TP1", loads=LOADS[:1])], "concurrency")
    assert figure is not None and figure.get_suptitle() == "solid: mean, dotted: 90th percentile"


def titles_of(figure: Figure) -> list[str]:
    titles = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
    return [title for title in titles if title]


def looked_at(part: Series, *counts: int) -> Series:
    """With so many snapshots of each load."""
    points = [replace(point, timeline=point.timeline[:count]) for point, count in zip(part.points, counts, strict=True)]
    return replace(part, points=points)


def test_a_timeline_is_of_the_busiest_load_that_was_looked_at_often_enough(tmp_path: Path) -> None:
    part = series_of(tmp_path, "TP1", loads=LOADS[:3])
    figure = timeline(looked_at(part, 20, 20, 6))
    assert figure is not None and figure.axes[0].get_title(loc="left") == "TP1, with 4 requests in flight"
    assert no_timeline(part) is None


def test_time_without_work_is_no_part_of_a_step(tmp_path: Path) -> None:
    part = series_of(tmp_path, "TP1", loads=RATES[:1])
    # 25 steps between two looks, and nothing to do from 1 s to 2 s.
    busy = [Snapshot(number / 4, int(not 4 <= number <= 8), 0, 1, 10, 0, 0, 25 * min(number, max(4, number - 4)))
            for number in range(17)]  # fmt: skip
    figure = timeline(replace(part, points=[replace(part.points[0], timeline=busy)]))
    assert figure is not None
    [times, *_] = figure.axes[3].lines
    assert {round(float(time), 6) for time in times.get_ydata() if not np.isnan(time)} == {10.0}


def test_batch_sizes_over_time_are_of_several_requests_whatever_the_load_is(tmp_path: Path) -> None:
    """Of one request in flight there is nothing to see."""
    loads = (*LOADS[:2], RATES[2])
    names = ("TP1", "TP1 static")
    plain, static = (looked_at(series_of(tmp_path, name, loads=loads, **WAYS[name]), 20, 6, 20) for name in names)
    figure = batching([plain, static])
    assert figure is not None and figure.axes[0].get_xlabel() == "requests in flight"
    assert figure.axes[2].get_xlabel() == "seconds since the start, at 4 requests a second"
    plain, static = (looked_at(part, 20, 6, 6) for part in (plain, static))
    figure = batching([plain, static])
    assert figure is not None and len(figure.axes) == 2


def test_a_chart_over_time_that_would_be_all_but_empty_is_left_out_and_the_reason_told(tmp_path: Path) -> None:
    names = ("TP1", "TP1 static")
    plain, static = (looked_at(series_of(tmp_path, name, loads=LOADS[:2], **WAYS[name]), 6, 6) for name in names)
    assert timeline(plain) is None
    assert str(no_timeline(plain)).startswith(
        "TP1 has no timeline: no load took long enough for 10 looks at the engine"
    )
    assert no_timeline(looked_at(plain, 0, 0)) is None  # an endpoint tells nothing of itself
    figure = batching([plain, static])
    assert figure is not None and len(figure.axes) == 2
    assert figure.get_supxlabel().startswith(
        "Batch size over time is left out: with both, and several requests, no load"
    )
    stalled = replace(plain, points=[replace(each, timeline=20 * each.timeline[:1]) for each in plain.points])
    assert timeline(stalled) is None  # no step ended: nothing to draw of them
