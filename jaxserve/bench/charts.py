"""Charts of throughput and latency, drawn with matplotlib; every one has the floor in it where the floor is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from jaxserve.bench.chart_labels import LabelledCurve, label_curves
from jaxserve.bench.results import Point, Series

COLOURS = (
    "#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#854d0e", "#475569", "#ec4899",
)  # fmt: skip
MARKERS = "osD^vPX*<"  # of another number than colours, so that two curves share both only after 99
_FEWEST_SNAPSHOTS = 10  # fewer leave a panel over time all but empty
_FEWEST_STEPS = 4  # told by them: long steps give as few points
TOO_SHORT = (
    f"no load took long enough for {_FEWEST_SNAPSHOTS} looks at the engine, four a second, and {_FEWEST_STEPS} steps"
)
_LOAD_UNITS = {"concurrency": "requests in flight", "rate": "requests a second", "trace": "times the trace's own speed"}
FLOOR_STYLE: dict[str, Any] = {"linestyle": "--", "linewidth": 1, "alpha": 0.6}
INK = "#374151"
_FAILED = "_failed"  # matplotlib keeps labels that begin like this out of legends


def tradeoff(series: Sequence[Series]) -> Figure | None:
    """Output tokens a second for each device against TPOT, the load beside each point."""
    shown = [part for part in series if not part.setting("static_batching") and _curve_points(part)]
    if not shown:
        return None
    styles = styles_of(series)
    figure, [axes] = new_figure(1, height=5.4 if len(shown) < 6 else 7.0)
    curves = []
    for part in shown:
        summaries = [point.summary for point in _curve_points(part)]
        tpot = [summary.tpot_ms["mean"] for summary in summaries]
        rate = [summary.output_tokens_per_second / part.num_devices for summary in summaries]
        draw_curve(axes, tpot, rate, failed_at(_curve_points(part)), label=part.name, style=styles[part.name])
        labels = [summary.load.label for summary in summaries]
        curves.append(LabelledCurve(tpot, rate, labels, styles[part.name]["color"]))
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    in_view = [seen for part in shown if (seen := _draw_floor(axes, part, styles[part.name]["color"])) is not None]
    axes.set_xlabel("time per output token, mean (ms)")
    axes.set_ylabel("output tokens a second for each device")
    labels_are = (
        "numbers: requests in flight" if all(part.of_kind("concurrency") for part in shown) else "labels: the load"
    )
    floor = "" if not in_view else "; dashed: the floor" if any(in_view) else "; the floor is out of view"
    finish(axes, f"Throughput against latency ({labels_are}{floor})", legend=False)
    legend_below(figure, axes)
    label_curves(figure, axes, curves)
    return figure


def _curve_points(part: Series) -> list[Point]:
    """Those at fixed concurrency, or where there are none, all others."""
    points = part.of_kind("concurrency") or part.points
    return [point for point in points if point.summary.tpot_ms["mean"] > 0]


def _draw_floor(axes: Axes, part: Series, colour: str) -> bool | None:
    """Whether any of it can be seen; None where there is none."""
    floors = [point.summary for point in part.of_kind("concurrency") if point.summary.floor_ms]
    if not floors:
        return None
    x = [summary.floor_ms or 0.0 for summary in floors]
    y = [summary.mean_running / (summary.floor_ms or 1.0) * 1e3 / part.num_devices for summary in floors]
    (_, right), (_, top) = axes.get_xlim(), axes.get_ylim()
    axes.plot(x, y, color=colour, **FLOOR_STYLE)
    axes.set_xlim(0, right)
    axes.set_ylim(0, top)  # the floor of large batches lies far above what is reached
    # Both rise with the load. A lone point is no line.
    return len(floors) > 1 and x[0] <= right and y[0] <= top


def latency(series: Sequence[Series], kind: str) -> Figure | None:
    """TPOT and TTFT, mean and 90th percentile, against requests in flight ("concurrency") or a second ("rate")."""
    shown = [part for part in series if part.of_kind(kind) and not part.setting("static_batching")]
    if not shown:
        return None
    styles = styles_of(series)
    figure, [left, right] = new_figure(2)
    has_floor = False
    for part in shown:
        summaries = [point.summary for point in part.of_kind(kind)]
        loads = [summary.load.value for summary in summaries]
        failed = failed_at(part.of_kind(kind))
        style = styles[part.name]
        for axes, values in ((left, "tpot_ms"), (right, "ttft_ms")):
            mean = [getattr(summary, values)["mean"] for summary in summaries]
            draw_curve(axes, loads, mean, failed, label=part.name, style=style)
            high = [getattr(summary, values)["p90"] for summary in summaries]
            axes.plot(loads, high, color=style["color"], linestyle=":", linewidth=1.2)
        has_floor |= draw_step_floor(left, part, kind, style["color"])
        has_floor |= draw_prompt_floor(right, part, kind, style["color"])
    for axes, quantity in ((left, "time per output token (ms)"), (right, "time to first token (ms)")):
        load_axis(axes, shown, kind)
        axes.set_ylabel(quantity)
        axes.set_ylim(bottom=0)
    finish(left, "Time per output token", legend=False)
    finish(right, "Time to first token", legend=False)
    legend_below(figure, left)
    floor = ", dashed: the floor" if has_floor else ""
    figure.suptitle(f"solid: mean, dotted: 90th percentile{floor}", fontsize=9, color=INK)
    return figure


def draw_step_floor(axes: Axes, part: Series, kind: str, colour: str) -> bool:
    """Least time of a step, at each load; returns whether there is a line of it."""
    return _draw_floors(axes, part, kind, colour, [point.summary.floor_ms for point in part.of_kind(kind)])


def draw_prompt_floor(axes: Axes, part: Series, kind: str, colour: str, *, unit_ms: float = 1.0) -> bool:
    """As `draw_step_floor`, of the least time of a prompt."""
    floors = [(point.summary.ttft_floor_ms or 0.0) / unit_ms for point in part.of_kind(kind)]
    return _draw_floors(axes, part, kind, colour, floors)


def _draw_floors(axes: Axes, part: Series, kind: str, colour: str, floors: Sequence[float | None]) -> bool:
    loads = [point.summary.load.value for point in part.of_kind(kind)]
    known = [(load, floor) for load, floor in zip(loads, floors, strict=True) if floor]
    if known:
        axes.plot([load for load, _ in known], [floor for _, floor in known], color=colour, **FLOOR_STYLE)
    return len(known) > 1  # a lone point is no line


def utilization(series: Sequence[Series]) -> Figure | None:
    """MBU and MFU against requests in flight, one curve for each degree of tensor parallelism or other configuration."""
    shown = [
        part for part in series if any(point.summary.bandwidth_utilization for point in part.of_kind("concurrency"))
    ]
    shown = [part for part in shown if not part.setting("static_batching")]
    if not shown:
        return None
    styles = styles_of(series)
    figure, [left, right] = new_figure(2)
    for part in shown:
        summaries = [point.summary for point in part.of_kind("concurrency")]
        loads = [summary.load.value for summary in summaries]
        failed = failed_at(part.of_kind("concurrency"))
        for axes, shares in (
            (left, [summary.bandwidth_utilization for summary in summaries]),
            (right, [summary.compute_utilization for summary in summaries]),
        ):
            percent = [100 * (share or 0) for share in shares]
            draw_curve(axes, loads, percent, failed, label=part.name, style=styles[part.name])
    for axes, quantity in ((left, "MBU (% of the measured bandwidth)"), (right, "MFU (% of the measured matrix rate)")):
        load_axis(axes, shown, "concurrency")
        axes.set_ylabel(quantity)
    left.axhline(100, color=INK, **FLOOR_STYLE)
    left.set_ylim(0, max(105.0, left.get_ylim()[1]))
    right.set_ylim(bottom=0)
    finish(left, "Use of the bandwidth (dashed: the floor)", legend=False)
    finish(right, "Use of the compute", legend=False)
    legend_below(figure, left)
    return figure


def has_timeline(point: Point) -> bool:
    """Whether a load took long enough for a curve over its time."""
    num_steps = {snapshot.num_steps for snapshot in point.timeline}
    return len(point.timeline) >= _FEWEST_SNAPSHOTS and len(num_steps) >= _FEWEST_STEPS


def no_timeline(part: Series) -> str | None:
    """Why there is none of a run that has snapshots, in words."""
    if not any(point.timeline for point in part.points) or any(has_timeline(point) for point in part.points):
        return None
    return f"{part.name} has no timeline: {TOO_SHORT}"


def timeline(part: Series) -> Figure | None:
    """What the engine did during the busiest load that took long enough: batch size, tokens of a step, pages in use, and how
    long steps took.
    """
    points = [point for point in part.points if has_timeline(point)]
    if not points:
        return None
    point = max(points, key=lambda point: point.summary.mean_running)
    snapshots = point.timeline
    seconds = [snapshot.time for snapshot in snapshots]
    figure, [top, middle, pages, bottom] = new_figure(4, columns=1, height=7.6)
    # Wider than what may lie upon it, so that both are seen where as many wait as run.
    top.plot(seconds, [each.num_running for each in snapshots], color=COLOURS[0], label="running", linewidth=2.6)
    top.plot(seconds, [snapshot.num_waiting for snapshot in snapshots], color=COLOURS[1], label="waiting", linewidth=1)
    top.set_ylabel("requests")
    # A step that takes longer than the time between two snapshots is told by the first one that has it.
    alike = [list(same) for _, same in itertools.groupby(snapshots, key=lambda each: each.num_steps)]
    told = [same[0] for same in alike]
    steps = list(itertools.pairwise(told))
    # Between them there may be time without work, which is no part of a step.
    is_busy = [all(each.num_running for each in (*same, late)) for same, late in zip(alike, told[1:], strict=False)]
    moments = [late.time for _, late in steps]
    tokens = [
        (late.generation_tokens - early.generation_tokens) / (late.num_steps - early.num_steps) for early, late in steps
    ]
    middle.plot(moments, tokens, color=COLOURS[2])
    middle.set_ylabel("output tokens\na step")
    pages.plot(seconds, [100 * each.used_pages / max(1, each.num_pages) for each in snapshots], color=COLOURS[4])
    pages.set_ylabel("KV pages\nin use (%)")
    times = [
        1e3 * (late.time - early.time) / (late.num_steps - early.num_steps) if busy else math.nan
        for (early, late), busy in zip(steps, is_busy, strict=True)
    ]
    bottom.plot(moments, times, color=COLOURS[3], marker=".", markersize=4)  # points, for some may be alone
    if point.summary.floor_ms:
        bottom.axhline(point.summary.floor_ms, color=COLOURS[3], **FLOOR_STYLE)
    bottom.set_ylabel("ms a step\n(dashed: floor)" if point.summary.floor_ms else "ms a step")
    bottom.set_xlabel("seconds since the start")
    for axes in (top, middle, pages, bottom):
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
        axes.set_xlim(0, seconds[-1])
        finish(axes, None, legend=False)
    figure.align_ylabels()
    top.set_title(f"{part.name}, {point.summary.load.words}", fontsize=10, color=INK, loc="left")
    top.legend(fontsize=8, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)
    return figure


def new_figure(panels: int, *, columns: int | None = None, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    columns = panels if columns is None else columns
    figure = Figure(figsize=({1: 8.4, 2: 10.4}.get(columns, 4.2 * columns), height), layout="constrained")
    axes = figure.subplots(-(-panels // columns), columns, squeeze=False)
    return figure, list(axes.flat)


def styles_of(series: Sequence[Series]) -> dict[str, dict[str, Any]]:
    """How each configuration is drawn, in every chart alike."""
    return {part.name: line_style(number) for number, part in enumerate(series)}


def line_style(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 5,
        "linewidth": 1.8,
    }


def failed_at(points: Iterable[Point]) -> list[bool]:
    """At which of the loads requests failed."""
    return [point.summary.num_failed > 0 for point in points]


def draw_curve(
    axes: Axes, x: Sequence[float], y: Sequence[float], failed: Sequence[bool], *, label: str, style: dict[str, Any]
) -> None:
    """One curve, hollow where requests failed: the others had their room. The legend says so."""
    axes.plot(x, y, label=label, **style)
    marked = [(across, up) for across, up, is_failed in zip(x, y, failed, strict=True) if is_failed]
    if marked:
        hollow = {**style, "linestyle": "none", "markerfacecolor": "white"}
        axes.plot([across for across, _ in marked], [up for _, up in marked], label=_FAILED, **hollow)


def _legend_entries(axes: Axes) -> tuple[list[Any], list[str]]:
    handles, labels = axes.get_legend_handles_labels()
    if any(line.get_label() == _FAILED for line in axes.lines):
        handles.append(Line2D([], [], color=INK, linestyle="none", marker="o", markersize=5, markerfacecolor="white"))
        labels.append("hollow: requests failed")
    return handles, labels


def load_axis(axes: Axes, series: Sequence[Series], kind: str, further: Iterable[float] = ()) -> None:
    """Loads on a logarithmic axis, with a tick at each that was measured, as far as they do not touch."""
    axes.set_xscale("log", base=2)
    loads = sorted({*further, *(point.summary.load.value for part in series for point in part.of_kind(kind))})
    axes.set_xticks(spread(loads))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(_LOAD_UNITS[kind])


def spread(values: Iterable[float], ratio: float = 1.3) -> list[float]:
    """Those that are at least so many times the one before."""
    kept: list[float] = []
    for value in values:
        if not kept or value >= kept[-1] * ratio:
            kept.append(value)
    return kept


def finish(axes: Axes, title: str | None, *, legend: bool = True) -> None:
    if title is not None:
        axes.set_title(title, fontsize=10, color=INK)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = _legend_entries(axes)
    if labels and legend:
        axes.legend(handles, labels, fontsize=8, frameon=False)


def legend_below(figure: Figure, axes: Axes) -> None:
    """The curves' names under all panels, where they cover none of them."""
    handles, labels = _legend_entries(axes)
    longest = max(map(len, labels))
    columns = max(1, min(len(labels), int(figure.get_figwidth() / (0.075 * longest + 0.6))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


Chart = Callable[[Sequence[Series]], Figure | None]
