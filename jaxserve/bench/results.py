"""A run on the disk: one folder for each configuration, one set of files for each load, so that it can be resumed.

environment.json             what was measured, with what, on what
concurrency-8.jsonl          a line for each measured request
concurrency-8.timeline.jsonl what the engine did meanwhile, where that is known
concurrency-8.summary.json   the figures; written last: where it is, the load is done
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxserve.bench.records import Load, RequestRecord, RunResult, Snapshot, Summary

_ENVIRONMENT = "environment.json"


@dataclass(frozen=True)
class Point:
    """One load's figures and what they were made of."""

    summary: Summary
    records: list[RequestRecord]
    timeline: list[Snapshot]


@dataclass(frozen=True)
class Series:
    """One configuration, with the loads that it was measured at, in rising order.

    Attributes:
        environment: what was measured; of the keys, charts read "name", "engine", "num_devices", "settings", "model",
            "device".
    """

    folder: str
    environment: dict[str, Any]
    points: list[Point]

    @property
    def name(self) -> str:
        return str(self.environment.get("name") or self.folder)

    @property
    def num_devices(self) -> int:
        return int(self.environment.get("num_devices") or 1)

    def setting(self, name: str, default: Any = None) -> Any:
        """An engine setting, such as "tensor_parallel_size"."""
        value = self.environment.get("settings", {}).get(name)
        return default if value is None else value

    def of_kind(self, kind: str) -> list[Point]:
        return [point for point in self.points if point.summary.load.kind == kind]


def is_done(folder: Path, load: Load) -> bool:
    return (folder / f"{load.file_name}.summary.json").is_file()


def write_environment(folder: Path, environment: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / _ENVIRONMENT, json.dumps(environment, indent=1, default=str))


def write_load(folder: Path, summary: Summary, runs: list[RunResult]) -> None:
    """Writes one load's files."""
    name = summary.load.file_name
    _write(folder / f"{name}.jsonl", _lines(record.to_json() for run in runs for record in run.records))
    timeline = [asdict(snapshot) for snapshot in runs[-1].timeline] if runs else []
    if timeline:
        _write(folder / f"{name}.timeline.jsonl", _lines(timeline))
    _write(folder / f"{name}.summary.json", json.dumps(summary.to_json(), indent=1))


def write_one_file(
    path: Path, environment: dict[str, Any], summaries: Sequence[Summary], results: dict[str, list[RunResult]]
) -> None:
    """Everything as one JSON file: what was measured, the figures, each request."""
    requests = {
        load: [record.to_json() for result in runs for record in result.records] for load, runs in results.items()
    }
    data = {**environment, "summaries": [summary.to_json() for summary in summaries], "requests": requests}
    _write(path, json.dumps(data, indent=1, default=str))


def read_series(folder: Path) -> Series:
    """Reads what `write_environment` and `write_load` wrote; loads that are not done are left out.

    Raises:
        ValueError: there is no run in the folder.
    """
    try:
        environment = json.loads((folder / _ENVIRONMENT).read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no run of `jaxserve bench` ({_ENVIRONMENT} is missing)") from None
    points = []
    for path in folder.glob("*.summary.json"):
        name = path.name.removesuffix(".summary.json")
        records = [RequestRecord.from_json(line) for line in _read_lines(folder / f"{name}.jsonl")]
        timeline_path = folder / f"{name}.timeline.jsonl"
        timeline = [Snapshot(**line) for line in _read_lines(timeline_path)] if timeline_path.is_file() else []
        points.append(Point(Summary.from_json(json.loads(path.read_text())), records, timeline))
    points.sort(key=lambda point: (point.summary.load.kind, point.summary.load.value))
    return Series(folder.name, environment, points)


def find_series(folder: Path) -> list[Series]:
    """Every run below a folder, or the one that it is itself.

    Raises:
        ValueError: there is none.
    """
    paths = sorted(path.parent for path in folder.rglob(_ENVIRONMENT))
    series = [read_series(path) for path in paths]
    found = [part for part in series if part.points]
    if not found:
        raise ValueError(f"{folder} holds no finished run of `jaxserve bench`")
    return found


def _lines(entries: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write(path: Path, text: str) -> None:
    """All of it or nothing, whatever interrupts."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
