"""A folder of runs as charts, a summary and one HTML file that needs nothing else."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from jaxserve.bench import charts, charts_choices
from jaxserve.bench.charts import Chart
from jaxserve.bench.failures import find_failures
from jaxserve.bench.parallelism import comparisons
from jaxserve.bench.records import significant
from jaxserve.bench.results import Series, find_series
from jaxserve.bench.verdict import verdict

_CHARTS: tuple[tuple[str, Chart], ...] = (
    ("tradeoff", charts.tradeoff),
    ("latency-by-concurrency", partial(charts.latency, kind="concurrency")),
    ("latency-by-rate", partial(charts.latency, kind="rate")),
    ("parallelism", charts_choices.parallelism),
    ("speculation", charts_choices.speculation),
    ("batching", charts_choices.batching),
    ("utilization", charts.utilization),
)
_TIMELINES = 8  # one for each configuration, as far as the report stays small
# Text stays text: small files, and letters as sharp as the page's own.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "axes.edgecolor": charts.INK,
    "text.color": charts.INK,
}

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #fff; max-width: 68rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.verdict { border-left: 4px solid #2563eb; padding: .6rem 1rem; background: #eff6ff; color: #1f2937; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e5e7eb; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; background: #fff; border-radius: 6px; } svg { width: 100%; height: auto; }
code { font-size: .8rem; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { body { background: #111827; color: #e5e7eb; }
  th, td { border-color: #374151; } }
"""


def build_report(folder: Path, *, title: str, slo_tpot_ms: float | None) -> str:
    """Writes summary.json, charts/*.svg and *.png, and report.html, and returns what they say in words, a sentence a line:
    the verdict, where there is a goal, what tensor and data parallelism give, where there are figures of both, and which
    configurations failed as a whole, and why.

    Raises:
        ValueError: there is no finished run in the folder, or a file is not what was written there.
    """
    series = sorted(find_series(folder), key=_order)
    words = "" if slo_tpot_ms is None else verdict(series, slo_tpot_ms)
    compared = [str(comparison) for comparison in comparisons(series)]
    failed = find_failures(folder)
    drawn = draw_charts(series, folder / "charts")
    data = [{**part.environment, "summaries": [point.summary.to_json() for point in part.points]} for part in series]
    told = {"verdict": words, "parallelism": compared, "failed": [asdict(each) for each in failed], "runs": data}
    (folder / "summary.json").write_text(json.dumps(told, indent=1))
    said = [*([words] if words else []), *compared, *map(str, failed)]
    (folder / "report.html").write_text(_page(title, series, said, drawn), encoding="utf-8")
    return "\n".join(said)


def _order(part: Series) -> tuple[object, ...]:
    """Engines before competitors, few devices before many, plain decoding before what changes it."""
    return (
        part.environment.get("transport") == "http",
        str(part.environment.get("model")),
        int(part.setting("tensor_parallel_size", 1)),
        int(part.setting("data_parallel_size", 1)),
        part.setting("speculative_config") is not None,
        bool(part.setting("static_batching")),
        part.name,
    )


def draw_charts(series: Sequence[Series], folder: Path) -> list[tuple[str, str]]:
    """Writes each chart that there are figures for, as SVG and PNG; returns their names and SVG texts."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with mpl.rc_context(_STYLE):
        figures = [(name, draw(series)) for name, draw in _CHARTS]
        figures += [
            (f"timeline-{number}", charts.timeline(part)) for number, part in enumerate(series[:_TIMELINES], start=1)
        ]
        for name, figure in figures:
            if figure is not None:
                figure.savefig(folder / f"{name}.png", dpi=150)
                svg = _svg(figure, name)
                (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
                drawn.append((name, svg))
    return drawn


def _svg(figure: Figure, name: str) -> str:
    """The same figure gives the same text; ids are the chart's own, since several stand in one page."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text)


def _page(title: str, series: Sequence[Series], said: Sequence[str], drawn: Sequence[tuple[str, str]]) -> str:
    parts = [f"<h1>{html.escape(title)}</h1>"]
    parts += [f'<p class="verdict">{html.escape(sentence)}</p>' for sentence in said]
    parts += [f'<figure id="{name}">{svg}</figure>' for name, svg in drawn]
    parts.append(
        "<h2>Figures</h2><p>Times in milliseconds; the floor is every weight and every live page read once.</p>"
    )
    parts.append(f'<div class="wide">{_table(series)}</div>')
    parts += [
        f"<p>{html.escape(f'{part.name} {point.summary.load.words}: {words}')}.</p>"
        for part in series for point in part.points
        for words in (point.summary.failures, point.summary.drafts) if words
    ]  # fmt: skip
    parts += [f"<p>{html.escape(reason)}.</p>" for part in series[:_TIMELINES] if (reason := charts.no_timeline(part))]
    parts.append("<h2>How it was measured</h2>")
    parts += [_origin(part) for part in series]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{_CSS}</style></head><body>{"".join(parts)}</body></html>\n'
    )


def _table(series: Sequence[Series]) -> str:
    head = ("configuration", "load", "requests", "failed", "TPOT mean", "p90", "p99", "ITL p99", "floor", "MBU", "MFU",
            "TTFT mean", "p90", "tok/s", "tok/s a device", "host gap", "drafts kept")  # fmt: skip
    rows = []
    for part in series:
        for point in part.points:
            summary = point.summary
            mbu, mfu, gap = summary.bandwidth_utilization, summary.compute_utilization, summary.host_gap
            kept = summary.speculation.acceptance if summary.speculation else None
            rows.append((
                part.name, summary.load.label, str(summary.num_requests), str(summary.num_failed),
                f"{summary.tpot_ms['mean']:.2f}", f"{summary.tpot_ms['p90']:.2f}", f"{summary.tpot_ms['p99']:.2f}",
                f"{summary.itl_ms['p99']:.2f}" if summary.itl_ms else "–",
                f"{summary.floor_ms:.2f}" if summary.floor_ms else "–", f"{mbu:.0%}" if mbu else "–",
                f"{mfu:.1%}" if mfu else "–", f"{summary.ttft_ms['mean']:.1f}", f"{summary.ttft_ms['p90']:.1f}",
                f"{summary.output_tokens_per_second:,.0f}",
                f"{summary.output_tokens_per_second / part.num_devices:,.0f}", f"{gap:.1%}" if gap is not None else "–",
                f"{kept:.0%}" if kept is not None else "–",
            ))  # fmt: skip
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    header = "".join(f"<th>{cell}</th>" for cell in head)
    return f"<table><tr>{header}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _origin(part: Series) -> str:
    known = part.environment
    facts = [str(known[key]) for key in ("model", "device", "workload", "transport", "date") if known.get(key)]
    if known.get("jaxserve"):
        whose = "" if known.get("engine") == "jaxserve" else "measured by "
        commit = f" ({known['git_commit']})" if known.get("git_commit") else ""
        facts.append(f"{whose}jaxserve {known['jaxserve']}{commit}")
    if known.get("jax"):
        facts.append(f"jax {known['jax']}")
    ceiling = known.get("ceiling")
    if ceiling:
        facts.append(
            f"{significant(ceiling['bandwidth'] / 1e9)} GB/s and {significant(ceiling['matrix_rate'] / 1e12)} TFLOP/s "
            f"({ceiling['origin']})"
        )
    return (
        f"<p><b>{html.escape(part.name)}</b>: {html.escape(', '.join(facts))}<br>"
        f"<code>{html.escape(str(known.get('command', '')))}</code></p>"
    )
