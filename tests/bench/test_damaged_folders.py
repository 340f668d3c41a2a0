"""Folders that hold something else, or files that were cut off: told in a line with the file, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jaxserve.bench.records import Load
from jaxserve.bench.sweep import plan, run_sweep
from jaxserve.cli.main import build_app
from tests.bench.made_up_runs import write_run

LOADS = (Load("concurrency", 4),)


def failure(*arguments: object) -> str:
    result = CliRunner().invoke(build_app(), ["bench", *map(str, arguments)])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    [line] = result.output.splitlines()
    return line


def first_object(text: str) -> dict[str, Any]:
    return json.JSONDecoder().raw_decode(text)[0]


def changed(**fields: Any) -> Any:
    def change(text: str) -> str:
        return json.dumps({**first_object(text), **fields}) + "\n"

    return change


def without(name: str) -> Any:
    def change(text: str) -> str:
        data = first_object(text)
        del data[name]
        return json.dumps(data) + "\n"

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("environment.json", lambda text: text[:40], " is no whole JSON"),
        ("environment.json", lambda text: "[1]", " holds no JSON object"),
        ("environment.json", lambda text: "[" * 100_000, " is no whole JSON"),
        ("environment.json", changed(settings=[1]), ": settings=[1] must be an object"),
        ("environment.json", changed(num_devices="two"), ": num_devices='two' must"),
        ("concurrency-4.summary.json", lambda text: "", " is no whole JSON"),
        ("concurrency-4.summary.json", lambda text: "{}", ": kind=None must be"),
        ("concurrency-4.summary.json", changed(load_value=0), ": concurrency=0 must be positive"),
        ("concurrency-4.summary.json", changed(tpot_ms={"mean": 1.0}), ": tpot_ms lacks p50, p90, p99"),
        ("concurrency-4.summary.json", without("num_failed"), ": num_failed is missing"),
        ("concurrency-4.jsonl", lambda text: text[:-30], ", line 12 is no whole JSON"),
        ("concurrency-4.jsonl", lambda text: '{"name": "x"}\n', ", line 1 is not what `jaxserve bench` writes"),
        ("concurrency-4.jsonl", lambda text: text[: text.rindex("\n", 0, -1) + 1], " holds 11 requests, not the 12 of"),
        ("concurrency-4.jsonl", lambda text: "", " holds 0 requests, not the 12 of concurrency-4.summary.json: copy it"),
        ("concurrency-4.jsonl", lambda text: None, " is missing: copy it anew, or remove concurrency-4.summary.json"),
        ("concurrency-4.jsonl", changed(submitted="soon"), ", line 1 is not what `jaxserve bench` writes: submitted='soon'"),
        ("concurrency-4.timeline.jsonl", lambda text: "null\n", ", line 1 holds no JSON object"),
        ("concurrency-4.timeline.jsonl", changed(time=None), ": time=None must be a number"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(name: str, change: Any, message: str, tmp_path: Path) -> None:
    file = write_run(tmp_path / "a", "TP1", loads=LOADS) / name
    write_run(tmp_path / "b", "TP1", loads=LOADS)
    text = change(file.read_text())
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    for arguments in (["report", tmp_path / "a"], ["compare", tmp_path / "b", tmp_path / "a"]):
        said = failure(*arguments)
        assert str(file) in said and message in said


def test_bytes_that_are_no_text_are_told_with_their_file(tmp_path: Path) -> None:
    file = write_run(tmp_path, "TP1", loads=LOADS) / "environment.json"
    file.write_bytes(b"\xff\xfe\x00")
    assert f"{file} is no whole JSON" in failure("report", tmp_path)


def test_what_is_no_folder_of_runs_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "TP1", loads=LOADS)
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for arguments in (["report"], ["compare", tmp_path / "a"]):
        assert f"{tmp_path / 'run.json'} is a file" in failure(*arguments, tmp_path / "run.json")
        assert f"{tmp_path / 'none'} does not exist" in failure(*arguments, tmp_path / "none")
        assert f"{tmp_path / 'empty'} holds no finished run" in failure(*arguments, tmp_path / "empty")


def test_fields_of_a_newer_version_do_no_harm(tmp_path: Path) -> None:
    runs = write_run(tmp_path, "TP1", loads=LOADS)
    change = changed(field_of_tomorrow=1)
    for name in ("concurrency-4.summary.json", "environment.json"):
        (runs / name).write_text(change((runs / name).read_text()))
    records = runs / "concurrency-4.jsonl"
    records.write_text("".join(map(change, records.read_text().splitlines())))
    result = CliRunner().invoke(build_app(), ["bench", "compare", str(tmp_path), str(tmp_path)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("text", ["{", "[]", '{"configurations": 3}', '{"configurations": {"TP1": [1]}}'])
def test_a_sweep_names_a_plan_that_is_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    file.write_text(text)
    plain = plan(["m"], tensor_parallel_sizes=[1], data_parallel_sizes=[1], speculative_configs=(),
                 static_batching=False, endpoints=())  # fmt: skip
    with pytest.raises(ValueError, match=str(file)):
        run_sweep(plain, LOADS, [], tmp_path, lambda text: None)
