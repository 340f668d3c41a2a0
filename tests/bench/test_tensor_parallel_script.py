"""scripts/bench_tensor_parallel.py: what it has measured, what it says of that, and that it goes on where it stopped."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxserve.bench.records import Load
from tests.bench.made_up_runs import write_run

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LOADS = (Load("concurrency", 1), Load("concurrency", 64))
ASKED = ["llama-3-70b", "--devices", "8", "--quantization", "fp8", "--draft", "llama-3-8b", "--concurrency", "1,64",
         "--goals", "5.5,10", "--sum-rows", "1,64"]  # fmt: skip
NAMES = ["TP8", "TP8 speculation", "TP4", "TP4 speculation", "TP4 x DP2", "TP4 x DP2 speculation"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr("jaxserve.bench.report.draw_charts", lambda series, folder: [])  # takes most of a minute
    return importlib.import_module("bench_tensor_parallel")


@pytest.fixture
def commands(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Commands that would have been run; each leaves what it would have measured."""
    seen: list[list[str]] = []

    def run(command: list[str], **options: Any) -> int:
        seen.append(command)
        if "--name" not in command:
            folder = Path(command[command.index("--output") + 1])
            folder.mkdir()
            lines = [
                {"variant": variant, "rows": rows, "us": 20.0 + rows / 10}
                for variant in command[command.index("--variants") + 1].split(",")
                for rows in (1, 64)
            ]
            (folder / "all_reduce.json").write_text(json.dumps(lines))
            return 0
        name = command[command.index("--name") + 1]
        tensor = int(command[command.index("--tensor-parallel-size") + 1])
        data = int(command[command.index("--data-parallel-size") + 1]) if "--data-parallel-size" in command else 1
        settings: dict[str, Any] = {"tensor_parallel_size": tensor, "data_parallel_size": data}
        if "--speculative-config" in command:
            settings["speculative_config"] = command[command.index("--speculative-config") + 1]
        write_run(tmp_path, name, tpot_ms=40 / tensor, growth_ms=0.1 / data, loads=LOADS, noise=0.0,
                  num_devices=tensor * data, settings=settings)  # fmt: skip
        return 0

    monkeypatch.setattr("jaxserve.bench.sweep.run_in_group", run)
    monkeypatch.setattr(script, "run_in_group", run)
    return seen


def test_one_command_measures_everything_and_says_it_last(
    script: ModuleType, commands: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*ASKED, "--output", str(tmp_path), "--num-requests", "9"]
    assert script.main(arguments) == 0
    assert [command[command.index("--name") + 1] for command in commands[:-1]] == NAMES
    for command in commands[:-1]:
        said = dict(zip(command[6::2], command[7::2], strict=True))
        assert (command[4], said["--quantization"], said["--num-requests"]) == ("run", "fp8", "9")
        assert said["--concurrency"] == "1,64"
        drafts = json.loads(said.get("--speculative-config", "{}"))
        if "speculation" in said["--name"]:
            assert said["--speculative-synthetic-acceptance"] == "0.8"
            assert drafts == {
                "method": "draft_model", "model": "llama-3-8b", "num_speculative_tokens": 3, "quantization": "fp8"
            }  # fmt: skip
        else:
            assert not drafts
    sums = commands[-1]
    assert Path(sums[1]).name == "bench_all_reduce.py" and "--resume" in sums
    assert (sums[sums.index("--devices") + 1], sums[sums.index("--size") + 1]) == ("8", "8192")
    output = capsys.readouterr().out
    assert output == (tmp_path / "results.txt").read_text()
    rows = {line[:22].strip(): line[22:].split() for line in output.splitlines()}
    assert rows["goal of TP8"] == ["5.50", "10.00"] and rows["TP8"] == ["5.10", "11.40"]
    assert rows["TP4 x DP2"] == ["10.05", "13.20"]
    assert "TP8 misses its goal at 64 (11.40 of 10)\n" in output
    assert "TP8 gives more output tokens a second than TP4 x DP2 (measured)" in output
    assert "than TP4 x DP2 speculation (measured)" in output
    assert "sums over 8 devices: us a call" in output and "peers_float32" in output
    assert "not done" not in output and (tmp_path / "report.html").is_file()
    assert script.main(arguments) == 0
    assert len(commands) == len(NAMES) + 1  # nothing is done again


def test_without_time_it_says_what_is_missing(
    script: ModuleType, commands: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*ASKED, "--output", str(tmp_path)]
    assert script.main([*arguments, "--seconds", "1"]) == 1
    assert commands == []
    assert capsys.readouterr().out.strip() == (
        f"not done yet: {', '.join(NAMES)}, sums over devices; the same command goes on from here"
    )
    assert script.main(arguments) == 0


def test_sums_that_failed_are_told_and_are_not_missing(
    script: ModuleType, commands: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*ASKED, "--output", str(tmp_path)]
    script.main(arguments)
    path = tmp_path / "all-reduce" / "all_reduce.json"
    *lines, last = json.loads(path.read_text())
    failed = {"variant": last["variant"], "rows": last["rows"], "failed": "its process ended with -11"}
    path.write_text(json.dumps([*lines, failed]))
    capsys.readouterr()
    assert script.main(arguments) == 0 and len(commands) == len(NAMES) + 1
    assert "sums that failed: peers_float32 of 64 rows (its process ended with -11)" in capsys.readouterr().out


def test_requests_that_failed_fail_it_once_all_is_told(
    script: ModuleType, commands: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*ASKED, "--output", str(tmp_path)]
    assert script.main(arguments) == 0
    settings = {"tensor_parallel_size": 8}
    write_run(tmp_path, "TP8", loads=LOADS[1:], num_devices=8, settings=settings, failures=3)
    capsys.readouterr()
    assert script.main(arguments) == 1
    assert "requests failed: TP8 at 64 (3 of 192): status 500\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--devices", "3"], "--devices 3 must be even"),
        (["--goals", "5"], "--goals 5 must be as many as --concurrency"),
    ],
)
def test_what_does_not_fit_is_told(
    script: ModuleType, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main([*ASKED, *more])
    assert message in capsys.readouterr().err
