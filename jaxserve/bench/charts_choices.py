"""Charts that set two ways of doing things against each other: tensor and data parallelism, speculation, batching."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxserve.bench.charts import (
    COLOURS,
    FLOOR_STYLE,
    INK,
    draw_prompt_floor,
    draw_step_floor,
    finish,
    has_timeline,
    legend_below,
    line_style,
    load_axis,
    new_figure,
    styles_of,
)
from jaxserve.bench.results import Series

Curve = tuple[np.ndarray, np.ndarray]  # requests in flight over all devices, TPOT in ms


def parallelism(series: Sequence[Series]) -> Figure | None:
    """TPOT of the same devices used by tensor or by data parallelism, and where they cross."""
    plain = [part for part in series if _is_plain(part) and part.of_kind("concurrency")]
    groups = dict.fromkeys(_group(part) for part in plain)
    found = []  # of each panel the degree, and the runs of its model and workload
    for group in groups:
        by_degree = {_degrees(part): part for part in plain if _group(part) == group}
        degrees = sorted(tensor for tensor, data in by_degree if data == 1 and tensor > 1)
        found += [(degree, by_degree) for degree in degrees if (1, 1) in by_degree or (1, degree) in by_degree]
    if not found:
        return None
    figure, panels = new_figure(len(found), columns=min(2, len(found)), height=4.2 * -(-len(found) // 2))
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    for axes, (degree, by_degree) in zip(panels, found, strict=False):
        tensor = _curve(by_degree[degree, 1], 1)
        measured = by_degree.get((1, degree))
        data = _curve(measured, 1) if measured is not None else _curve(by_degree[1, 1], degree)
        origin = "measured" if measured is not None else "from one device's figures"
        axes.plot(*tensor, label=f"tensor parallel on {degree}", **line_style(0))
        axes.plot(*data, label=f"data parallel on {degree} ({origin})", **line_style(1))
        draw_step_floor(axes, by_degree[degree, 1], "concurrency", COLOURS[0])
        _mark_crossing(axes, tensor, data)
        load_axis(axes, [by_degree[degree, 1]], "concurrency", data[0])
        axes.set_xlabel("requests in flight, over all devices")
        axes.set_ylabel("time per output token, mean (ms)")
        axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
        of_what = "" if len(groups) == 1 else f"{by_degree[degree, 1].name}: "
        finish(axes, f"{of_what}Tensor or data parallelism on {degree} devices (dashed: floor of TP{degree})")
    return figure


def crossing(first: Curve, second: Curve) -> float | None:
    """The load from which the second curve is the lower one for good, between points on a logarithmic axis; None: never,
    or from the start.
    """
    low, high = max(first[0][0], second[0][0]), min(first[0][-1], second[0][-1])
    if low >= high:
        return None
    loads = np.geomspace(low, high, 400)
    gap = np.interp(np.log(loads), np.log(first[0]), first[1]) - np.interp(np.log(loads), np.log(second[0]), second[1])
    lower = gap > 0
    if not lower[-1] or lower.all():
        return None
    return float(loads[np.flatnonzero(~lower)[-1] + 1])


def _mark_crossing(axes: Axes, tensor: Curve, data: Curve) -> None:
    load = crossing(tensor, data)
    if load is None:
        return
    axes.axvline(load, color=INK, linewidth=1, linestyle="-.", alpha=0.7)
    is_left = load < np.sqrt(tensor[0][0] * max(tensor[0][-1], data[0][-1]))
    axes.annotate(
        f"data parallelism is faster from {load:.0f}", (load, 0), xytext=(6 if is_left else -6, 8),
        textcoords="offset points", fontsize=8, color=INK, ha="left" if is_left else "right",
    )  # fmt: skip


def _curve(part: Series, replicas: int) -> Curve:
    summaries = [point.summary for point in part.of_kind("concurrency")]
    loads = np.asarray([summary.load.value * replicas for summary in summaries])
    return loads, np.asarray([summary.tpot_ms["mean"] for summary in summaries])


def speculation(series: Sequence[Series]) -> Figure | None:
    """TPOT with and without speculation, for each degree of parallelism that has both."""
    speculating = [part for part in series if part.setting("speculative_config") and part.of_kind("concurrency")]
    pairs = [
        (other, part)
        for part in speculating
        for other in series
        if _is_plain(other) and _degrees(other) == _degrees(part) and _group(other) == _group(part)
    ]  # fmt: skip
    if not pairs:
        return None
    styles = styles_of(series)
    figure, [left, right] = new_figure(2)
    drawn: set[str] = set()
    for plain, part in pairs:
        for run in (plain, part):
            if run.name not in drawn:  # two ways of speculating are set against the same plain decoding
                loads, tpot = _curve(run, 1)
                left.plot(loads, tpot, label=run.name, **styles[run.name])
                draw_step_floor(left, run, "concurrency", styles[run.name]["color"])
                drawn.add(run.name)
        before = dict(zip(*(values.tolist() for values in _curve(plain, 1)), strict=True))
        shared = [(load, before[load] / tpot) for load, tpot in zip(*_curve(part, 1), strict=True) if load in before]
        right.plot([load for load, _ in shared], [gain for _, gain in shared], label=part.name, **styles[part.name])
    right.axhline(1, color=INK, **FLOOR_STYLE)
    for axes, quantity in ((left, "time per output token, mean (ms)"), (right, "speed-up over plain decoding")):
        load_axis(axes, [part for pair in pairs for part in pair], "concurrency")
        axes.set_ylabel(quantity)
        axes.set_ylim(bottom=0)
    finish(left, "Speculation and plain decoding (dashed: floor of plain steps)", legend=False)
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
            if _is_plain(part) and _group(part) == _group(static) and _degrees(part) == _degrees(static)
        ),
        None,
    )
    if continuous is None:
        return None
    kind = max(("rate", "concurrency", "trace"), key=lambda kind: len(static.of_kind(kind)))
    figure, [left, middle, right] = new_figure(3)
    pairs = ((continuous, "continuous"), (static, "static"))
    shared = set.intersection(*({p.summary.load for p in part.of_kind(kind) if has_timeline(p)} for part, _ in pairs))
    busiest = max(shared, key=lambda load: load.value, default=None)
    for number, (part, label) in enumerate(pairs):
        summaries = [point.summary for point in part.of_kind(kind)]
        loads = [summary.load.value for summary in summaries]
        style = line_style(number)
        left.plot(loads, [summary.output_tokens_per_second for summary in summaries], label=label, **style)
        middle.plot(loads, [summary.ttft_ms["p90"] / 1e3 for summary in summaries], label=label, **style)
        for snapshots in (point.timeline for point in part.of_kind(kind) if point.summary.load == busiest):
            right.step([each.time for each in snapshots], [each.num_running for each in snapshots], where="post",
                       color=COLOURS[number], label=label, linewidth=1.5)  # fmt: skip
    draw_prompt_floor(middle, continuous, kind, COLOURS[0], unit_ms=1e3)
    has_limit = _bandwidth_limit(left, continuous, kind)
    for axes in (left, middle):
        load_axis(axes, [static, continuous], kind)
    left.set_ylabel("output tokens a second")
    middle.set_ylabel("time to first token, 90th percentile (s)")
    right.set_ylabel("requests that run")
    right.set_xlabel(f"seconds since the start, {'no load lasted long enough' if busiest is None else busiest.words}")
    for axes in (left, middle, right):
        axes.set_ylim(bottom=0)
    finish(left, "Throughput (dashed: the floor's)" if has_limit else "Throughput (the floor's is out of view)")
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    finish(middle, "Time to first token (dashed: the floor)")
    finish(right, "Batch size over time")
    return figure


def _bandwidth_limit(axes: Axes, part: Series, kind: str) -> bool:
    """Draws what the floor of the same batches would give, where it lies in view."""
    summaries = [point.summary for point in part.of_kind(kind) if point.summary.floor_ms]
    limit = [summary.mean_running / (summary.floor_ms or 1.0) * 1e3 for summary in summaries]
    high = axes.get_ylim()[1]
    if len(summaries) < 2 or limit[1] > 3 * high:
        return False
    axes.plot([summary.load.value for summary in summaries], limit, color=COLOURS[0], **FLOOR_STYLE)
    axes.set_ylim(0, min(3 * high, max(high, *limit)))
    return True


def _is_plain(part: Series) -> bool:
    engine = part.environment.get("engine") == "jaxserve" and part.environment.get("transport") == "in process"
    return engine and not part.setting("speculative_config") and not part.setting("static_batching")


def _degrees(part: Series) -> tuple[int, int]:
    """Of tensor and data parallelism."""
    return int(part.setting("tensor_parallel_size", 1)), int(part.setting("data_parallel_size", 1))


def _group(part: Series) -> tuple[str, ...]:
    """What runs must have in common to be set against each other."""
    known = part.environment
    return (*(str(known.get(name)) for name in ("model", "device", "workload")), str(part.setting("quantization")))
