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
from jaxserve.bench.parallelism import (
    Comparison,
    Curve,
    comparisons,
    crossing,
    degrees_of,
    group_of,
    is_comparable,
    setup_of,
    tpot_by_load,
)
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
        tensor = tpot_by_load(wide, 1)
        axes.plot(*tensor, label=f"tensor parallel on {degree}", **line_style(0))
        loads: list[float] = []
        for number, comparison in enumerate(of_one, start=1):
            data = tpot_by_load(comparison.narrow, comparison.times)
            own = degrees_of(comparison.narrow)[0]
            each = "" if own == 1 else f", {own} each"
            axes.plot(*data, label=f"data parallel on {degree}{each} ({comparison.origin})", **line_style(number))
            loads += data[0].tolist()
            if number == 1:
                _mark_crossing(axes, tensor, data)
        draw_step_floor(axes, wide, "concurrency", COLOURS[0])
        load_axis(axes, [wide], "concurrency", loads)
        axes.set_xlabel("requests in flight, over all devices")
        axes.set_ylabel("time per output token, mean (ms)")
        axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
        name = wide.name if names.count(wide.name) == 1 else f"{wide.environment.get('model')}, {wide.name}"
        of_what = "" if are_alike else f"{name}:\n"  # else the title is too long for half a figure
        has_floor = any(point.summary.floor_ms for point in wide.of_kind("concurrency"))
        floor = f" (dashed: floor of TP{degree})" if has_floor else ""
        finish(axes, f"{of_what}Tensor or data parallelism on {degree} devices{floor}")
    return figure


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
    for plain, part in pairs:
        for run in (plain, part):
            if run.name not in drawn:  # two ways of speculating are set against the same plain decoding
                loads, tpot = tpot_by_load(run, 1)
                left.plot(loads, tpot, label=run.name, **styles[run.name])
                draw_step_floor(left, run, "concurrency", styles[run.name]["color"])
                drawn.add(run.name)
        before = dict(zip(*(values.tolist() for values in tpot_by_load(plain, 1)), strict=True))
        shared = [
            (load, before[load] / tpot) for load, tpot in zip(*tpot_by_load(part, 1), strict=True) if load in before
        ]
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
            if _is_plain(part) and group_of(part) == group_of(static) and degrees_of(part) == degrees_of(static)
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
    return is_comparable(part) and not part.setting("speculative_config")


def _goes_with(plain: Series, speculating: Series) -> bool:
    """Whether they differ in speculation alone."""
    is_alike = setup_of(plain) == setup_of(speculating) and degrees_of(plain) == degrees_of(speculating)
    return _is_plain(plain) and is_alike
