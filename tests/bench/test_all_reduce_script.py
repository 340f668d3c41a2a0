"""scripts/bench_all_reduce.py: what it measures again, and what it says of groups that do not come to their end."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
VARIANTS = ["--variants", "local,nccl,peers", "--rows", "1,8"]
ALL = [(variant, rows) for variant in ("local", "nccl", "peers") for rows in (1, 8)]
Cases = list[tuple[str, int]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_all_reduce")


@pytest.fixture
def measure(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Cases, Any]]:
    """Runs the script; `ends` says how a group ends after a case. Returns what was begun, and all figures."""

    def run_script(*more: str, us: float = 1.0, ends: dict[tuple[str, int], int | float] | None = None) -> Any:
        begun: Cases = []

        def run(command: list[str], *, timeout: float, **options: object) -> int:
            asked = [case.split(":") for case in command[command.index("--group") + 1].split(",")]
            path = Path(command[command.index("--group-output") + 1])
            lines: list[dict[str, Any]] = [{"compiled_after_s": 1.0}]
            begun.extend((name, int(rows)) for name, rows in asked)
            end = None
            for name, rows in asked:
                lines.append({"variant": name, "rows": int(rows), "us": us})
                end = (ends or {}).get((name, int(rows)))
                if end is not None:
                    break
            path.write_text("".join(json.dumps(line) + "\n" for line in lines) + ("" if end is None else '{"vari'))
            if isinstance(end, float):  # seconds that nothing came for
                os.utime(path, (path.stat().st_mtime - end,) * 2)
                raise subprocess.TimeoutExpired(command, timeout)
            return end or 0

        monkeypatch.setattr(script, "run_in_group", run)
        monkeypatch.setattr(sys, "argv", ["bench_all_reduce.py", *VARIANTS, "--output", str(tmp_path), *more])
        script.main()
        lines = json.loads((tmp_path / "all_reduce.json").read_text())
        return begun, {
            (line["variant"], line["rows"]): line.get("us", line.get("failed")) for line in lines if "rows" in line
        }

    return run_script


def test_figures_are_kept_and_only_what_is_missing_is_measured(measure: Callable[..., tuple[Cases, Any]]) -> None:
    begun, figures = measure("--resume", ends={("local", 8): 2.0})  # in time, but not for the rest
    assert begun == ALL and ("nccl", 1) not in figures
    begun, figures = measure("--resume", us=2.0)
    assert begun == [("nccl", 1), ("nccl", 8)]
    assert figures == {case: 2.0 if case[0] == "nccl" else 1.0 for case in ALL}
    begun, figures = measure("--resume", "--rows", "1", us=3.0)
    assert begun == [] and set(figures) == set(ALL)
    begun, figures = measure(us=4.0)  # asked for by itself it measures anew
    assert begun == ALL and set(figures.values()) == {4.0}


def test_a_group_that_dies_has_failed(measure: Callable[..., tuple[Cases, Any]]) -> None:
    _, figures = measure("--resume", ends={("local", 8): -11})
    failed = "its process ended with -11"
    assert figures == {case: failed if case[0] == "nccl" else 1.0 for case in ALL}
    assert measure("--resume")[0] == []


def test_what_hangs_has_failed_and_the_rest_goes_on(measure: Callable[..., tuple[Cases, Any]]) -> None:
    _, figures = measure("--resume", ends={("local", 8): 60.0})
    assert "hung" in figures["nccl", 1] and ("nccl", 8) not in figures
    assert measure("--resume")[0] == [("nccl", 8)]
