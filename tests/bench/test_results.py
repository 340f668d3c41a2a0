"""Folders of runs: what may be written into one, and which of them are read as one configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.bench.results import find_series, write_environment
from tests.bench.made_up_runs import LOADS, write_run


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
