"""What a sweep runs, where it goes on after an interruption, and what it makes of the figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from jaxserve.bench.records import Load, Summary
from jaxserve.bench.results import find_series, write_environment
from jaxserve.bench.sweep import Configuration, Outcome, environment_for, plan, run_sweep
from jaxserve.cli.main import build_app
from jaxserve.engine.draft_stats import SpeculativeStats
from tests.bench.made_up_runs import LOADS, write_run, write_sweep

ONE: dict[str, Any] = {"speculative_configs": (), "static_batching": False, "endpoints": ()}


def names(configurations: list[Configuration]) -> list[str]:
    return [configuration.name for configuration in configurations]


def test_every_combination_is_a_configuration_and_endpoints_compete() -> None:
    found = plan(
        ["llama-3-8b"],
        tensor_parallel_sizes=[1, 2],
        data_parallel_sizes=[1, 2],
        speculative_configs=["{}"],
        static_batching=True,
        endpoints=["http://127.0.0.1:8001/v1"],
    )
    assert names(found) == [
        "TP1", "TP1 speculation", "TP1 x DP2", "TP1 x DP2 speculation", "TP2", "TP2 speculation", "TP2 x DP2",
        "TP2 x DP2 speculation", "TP1 static", "127.0.0.1:8001",
    ]  # fmt: skip
    assert found[3].arguments == (
        "llama-3-8b", "--tensor-parallel-size", "1", "--data-parallel-size", "2", "--speculative-config", "{}",
    )  # fmt: skip
    assert found[6].num_devices == 4
    assert found[8].arguments[-1] == "--static-batching"
    assert found[9].arguments == ("--endpoint", "http://127.0.0.1:8001/v1")


def test_combinations_that_need_more_devices_than_there_are_can_be_left_out() -> None:
    sizes: dict[str, Any] = {"tensor_parallel_sizes": [1, 2, 4], "data_parallel_sizes": [1, 2, 4]}
    found = plan(["a"], **sizes, **ONE, most_devices=4)
    assert names(found) == ["TP1", "TP1 x DP2", "TP1 x DP4", "TP2", "TP2 x DP2", "TP4"]
    with pytest.raises(ValueError, match="--max-devices"):
        plan(["a"], tensor_parallel_sizes=[4], data_parallel_sizes=[1], **ONE, most_devices=2)


def test_what_is_sent_as_text_goes_over_http_and_what_is_for_endpoints_to_them_alone() -> None:
    sizes: dict[str, Any] = {"tensor_parallel_sizes": [1], "data_parallel_sizes": [1]}
    engine, endpoint = plan(
        ["a"], **sizes, **ONE | {"endpoints": ["http://x:1"]}, over_http=True,
        engine_arguments=["--enable-prefix-caching"], endpoint_arguments=["--prompt-form", "chat"],
    )  # fmt: skip
    assert engine.arguments == ("a", "--tensor-parallel-size", "1", "--enable-prefix-caching", "--http")
    assert endpoint.arguments == ("--endpoint", "http://x:1", "--prompt-form", "chat")
    assert engine.over_http and not endpoint.over_http


def test_an_acceptance_that_is_made_up_goes_to_those_that_speculate() -> None:
    sizes: dict[str, Any] = {"tensor_parallel_sizes": [1], "data_parallel_sizes": [1]}
    plain, speculating = plan(["a"], **sizes, **ONE | {"speculative_configs": ["{}"]}, synthetic_acceptance=0.8)
    assert speculating.arguments == (
        *plain.arguments, "--speculative-config", "{}", "--speculative-synthetic-acceptance", "0.8"
    )  # fmt: skip
    with pytest.raises(ValueError, match="--speculative-config"):
        plan(["a"], **sizes, **ONE, synthetic_acceptance=0.8)


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(ValueError, match="give --model or --endpoint"):
        plan([], tensor_parallel_sizes=[1], data_parallel_sizes=[1], **ONE)
    with pytest.raises(ValueError, match="the same name"):
        plan(["a/x", "b/x"], tensor_parallel_sizes=[1], data_parallel_sizes=[1], **ONE)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would have been run; the one for TP2 fails."""
    seen: list[list[str]] = []

    def run(command: list[str], **options: object) -> int:
        seen.append(command)
        return 1 if "2" in command else 0

    monkeypatch.setattr("jaxserve.bench.sweep.run_in_group", run)
    return seen


def test_a_sweep_goes_on_where_it_stopped_and_past_what_fails(tmp_path: Path, commands: list[list[str]]) -> None:
    configurations = plan(["m"], tensor_parallel_sizes=[1, 2, 4], data_parallel_sizes=[1], **ONE)
    write_run(tmp_path, "TP1")
    outcome = run_sweep(configurations, LOADS, ["--concurrency", "1"], tmp_path, lambda text: None)
    assert outcome == Outcome(failed=("TP2",))
    assert [command[command.index("--tensor-parallel-size") + 1] for command in commands] == ["2", "4"]
    assert commands[0][1:5] == ["-m", "jaxserve", "bench", "run"]
    assert commands[1][-4:] == ["--name", "TP4", "--output", str(tmp_path / "runs" / "tp4")]
    # A load more than was measured: TP1 is run again, and its own folder says what is left of it.
    run_sweep(configurations[:1], (*LOADS, Load("rate", 1)), [], tmp_path, lambda text: None)
    assert len(commands) == 3


def test_a_configuration_that_failed_stands_in_the_report_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in one that is drawn anew, until the configuration is tried again."""
    pytest.importorskip("matplotlib")
    codes = {"TP2": 1, "TP4": -9}

    def run(command: list[str], **options: object) -> int:
        name = command[command.index("--name") + 1]
        if codes.get(name) == 1:
            Path(command[command.index("--failure-file") + 1]).write_text("cannot reach <it>")
        return codes.get(name, 0)

    monkeypatch.setattr("jaxserve.bench.sweep.run_in_group", run)
    write_run(tmp_path, "TP1", loads=LOADS[:1])
    study = ["sweep", "--model", "llama-3-8b", "--tensor-parallel-size", "1,2,4", "--concurrency", "1"]
    code, output = command(*study, "--output", str(tmp_path))
    assert code == 1 and "TP2 failed: cannot reach <it>." in output
    for _ in range(2):
        page = (tmp_path / "report.html").read_text()
        assert "TP2 failed: cannot reach &lt;it&gt;." in page and "TP4 failed: ended by SIGKILL." in page
        assert json.loads((tmp_path / "summary.json").read_text())["failed"] == [
            {"name": "TP2", "reason": "cannot reach <it>"}, {"name": "TP4", "reason": "ended by SIGKILL"},
        ]  # fmt: skip
        assert "TP2 failed" in command("report", str(tmp_path))[1]
    codes.clear()
    command(*study, "--output", str(tmp_path))
    assert "failed:" not in (tmp_path / "report.html").read_text()


def test_a_run_that_fails_leaves_its_reason_to_the_sweep_that_started_it(tmp_path: Path) -> None:
    path = tmp_path / "reason"
    code, output = command("run", "--endpoint", "http://127.0.0.1:9", "--failure-file", str(path))
    assert code == 1 and path.read_text().startswith("cannot learn which model http://127.0.0.1:9 serves"), output


def test_a_sweep_of_which_all_fails_names_what_did(tmp_path: Path, commands: list[list[str]]) -> None:
    pytest.importorskip("matplotlib")
    study = ["sweep", "--model", "llama-3-8b", "--tensor-parallel-size", "2", "--concurrency", "1"]
    code, output = command(*study, "--output", str(tmp_path / "study"))
    assert code == 1 and output.splitlines()[-1] == "failed: TP2", output
    # Figures of before that are damaged are told beside it.
    (write_run(tmp_path / "study", "TP1", loads=LOADS[:1]) / "environment.json").write_text("[")
    code, output = command(*study, "--output", str(tmp_path / "study"))
    assert code == 1 and "failed: TP2" in output and "is no whole JSON" in output.splitlines()[-1], output


def test_a_sweep_with_failed_requests_fails_once_it_is_reported(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs it in CI looks at the exit code; static batching is no exception, though no verdict judges it."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("jaxserve.bench.report.draw_charts", lambda series, folder: [])
    study = ["sweep", "--model", "llama-3-8b", "--static-batching", "--concurrency", "1,4"]
    study += ["--output", str(tmp_path)]
    write_run(tmp_path, "TP1", loads=LOADS[:2])
    runs = write_run(tmp_path, "TP1 static", loads=LOADS[:2], settings={"static_batching": True})
    assert command(*study)[0] == 0
    for path in runs.iterdir():
        path.unlink()
    write_run(tmp_path, "TP1 static", loads=LOADS[:2], settings={"static_batching": True}, failures=3)
    (tmp_path / "report.html").unlink()
    code, output = command(*study)
    assert code == 1 and (tmp_path / "report.html").is_file()
    told = output.splitlines()[-1]
    assert told.startswith(
        "requests failed: TP1 static at 1 (3 of 8), 4 (3 of 12): status 500; a load whose .summary.json"
    )
    # What else lies in the folder was not asked for.
    assert command(*(word for word in study if word != "--static-batching"))[0] == 0
    write_run(tmp_path, "TP1 static", loads=LOADS[:1], settings={"static_batching": True})
    code, output = command(*(word.replace("1,4", "1") for word in study))
    assert code == 0 and "TP1 static with 4 requests in flight: 3 of 12" in (tmp_path / "report.html").read_text()
    code, output = command(*study)
    assert code == 1 and "requests failed: TP1 static at 4 (3 of 12): status 500;" in output


def test_a_sweep_ends_in_time_and_goes_on_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first configuration measured, the second one in the middle of it, and the third one not begun."""
    asked: list[float] = []

    def run(command: list[str], *, timeout: float, **options: object) -> int:
        asked.append(timeout)
        name = command[command.index("--name") + 1]
        clock[0] += 60 if name == "TP1" else timeout
        if name != "TP1":
            raise subprocess.TimeoutExpired(command, timeout)
        write_run(tmp_path, name)
        return 0

    clock = [1000.0]
    monkeypatch.setattr("jaxserve.bench.sweep.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("jaxserve.bench.sweep.run_in_group", run)
    configurations = plan(["m"], tensor_parallel_sizes=[1, 2, 4], data_parallel_sizes=[1], **ONE)
    outcome = run_sweep(configurations, LOADS, [], tmp_path, lambda text: None, seconds=100)
    assert outcome == Outcome(unfinished=("TP2", "TP4")) and asked == [100, 40]
    outcome = run_sweep(configurations, LOADS, [], tmp_path, lambda text: None, seconds=70)
    assert outcome == Outcome(unfinished=("TP2", "TP4")) and asked == [100, 40, 70]  # TP1 is done


def test_nothing_of_a_configuration_is_left_when_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has started, an engine in a process of its own say, would keep the device from the next one."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {tmp_path / 'pid'}\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr("jaxserve.bench.sweep.sys.executable", str(program))
    [plain] = plan(["m"], tensor_parallel_sizes=[1], data_parallel_sizes=[1], **ONE)
    outcome = run_sweep([plain], LOADS, [], tmp_path / "study", lambda text: None, seconds=1)
    assert outcome == Outcome(unfinished=("TP1",))
    path = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    deadline = time.monotonic() + 5
    while path.exists() and " Z " not in path.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not path.exists() or " Z " in path.read_text()


def test_a_folder_holds_figures_of_one_kind(tmp_path: Path, commands: list[list[str]]) -> None:
    """Else a second sweep with another workload would tell the first one's figures as its own."""
    [plain] = plan(["m"], tensor_parallel_sizes=[1], data_parallel_sizes=[1], **ONE)
    run_sweep([plain], LOADS, ["--concurrency", "1", "--workload", "fixed:8/8"], tmp_path, lambda text: None)
    write_run(tmp_path, "TP1")
    with pytest.raises(
        ValueError, match=r"TP1 that were measured with m --tensor-parallel-size 1 --workload fixed:8/8"
    ):
        run_sweep([plain], LOADS, ["--workload", "fixed:9/9"], tmp_path, lambda text: None)
    other = replace(plain, arguments=(*plain.arguments, "--speculative-config", "{}"))
    with pytest.raises(ValueError, match="give another --output"):
        run_sweep([other], LOADS, ["--workload", "fixed:8/8"], tmp_path, lambda text: None)
    # Further loads and another timeout are fine, and so is another configuration beside it.
    [wide] = plan(["m"], tensor_parallel_sizes=[4], data_parallel_sizes=[1], **ONE)
    further = ["--concurrency", "1,4", "--workload", "fixed:8/8", "--timeout", "9"]
    run_sweep([plain, wide], LOADS, further, tmp_path, lambda text: None)
    assert set(json.loads((tmp_path / "sweep.json").read_text())["configurations"]) == {"TP1", "TP4"}


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [plain] = plan(["m"], tensor_parallel_sizes=[1], data_parallel_sizes=[1], **ONE)
    refused: list[str] = []

    def run(command: list[str], **options: object) -> int:
        with pytest.raises(RuntimeError) as error:
            run_sweep([plain], LOADS, [], tmp_path, lambda text: None)
        refused.append(str(error.value))
        return 0

    monkeypatch.setattr("jaxserve.bench.sweep.run_in_group", run)
    for _ in range(2):  # the first one's end leaves the folder free
        run_sweep([plain], LOADS, [], tmp_path, lambda text: None)
    assert len(refused) == 2 and f"another sweep writes into {tmp_path}" in refused[0]


def test_a_run_that_was_done_over_http_is_looked_for_there(tmp_path: Path, commands: list[list[str]]) -> None:
    [plain] = plan(["m"], tensor_parallel_sizes=[1], data_parallel_sizes=[1], **ONE, over_http=True)
    runs = write_run(tmp_path, "TP1")  # in process
    run_sweep([plain], LOADS, [], tmp_path, lambda text: None)
    assert len(commands) == 1
    runs.rename(tmp_path / "http")
    runs.mkdir()
    (tmp_path / "http").rename(runs / "http")
    run_sweep([plain], LOADS, [], tmp_path, lambda text: None)
    assert len(commands) == 1


def test_a_cpu_has_as_many_devices_as_a_configuration_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--some_flag")
    monkeypatch.delenv("NPROC", raising=False)
    environment = environment_for(Configuration("TP4", (), 4))
    assert int(environment["NPROC"]) > 4  # with fewer threads than that, devices that wait for each other wait forever
    flags = environment["XLA_FLAGS"]
    assert flags == "--some_flag --xla_force_host_platform_device_count=4"
    assert environment_for(Configuration("TP1", (), 1))["XLA_FLAGS"] == "--some_flag"
    assert "NPROC" not in environment_for(Configuration("TP1", (), 1))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # more than it needs
    environment = environment_for(Configuration("TP4", (), 4))
    assert environment["XLA_FLAGS"] == "--xla_force_host_platform_device_count=8" and int(environment["NPROC"]) > 4
    monkeypatch.setenv("XLA_FLAGS", "--some_flag")
    monkeypatch.setenv("NPROC", "7")
    assert environment_for(Configuration("TP4", (), 4))["NPROC"] == "7"
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert environment_for(Configuration("TP4", (), 4))["XLA_FLAGS"] == "--some_flag"


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep's folder with its report."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("sweep")
    write_sweep(folder)
    code, output = command("report", str(folder), "--slo-tpot-ms", "8", "--title", "A <study>")
    assert code == 0, output
    return folder


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["bench", *arguments])
    return result.exit_code, result.output


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
    assert command("report", str(tmp_path))[0] == 0
    page = (tmp_path / "report.html").read_text()
    assert "2.1 GB/s and 0.0364 TFLOP/s (measured)" in page and "4,050 GB/s and 790 TFLOP/s (measured)" in page


def test_the_report_tells_what_was_drafted_and_kept(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write_run(tmp_path, "TP1", loads=LOADS[:1]) / "concurrency-1.summary.json"
    stats = SpeculativeStats("ngram", 10, (10, 10), (9, 3))
    summary = replace(Summary.from_json(json.loads(path.read_text())), speculation=stats)
    path.write_text(json.dumps(summary.to_json()))
    assert command("report", str(tmp_path))[0] == 0
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
    code, output = command("report", str(tmp_path), "--slo-tpot-ms", "8")
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
        command("report", str(tmp_path))
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


def test_a_sweep_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "TP1")
    for name in ("matplotlib", "jaxserve.bench.report", "jaxserve.bench.charts", "jaxserve.bench.charts_choices"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, output = command("report", str(tmp_path))
    assert code == 1 and "scripts/setup bench" in output
    assert "scripts/setup" not in command("report", str(tmp_path / "none"))[1]  # there is nothing to draw
    code, output = command("sweep", "--model", "llama-3-8b", "--output", str(tmp_path / "new"))
    assert code == 1 and "scripts/setup bench" in output  # before anything is measured
    assert not (tmp_path / "new").exists()


def test_loads_of_one_configuration_may_lie_in_several_folders(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "TP1", loads=LOADS[:3], date="2026-01-02", settings={"num_pages": 7})
    write_run(tmp_path / "b", "TP1", loads=LOADS[2:], date="2026-01-01", settings={"num_pages": 8}, tpot_ms=9.0)
    write_run(tmp_path / "b", "TP2", loads=LOADS[:1], num_devices=2)
    one, two = find_series(tmp_path)
    assert [point.summary.load for point in one.points] == list(LOADS)
    means = [point.summary.tpot_ms["mean"] for point in one.points]
    assert means[2] < 6 < 9 < means[3]  # of the load that is there twice, the later run's
    assert two.name == "TP2" and one.environment["date"] == "2026-01-02"


def test_runs_that_differ_and_are_called_alike_are_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "TP1", loads=LOADS[:1], workload="fixed:100/500")
    write_run(tmp_path / "b", "TP1", loads=LOADS[:1], workload="sharegpt-like")
    assert [part.name for part in find_series(tmp_path)] == ["TP1 (a/runs/tp1)", "TP1 (b/runs/tp1)"]


def test_a_folder_of_one_thing_takes_no_other(tmp_path: Path) -> None:
    known = {"model": "a", "workload": "fixed:8/8", "settings": {"max_num_seqs": 4, "num_pages": 5}, "date": "today"}
    runs = write_run(tmp_path, "TP1", loads=LOADS[:1])
    write_environment(runs, {"name": "TP1", **known, "model": "tiny"})
    other = {"model": "tiny", "workload": "fixed:9/9", "settings": {"max_num_seqs": 8, "num_pages": 6}}
    with pytest.raises(ValueError, match=r"something else \(workload fixed:8/8 -> fixed:9/9, max_num_seqs 4 -> 8\)"):
        write_environment(runs, other)
    assert json.loads((runs / "environment.json").read_text())["workload"] == "fixed:8/8"
    later = {**known, "model": "tiny", "date": "tomorrow", "settings": {"max_num_seqs": 4, "num_pages": 9, "new": 1}}
    write_environment(runs, later)  # what decides no figures may differ


def test_a_folder_tells_of_every_version_that_its_loads_are_of(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "a", "TP1", loads=LOADS[:1], jaxserve="0.1", git_commit="aaa", date="2026-01-01")
    write_run(tmp_path / "a", "TP1", loads=LOADS[1:2], jaxserve="0.1", git_commit="bbb-dirty", date="2026-01-02")
    environment = json.loads((runs / "environment.json").read_text())
    assert (environment["jaxserve"], environment["git_commit"]) == ("0.1", "aaa, bbb-dirty")
    write_run(tmp_path / "b", "TP1", loads=LOADS[2:3], jaxserve="0.2", git_commit="bbb-dirty", date="2026-01-03")
    [together] = find_series(tmp_path)
    assert together.environment["jaxserve"] == "0.1, 0.2" and together.environment["git_commit"] == "aaa, bbb-dirty"


def test_unfinished_loads_are_no_part_of_a_series(tmp_path: Path) -> None:
    runs = write_run(tmp_path, "TP1")
    (runs / "concurrency-64.summary.json").unlink()
    assert [point.summary.load for point in find_series(tmp_path)[0].points] == list(LOADS[:-1])
    with pytest.raises(ValueError, match="does not exist"):
        find_series(tmp_path / "charts")
