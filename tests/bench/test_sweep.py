"""What a sweep runs, where it goes on after an interruption, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.records import Load
from jaxserve.bench.sweep import Configuration, Outcome, environment_for, plan, run_sweep
from tests.bench.bench_command import bench
from tests.bench.made_up_runs import LOADS, write_run

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
    code, output = bench(*study, "--output", str(tmp_path))
    assert code == 1 and "TP2 failed: cannot reach <it>." in output
    for _ in range(2):
        page = (tmp_path / "report.html").read_text()
        assert "TP2 failed: cannot reach &lt;it&gt;." in page and "TP4 failed: ended by SIGKILL." in page
        assert json.loads((tmp_path / "summary.json").read_text())["failed"] == [
            {"name": "TP2", "reason": "cannot reach <it>"}, {"name": "TP4", "reason": "ended by SIGKILL"},
        ]  # fmt: skip
        assert "TP2 failed" in bench("report", str(tmp_path))[1]
    codes.clear()
    bench(*study, "--output", str(tmp_path))
    assert "failed:" not in (tmp_path / "report.html").read_text()


def test_a_run_that_fails_leaves_its_reason_to_the_sweep_that_started_it(tmp_path: Path) -> None:
    path = tmp_path / "reason"
    code, output = bench("run", "--endpoint", "http://127.0.0.1:9", "--failure-file", str(path))
    assert code == 1 and path.read_text().startswith("cannot learn which model http://127.0.0.1:9 serves"), output


def test_a_sweep_of_which_all_fails_names_what_did(tmp_path: Path, commands: list[list[str]]) -> None:
    pytest.importorskip("matplotlib")
    study = ["sweep", "--model", "llama-3-8b", "--tensor-parallel-size", "2", "--concurrency", "1"]
    code, output = bench(*study, "--output", str(tmp_path / "study"))
    assert code == 1 and output.splitlines()[-1] == "failed: TP2", output
    # Figures of before that are damaged are told beside it.
    (write_run(tmp_path / "study", "TP1", loads=LOADS[:1]) / "environment.json").write_text("[")
    code, output = bench(*study, "--output", str(tmp_path / "study"))
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
    assert bench(*study)[0] == 0
    for path in runs.iterdir():
        path.unlink()
    write_run(tmp_path, "TP1 static", loads=LOADS[:2], settings={"static_batching": True}, failures=3)
    (tmp_path / "report.html").unlink()
    code, output = bench(*study)
    assert code == 1 and (tmp_path / "report.html").is_file()
    told = output.splitlines()[-1]
    assert told.startswith(
        "requests failed: TP1 static at 1 (3 of 8), 4 (3 of 12): status 500; a load whose .summary.json"
    )
    # What else lies in the folder was not asked for.
    assert bench(*(word for word in study if word != "--static-batching"))[0] == 0
    write_run(tmp_path, "TP1 static", loads=LOADS[:1], settings={"static_batching": True})
    code, output = bench(*(word.replace("1,4", "1") for word in study))
    assert code == 0 and "TP1 static with 4 requests in flight: 3 of 12" in (tmp_path / "report.html").read_text()
    code, output = bench(*study)
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


def test_a_sweep_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "TP1")
    for name in ("matplotlib", "jaxserve.bench.report", "jaxserve.bench.charts", "jaxserve.bench.charts_choices"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, output = bench("report", str(tmp_path))
    assert code == 1 and "scripts/setup bench" in output
    assert "scripts/setup" not in bench("report", str(tmp_path / "none"))[1]  # there is nothing to draw
    code, output = bench("sweep", "--model", "llama-3-8b", "--output", str(tmp_path / "new"))
    assert code == 1 and "scripts/setup bench" in output  # before anything is measured
    assert not (tmp_path / "new").exists()
