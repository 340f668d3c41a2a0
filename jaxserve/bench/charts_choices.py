"""Charts that set two ways of doing things against each other: tensor and data parallelism, speculation, batching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxserve.bench.charts import (
    COLOURS,
    FLOOR_STYLE,
    INK,
    TOO_SHORT,
    draw_curve,
    draw_prompt_floor,
    draw_step_floor,
    failed_at,
    finish,
    has_timeline,
    legend_below,
    line_style,
    load_axis,
    new_figure,
    styles_of,
)
from jaxserve.bench.parallelism import (
    Comparison,
    answered,
    comparisons,
    crossing,
    degrees_of,
    group_of,
    is_comparable,
    setup_of,
    timed,
    tpot_by_load,
)
from jaxserve.bench.records import Load
from jaxserve.bench.results import Series


def parallelism(series: Sequence[Series]) -> Figure | None:
    """TPOT of the same devices used by tensor or by data parallelism, and where they cross."""
    panels_of: dict[object, list[Comparison]] = {}  # by the model over all devices: names need not tell models apart
    for comparison in comparisons(series):
        key = (group_of(comparison.wide), degrees_of(comparison.wide))
        panels_of.setdefault(key, []).append(comparison)
    if not panels_of:
        return None
    are_alike = len({group_of(of_one[0].wide) for of_one in panels_of.values()}) == 1
    names = [of_one[0].wide.name for of_one in panels_of.values()]
    count = len(panels_of)
    figure, panels = new_figure(count, columns=min(2, count), height=4.2 * -(-count // 2))
    for axes in panels[count:]:
        axes.set_visible(False)
    for axes, of_one in zip(panels, panels_of.values(), strict=False):
        wide, degree = of_one[0].wide, of_one[0].degree
        _draw_tpot(axes, wide, label=f"tensor parallel on {degree}", style=line_style(0))
        loads: list[float] = []
        for number, comparison in enumerate(of_one, start=1):
            own = degrees_of(comparison.narrow)[0]
            each = "" if own == 1 else f", {own} each"
            name = f"data parallel on {degree}{each} ({comparison.origin})"
            loads += _draw_tpot(axes, comparison.narrow, times=comparison.times, label=name, style=line_style(number))
            if number == 1:
                _mark_crossing(axes, comparison)
        has_floor = draw_step_floor(axes, wide, "concurrency", COLOURS[0])
        load_axis(axes, [wide], "concurrency", loads)
        axes.set_xlabel("requests in flight, over all devices")
        axes.set_ylabel("time per output token, mean (ms)")
        axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
        name = wide.name if names.count(wide.name) == 1 else f"{wide.environment.get('model')}, {wide.name}"
        of_what = "" if are_alike else f"{name}:\n"  # else the title is too long for half a figure
        floor = f" (dashed: floor of TP{degree})" if has_floor else ""
        finish(axes, f"{of_what}Tensor or data parallelism on {degree} devices{floor}")
    return figure


def _draw_tpot(axes: Axes, part: Series, *, label: str, style: dict[str, Any], times: int = 1) -> list[float]:
    """Mean time per token against the requests in flight over all of so many replicas, which are returned."""
    points = timed(part)
    loads, tpot = (values.tolist() for values in tpot_by_load(points, times))
    draw_curve(axes, loads, tpot, failed_at(points), label=label, style=style)
    return loads


def _mark_crossing(axes: Axes, comparison: Comparison) -> None:
    """As far as all requests were answered."""
    tensor = tpot_by_load(answered(comparison.wide), 1)
    data = tpot_by_load(answered(comparison.narrow), comparison.times)
    load = crossing(tensor, data)
    if load is None:
        return
    axes.axvline(load, color=INK, linewidth=1, linestyle="-.", alpha=0.7)
    is_left = load < np.sqrt(tensor[0][0] * max(tensor[0][-1], data[0][-1]))
    axes.annotate(
        f"data parallelism is faster from {load:.0f}", (load, 0), xytext=(6 if is_left else -6, 8),
        textcoords="offset points", fontsize=8, color=INK, ha="left" if is_left else "right",
    )  # fmt: skip


def speculation(series: Sequence[Series]) -> Figure | None:
    """TPOT with and without speculation, for each degree of parallelism that has both."""
    speculating = [part for part in series if part.setting("speculative_config") and part.of_kind("concurrency")]
    pairs = [
        (other, part)
        for part in speculating
        for other in series
        if _goes_with(other, part)
    ]  # fmt: skip
    if not pairs:
        return None
    styles = styles_of(series)
    figure, [left, right] = new_figure(2)
    drawn: set[str] = set()
    has_floor = False
    for plain, part in pairs:
        for run in (plain, part):
            if run.name not in drawn:  # two ways of speculating are set against the same plain decoding
                _draw_tpot(left, run, label=run.name, style=styles[run.name])
                has_floor |= draw_step_floor(left, run, "concurrency", styles[run.name]["color"])
                drawn.add(run.name)
        before = {point.summary.load: point for point in timed(plain)}
        shared = [(before[point.summary.load], point) for point in timed(part) if point.summary.load in before]
        gains = [one.summary.tpot_ms["mean"] / other.summary.tpot_ms["mean"] for one, other in shared]
        draw_curve(
            right, [point.summary.load.value for point, _ in shared], gains, [any(failed_at(pair)) for pair in shared],
            label=part.name, style=styles[part.name],
        )  # fmt: skip
    right.axhline(1, color=INK, **FLOOR_STYLE)
    for axes, quantity in ((left, "time per output token, mean (ms)"), (right, "speed-up over plain decoding")):
        load_axis(axes, [part for pair in pairs for part in pair], "concurrency")
        axes.set_ylabel(quantity)
        axes.set_ylim(bottom=0)
    floor = " (dashed: floor of plain steps)" if has_floor else ""
    finish(left, f"Speculation and plain decoding{floor}", legend=False)
    finish(right, "Speed-up (dashed: none)", legend=False)
    legend_below(figure, left)
    return figure


def batching(series: Sequence[Series]) -> Figure | None:
    """Static against continuous batching at the same loads: throughput, time to first token, and batch size over time."""
    static = next((part for part in series if part.setting("static_batching") and part.points), None)
    if static is None:
        return None
    continuous = next(
        (
            part
            for part in series
            if _is_plain(part) and group_of(part) == group_of(static) and degrees_of(part) == degrees_of(static)
        ),
        None,
    )
    if continuous is None:
        return None
    kind = max(("rate", "concurrency", "trace"), key=lambda kind: len(static.of_kind(kind)))
    pairs = ((continuous, "continuous"), (static, "static"))
    busiest = _busiest_of_both(continuous, static)
    figure, [left, middle, *over_time] = new_figure(2 if busiest is None else 3)
    for number, (part, label) in enumerate(pairs):
        summaries = [point.summary for point in part.of_kind(kind)]
        loads = [summary.load.value for summary in summaries]
        style = line_style(number)
        failed = failed_at(part.of_kind(kind))
        rates = [summary.output_tokens_per_second for summary in summaries]
        draw_curve(left, loads, rates, failed, label=label, style=style)
        waits = [summary.ttft_ms["p90"] / 1e3 for summary in summaries]
        draw_curve(middle, loads, waits, failed, label=label, style=style)
        for axes in over_time:
            [snapshots] = (point.timeline for point in part.points if point.summary.load == busiest)
            axes.step([each.time for each in snapshots], [each.num_running for each in snapshots], where="post",
                      color=COLOURS[number], label=label, linewidth=1.5)  # fmt: skip
    has_floor = draw_prompt_floor(middle, continuous, kind, COLOURS[0], unit_ms=1e3)
    limit = _bandwidth_limit(left, continuous, kind)
    for axes in (left, middle):
        load_axis(axes, [static, continuous], kind)
    left.set_ylabel("output tokens a second")
    middle.set_ylabel("time to first token, 90th percentile (s)")
    for axes in (left, middle, *over_time):
        axes.set_ylim(bottom=0)
    finish(left, f"Throughput{limit}")
    finish(middle, f"Time to first token{' (dashed: the floor)' if has_floor else ''}")
    for axes in over_time:
        axes.set_ylabel("requests that run")
        axes.set_xlabel(f"seconds since the start, {'' if busiest is None else busiest.words}")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        finish(axes, "Batch size over time")
    if not over_time:
        figure.supxlabel(
            f"Batch size over time is left out: with both, and several requests, {TOO_SHORT}", fontsize=9, color=INK
        )
    return figure


def _busiest_of_both(one: Series, other: Series) -> Load | None:
    """The load with most requests at once, of whatever kind, that took long enough with both; None: there is none."""
    running = [
        {point.summary.load: point.summary.mean_running for point in part.points if has_timeline(point)}
        for part in (one, other)
    ]
    shared = [load for load in running[0] if load in running[1] and load != Load("concurrency", 1)]
    return max(shared, key=lambda load: running[0][load] + running[1][load], default=None)


def _bandwidth_limit(axes: Axes, part: Series, kind: str) -> str:
    """Draws what the floor of the same batches would give, where it lies in view; returns what a title says of it."""
    summaries = [point.summary for point in part.of_kind(kind) if point.summary.floor_ms]
    if len(summaries) < 2:  # a lone point is no line
        return ""
    limit = [summary.mean_running / (summary.floor_ms or 1.0) * 1e3 for summary in summaries]
    high = axes.get_ylim()[1]
    if limit[1] > 3 * high:
        return " (the floor's is out of view)"
    axes.plot([summary.load.value for summary in summaries], limit, color=COLOURS[0], **FLOOR_STYLE)
    axes.set_ylim(0, min(3 * high, max(high, *limit)))
    return " (dashed: the floor's)"


def _is_plain(part: Series) -> bool:
    return is_comparable(part) and not part.setting("speculative_config")


def _goes_with(plain: Series, speculating: Series) -> bool:
    """Whether they differ in speculation alone."""
    is_alike = setup_of(plain) == setup_of(speculating) and degrees_of(plain) == degrees_of(speculating)
    return _is_plain(plain) and is_alike
