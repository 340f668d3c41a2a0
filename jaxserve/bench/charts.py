"""Charts of throughput and latency, drawn with matplotlib; every one has the floor in it where the floor is known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from jaxserve.bench.results import Point, Series

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
MARKERS = "osD^vPX*"
INK = "#374151"


def tradeoff(series: Sequence[Series]) -> Figure | None:
    """Output tokens a second for each device against TPOT, the load beside each point."""
    shown = [part for part in series if not part.setting("static_batching") and _curve_points(part)]
    if not shown:
        return None
    figure, [axes] = new_figure(1, height=5.4)
    places: list[tuple[float, float, str, str]] = []
    for number, part in enumerate(shown):
        summaries = [point.summary for point in _curve_points(part)]
        tpot = [summary.tpot_ms["mean"] for summary in summaries]
        rate = [summary.output_tokens_per_second / part.num_devices for summary in summaries]
        axes.plot(tpot, rate, label=part.name, **line_style(number))
        loads = [summary.load.label for summary in summaries]
        places += [(*place, COLOURS[number % len(COLOURS)]) for place in zip(tpot, rate, loads, strict=True)]
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    for number, part in enumerate(shown):
        _draw_floor(axes, part, number)
    axes.set_xlabel("time per output token, mean (ms)")
    axes.set_ylabel("output tokens a second for each device")
    finish(axes, "Throughput against latency (numbers: requests in flight; dashed: the floor)")
    _label_points(figure, axes, places)
    return figure


def _curve_points(part: Series) -> list[Point]:
    """Those at fixed concurrency, or where there are none, all others."""
    points = part.of_kind("concurrency") or part.points
    return [point for point in points if point.summary.tpot_ms["mean"] > 0]


def _draw_floor(axes: Axes, part: Series, number: int) -> None:
    floors = [point.summary for point in part.of_kind("concurrency") if point.summary.floor_ms]
    if floors:
        x = [summary.floor_ms or 0.0 for summary in floors]
        y = [summary.mean_running / (summary.floor_ms or 1.0) * 1e3 / part.num_devices for summary in floors]
        (_, right), (_, top) = axes.get_xlim(), axes.get_ylim()
        axes.plot(x, y, color=COLOURS[number % len(COLOURS)], linestyle="--", linewidth=1, alpha=0.6)
        axes.set_xlim(0, right)
        axes.set_ylim(0, top)  # the floor of large batches lies far above what is reached


def _label_points(figure: Figure, axes: Axes, places: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes each label beside its point where it covers neither a point nor another label; leaves it out elsewhere."""
    figure.draw_without_rendering()  # places the axes, so that data has pixels
    points = [tuple(axes.transData.transform((x, y))) for x, y, _, _ in places]
    taken: list[tuple[float, float, float, float]] = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    scale = figure.dpi / 72
    ground = axes.transAxes.transform((0, 0))[1]
    for (x, y, label, colour), (pixel_x, pixel_y) in zip(places, points, strict=True):
        width, height = 5.2 * len(label) * scale, 8 * scale
        for right, up in ((1, -1), (-1, 1), (1, 1), (-1, -1)):
            left = pixel_x + 7 * scale if right > 0 else pixel_x - 7 * scale - width
            bottom = pixel_y + 2 * scale if up > 0 else pixel_y - 2 * scale - height
            box = (left, bottom, left + width, bottom + height)
            if bottom > ground and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                axes.annotate(
                    label, (x, y), xytext=(7 * right, 2 * up), textcoords="offset points", fontsize=8, color=colour,
                    ha="left" if right > 0 else "right", va="bottom" if up > 0 else "top",
                )  # fmt: skip
                break


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def latency(series: Sequence[Series], kind: str) -> Figure | None:
    """TPOT and TTFT, mean and 90th percentile, against requests in flight ("concurrency") or a second ("rate")."""
    shown = [part for part in series if part.of_kind(kind) and not part.setting("static_batching")]
    if not shown:
        return None
    figure, [left, right] = new_figure(2)
    for number, part in enumerate(shown):
        summaries = [point.summary for point in part.of_kind(kind)]
        loads = [summary.load.value for summary in summaries]
        style = line_style(number)
        for axes, values in ((left, "tpot_ms"), (right, "ttft_ms")):
            axes.plot(loads, [getattr(summary, values)["mean"] for summary in summaries], label=part.name, **style)
            high = [getattr(summary, values)["p90"] for summary in summaries]
            axes.plot(loads, high, color=style["color"], linestyle=":", linewidth=1.2)
        draw_step_floor(left, part, kind, number)
    for axes, quantity in ((left, "time per output token (ms)"), (right, "time to first token (ms)")):
        load_axis(axes, shown, kind)
        axes.set_ylabel(quantity)
        axes.set_ylim(bottom=0)
    finish(left, "Time per output token")
    finish(right, "Time to first token")
    figure.suptitle("solid: mean, dotted: 90th percentile, dashed: the floor", fontsize=9, color=INK)
    return figure


def draw_step_floor(axes: Axes, part: Series, kind: str, number: int) -> None:
    floors = [point.summary for point in part.of_kind(kind) if point.summary.floor_ms]
    if floors:
        axes.plot(
            [summary.load.value for summary in floors], [summary.floor_ms or 0.0 for summary in floors],
            color=COLOURS[number % len(COLOURS)], linestyle="--", linewidth=1, alpha=0.6,
        )  # fmt: skip


def utilization(series: Sequence[Series]) -> Figure | None:
    """MBU and MFU against requests in flight, one curve for each degree of tensor parallelism or other configuration."""
    shown = [
        part for part in series if any(point.summary.bandwidth_utilization for point in part.of_kind("concurrency"))
    ]
    shown = [part for part in shown if not part.setting("static_batching")]
    if not shown:
        return None
    figure, [left, right] = new_figure(2)
    for number, part in enumerate(shown):
        summaries = [point.summary for point in part.of_kind("concurrency")]
        loads = [summary.load.value for summary in summaries]
        style = line_style(number)
        left.plot(
            loads, [100 * (summary.bandwidth_utilization or 0) for summary in summaries], label=part.name, **style
        )
        right.plot(loads, [100 * (summary.compute_utilization or 0) for summary in summaries], label=part.name, **style)
    for axes, quantity in ((left, "MBU (% of the measured bandwidth)"), (right, "MFU (% of the measured matrix rate)")):
        load_axis(axes, shown, "concurrency")
        axes.set_ylabel(quantity)
    left.axhline(100, color=INK, linestyle="--", linewidth=1, alpha=0.6)
    left.set_ylim(0, max(105.0, left.get_ylim()[1]))
    right.set_ylim(bottom=0)
    finish(left, "Use of the bandwidth (dashed: the floor)")
    finish(right, "Use of the compute")
    return figure


def timeline(part: Series) -> Figure | None:
    """What the engine did during the busiest load: batch size, tokens of a step, pages in use."""
    points = [point for point in part.points if len(point.timeline) > 1]
    if not points:
        return None
    point = max(points, key=lambda point: point.summary.mean_running)
    snapshots = point.timeline
    seconds = [snapshot.time for snapshot in snapshots]
    figure, [top, middle, bottom] = new_figure(3, columns=1, height=6.4)
    top.plot(seconds, [snapshot.num_running for snapshot in snapshots], color=COLOURS[0], label="running")
    top.plot(seconds, [snapshot.num_waiting for snapshot in snapshots], color=COLOURS[1], label="waiting", linewidth=1)
    top.set_ylabel("requests")
    steps = [
        (late, late.num_steps - early.num_steps, late.generation_tokens - early.generation_tokens)
        for early, late in itertools.pairwise(snapshots)
    ]
    moved = [(late.time, tokens / count) for late, count, tokens in steps if count > 0]
    middle.plot([moment for moment, _ in moved], [tokens for _, tokens in moved], color=COLOURS[2])
    middle.set_ylabel("output tokens a step")
    used = [100 * snapshot.used_pages / max(1, snapshot.num_pages) for snapshot in snapshots]
    bottom.plot(seconds, used, color=COLOURS[4])
    bottom.set_ylabel("KV pages in use (%)")
    bottom.set_xlabel("seconds since the start")
    for axes in (top, middle, bottom):
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
        axes.set_xlim(seconds[0], seconds[-1])
    finish(top, f"{part.name}, load {point.summary.load.label}")
    for axes in (middle, bottom):
        finish(axes, None)
    return figure


def new_figure(panels: int, *, columns: int | None = None, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    columns = panels if columns is None else columns
    figure = Figure(figsize=({1: 8.4, 2: 10.4}.get(columns, 4.2 * columns), height), layout="constrained")
    axes = figure.subplots(panels // columns, columns, squeeze=False)
    return figure, list(axes.flat)


def line_style(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 5,
        "linewidth": 1.8,
    }


def load_axis(axes: Axes, series: Sequence[Series], kind: str, further: Iterable[float] = ()) -> None:
    """Loads on a logarithmic axis, with a tick at each that was measured, as far as they do not touch."""
    axes.set_xscale("log", base=2)
    loads = sorted({*further, *(point.summary.load.value for part in series for point in part.of_kind(kind))})
    axes.set_xticks(spread(loads))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("requests in flight" if kind == "concurrency" else "requests a second")


def spread(values: Iterable[float], ratio: float = 1.3) -> list[float]:
    """Those that are at least so many times the one before."""
    kept: list[float] = []
    for value in values:
        if not kept or value >= kept[-1] * ratio:
            kept.append(value)
    return kept


def finish(axes: Axes, title: str | None) -> None:
    if title is not None:
        axes.set_title(title, fontsize=10, color=INK)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        axes.legend(handles, labels, fontsize=8, frameon=False)


Chart = Callable[[Sequence[Series]], Figure | None]
