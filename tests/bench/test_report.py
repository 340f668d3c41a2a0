"""What a report of a folder of runs says and shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxserve.bench.records import Summary
from jaxserve.engine.draft_stats import SpeculativeStats
from tests.bench.bench_command import bench
from tests.bench.made_up_runs import LOADS, write_run, write_sweep


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep's folder with its report."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("sweep")
    write_sweep(folder)
    code, output = bench("report", str(folder), "--slo-tpot-ms", "8", "--title", "A <study>")
    assert code == 0, output
    return folder


def test_the_report_is_one_file_that_needs_nothing_else(reported: Path) -> None:
    page = (reported / "report.html").read_text()
    assert "A &lt;study&gt;" in page and "the best configuration is TP2 with 64 requests" in page
    assert not re.search(r'(src|href)="(?!#)', page.replace("http://www.w3.org", "")) and "@import" not in page
    drawn = {path.stem for path in (reported / "charts").glob("*.svg")}
    assert drawn >= {
        "tradeoff", "latency-by-concurrency", "latency-by-rate", "parallelism", "speculation", "batching",
        "utilization", "timeline-1",
    }  # fmt: skip
    assert {path.stem for path in (reported / "charts").glob("*.png")} == drawn
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "two charts share an id: one would be drawn with the other's shapes"
    data = json.loads((reported / "summary.json").read_text())
    assert "made up, in process, jaxserve 0.1 (0123abc)" in page and "http, measured by jaxserve 0.1" in page
    assert len(data["runs"]) == 6 and data["verdict"].startswith("Under a goal of 8 ms")


def test_what_a_slow_machine_reaches_is_told_in_digits_that_say_something(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, bandwidth, rate in (("slow", 2.1e9, 0.0364e12), ("fast", 4.05e12, 790e12)):
        ceiling = {"bandwidth": bandwidth, "matrix_rate": rate, "origin": "measured"}
        write_run(tmp_path, name, loads=LOADS[:1], ceiling=ceiling)
    assert bench("report", str(tmp_path))[0] == 0
    page = (tmp_path / "report.html").read_text()
    assert "2.1 GB/s and 0.0364 TFLOP/s (measured)" in page and "4,050 GB/s and 790 TFLOP/s (measured)" in page


def test_the_report_tells_what_was_drafted_and_kept(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write_run(tmp_path, "TP1", loads=LOADS[:1]) / "concurrency-1.summary.json"
    stats = SpeculativeStats("ngram", 10, (10, 10), (9, 3))
    summary = replace(Summary.from_json(json.loads(path.read_text())), speculation=stats)
    path.write_text(json.dumps(summary.to_json()))
    assert bench("report", str(tmp_path))[0] == 0
    page = (tmp_path / "report.html").read_text()
    assert "<th>drafts kept</th>" in page and "<td>60%</td>" in page
    assert "TP1 with 1 request in flight: drafts (ngram): 12 of 20 tokens kept (60%)" in page
    assert "kept by position: 1: 90% of 10, 2: 30% of 10" in page
    [run] = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert run["summaries"][0]["speculation"]["accepted_per_position"] == [9, 3]
    assert run["summaries"][0]["draft_acceptance"] == 0.6


def test_the_report_tells_why_requests_failed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_run(tmp_path, "TP1", loads=LOADS[:1], failures=3)
    code, output = bench("report", str(tmp_path), "--slo-tpot-ms", "8")
    assert code == 0 and "Left out, since requests failed: TP1 at 1 (3 of 8): status 500." in output
    page = (tmp_path / "report.html").read_text()
    assert "TP1 with 1 request in flight: 3 of 8 requests failed: status 500." in page


def test_configurations_stand_in_order_whatever_their_folders_are_called(reported: Path) -> None:
    data = json.loads((reported / "summary.json").read_text())
    names = [run["name"] for run in data["runs"]]
    assert names == ["TP1", "TP1 static", "TP1 speculation", "TP2", "TP4", "127.0.0.1:8001"]


def test_the_same_figures_give_the_same_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from jaxserve.bench import report

    monkeypatch.setattr(report, "_CHARTS", [chart for chart in report._CHARTS if chart[0] == "tradeoff"])
    monkeypatch.setattr(report, "_TIMELINES", 0)
    write_run(tmp_path, "TP1")
    texts = []
    for _ in range(2):
        bench("report", str(tmp_path))
        texts.append((tmp_path / "charts" / "tradeoff.svg").read_text())
    assert texts[0] == texts[1]


def svg_texts(path: Path) -> list[str]:
    return ["".join(node.itertext()).strip() for node in ElementTree.parse(path).iter() if node.tag.endswith("}text")]


def test_axes_have_their_units_and_points_their_loads(reported: Path) -> None:
    texts = svg_texts(reported / "charts" / "tradeoff.svg")
    assert "time per output token, mean (ms)" in texts and "output tokens a second for each device" in texts
    assert texts.count("64") >= 5  # each curve's last point
    texts = svg_texts(reported / "charts" / "latency-by-rate.svg")
    assert "requests a second" in texts and "time to first token (ms)" in texts
    assert any(
        text.startswith("data parallelism is faster from ")
        for text in svg_texts(reported / "charts" / "parallelism.svg")
    )


@pytest.mark.parametrize(
    "chart", ["tradeoff", "latency-by-concurrency", "latency-by-rate", "utilization", "speculation"]
)
def test_names_stand_outside_the_panels(reported: Path, chart: str) -> None:
    root = ElementTree.parse(reported / "charts" / f"{chart}.svg").getroot()
    legends = {
        child.get("id", "") for child in root.iter() if re.fullmatch(rf"{chart}-legend_\d+", child.get("id", ""))
    }
    inside = {
        child.get("id", "")
        for axes in root.iter() if re.fullmatch(rf"{chart}-axes_\d+", axes.get("id", ""))
        for child in axes.iter()
    }  # fmt: skip
    assert len(legends) == 1 and not legends & inside


def test_a_timeline_tells_how_long_steps_took_beside_their_floor(reported: Path) -> None:
    texts = " ".join(svg_texts(reported / "charts" / "timeline-1.svg"))
    assert "ms a step" in texts and "(dashed: floor)" in texts and "KV pages" in texts and "output tokens" in texts
    assert "with 64 requests in flight" in texts
