"""A run on the disk: one folder for each configuration, one set of files for each load, so that it can be resumed.

environment.json             what was measured, with what, on what
concurrency-8.jsonl          a line for each measured request
concurrency-8.timeline.jsonl what the engine did meanwhile, where that is known
concurrency-8.summary.json   the figures; written last: where it is, the load is done
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxserve.bench.json_files import read_json, read_json_lines
from jaxserve.bench.records import Load, RequestRecord, RunResult, Snapshot, Summary, first_failure
from jaxserve.json_fields import from_json
from jaxserve.wording import plural

_ENVIRONMENT = "environment.json"
# Runs that agree in these are parts of one run.
_IDENTITY = (
    "name",
    "engine",
    "transport",
    "client",
    "model",
    "device",
    "num_devices",
    "workload",
    "settings",
    "traffic",
)
_VERSIONS = ("jaxserve", "git_commit")  # loads of several may lie in one folder: all are told
_BY_CHANCE = ("num_pages", "master_addr", "master_port")  # settings that the machine or its free memory decides


@dataclass(frozen=True)
class Point:
    """One load's figures and what they were made of."""

    summary: Summary
    records: list[RequestRecord]
    timeline: list[Snapshot]


@dataclass(frozen=True)
class _Environment:
    """What is read of a run's environment here."""

    name: str | None = None
    num_devices: int | None = None
    settings: dict[str, Any] | None = None
    traffic: dict[str, Any] | None = None


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
        value = (self.environment.get("settings") or {}).get(name)
        return default if value is None else value

    def of_kind(self, kind: str) -> list[Point]:
        return [point for point in self.points if point.summary.load.kind == kind]


def make_folder(output: Path | None, *, model: str | None = None) -> Path | None:
    """The folder to write to, or None where one file or nothing is to be written.

    It is made here, and a file's own folder too: what stands in the way is told before anything is measured.

    Args:
        model: that is measured, as the user calls it; None: an endpoint.

    Raises:
        OSError: it cannot be.
        ValueError: the file exists, and was not written by `write_one_file`.
    """
    if output is None:
        return None
    if output.suffix == ".json":
        if output.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(output))
        output.parent.mkdir(parents=True, exist_ok=True)
        _check_replaceable(output, model)
        return None
    output.mkdir(parents=True, exist_ok=True)
    return output


def _check_replaceable(file: Path, model: str | None) -> None:
    """Raises:
    ValueError: there is a file that is not of `write_one_file`.
    """
    if not file.exists():
        return
    if model is not None and (path := Path(model).expanduser()).exists() and path.samefile(file):
        raise ValueError(f"--output {file} is the model's own file: give another name")
    try:
        known = read_json(file)
    except ValueError:
        known = {}
    if not (isinstance(known.get("summaries"), list) and isinstance(known.get("requests"), dict)):
        raise ValueError(
            f"--output {file} exists and is no file that `jaxserve bench` wrote: give another name, or remove it"
        )


@contextmanager
def held_alone(folder: Path) -> Iterator[None]:
    """Holds a folder, until this process ends at the latest.

    Raises:
        RuntimeError: another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"another sweep writes into {folder}: wait until it has ended, or give another --output"
            ) from None
        yield
    finally:
        os.close(descriptor)


def is_done(folder: Path, load: Load) -> bool:
    return _summary_path(folder, load).is_file()


def _summary_path(folder: Path, load: Load) -> Path:
    return folder / f"{load.file_name}.summary.json"


def read_summary(folder: Path, load: Load) -> Summary | None:
    """A load's figures; None where it is not done.

    Raises:
        ValueError: the file is not what was written there.
    """
    return read_json(_summary_path(folder, load), Summary.from_json) if is_done(folder, load) else None


def write_environment(folder: Path, environment: dict[str, Any]) -> None:
    """Writes what is measured in a folder.

    Raises:
        ValueError: the folder holds loads of something else that was measured before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(environment, indent=1, default=str)
    if any(folder.glob("*.summary.json")) and (folder / _ENVIRONMENT).is_file():
        before = read_json(folder / _ENVIRONMENT, _checked_environment)
        different = differing(before, json.loads(text))
        if different:
            raise ValueError(
                f"{folder} holds figures of something else ({', '.join(different)}): give another --output, or remove it"
            )
        text = json.dumps({**environment, **_versions_of(before, environment)}, indent=1, default=str)
    _write(folder / _ENVIRONMENT, text)


def differing(before: dict[str, Any], after: dict[str, Any], *, further: Sequence[str] = ()) -> list[str]:
    """What differs between the environments of two runs, of the things that figures depend on, as far as both tell it.

    Args:
        further: fields beside those that make them parts of one run.
    """
    found = []
    for name in (*_IDENTITY, *further):
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            keys = [key for key in old if key in new and key not in _BY_CHANCE]
            found += [f"{key} {old[key]} -> {new[key]}" for key in keys if old[key] != new[key]]
        elif old is not None and new is not None and old != new:
            found.append(f"{name} {old} -> {new}")
    return found


def write_load(folder: Path, summary: Summary, runs: list[RunResult]) -> None:
    """Writes one load's files."""
    name = summary.load.file_name
    _write(folder / f"{name}.jsonl", _lines(record.to_json() for run in runs for record in run.records))
    timeline = [asdict(snapshot) for snapshot in runs[-1].timeline] if runs else []
    if timeline:
        _write(folder / f"{name}.timeline.jsonl", _lines(timeline))
    _write(_summary_path(folder, summary.load), json.dumps(summary.to_json(), indent=1))


def write_one_file(
    path: Path,
    environment: dict[str, Any],
    summaries: Sequence[Summary],
    results: dict[str, list[RunResult]],
    *,
    http: dict[str, Any] | None = None,
) -> None:
    """Everything as one JSON file: what was measured, the figures, each request.

    Args:
        http: `one_object` of the same measured over HTTP, where it was; it lies under "http", as a folder's does.
    """
    data = one_object(environment, summaries, results)
    _write(path, json.dumps(data if http is None else {**data, "http": http}, indent=1, default=str))


def one_object(
    environment: dict[str, Any], summaries: Sequence[Summary], results: dict[str, list[RunResult]]
) -> dict[str, Any]:
    """One run for a file that holds it all."""
    requests = {
        load: [record.to_json() for result in runs for record in result.records] for load, runs in results.items()
    }
    return {**environment, "summaries": [summary.to_json() for summary in summaries], "requests": requests}


def read_series(folder: Path) -> Series:
    """Reads what `write_environment` and `write_load` wrote; loads that are not done are left out.

    Raises:
        ValueError: there is no run in the folder, or a file is not what was written there.
    """
    try:
        environment = read_json(folder / _ENVIRONMENT, _checked_environment)
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no run of `jaxserve bench` ({_ENVIRONMENT} is missing)") from None
    points = []
    for path in folder.glob("*.summary.json"):
        name = path.name.removesuffix(".summary.json")
        summary = read_json(path, Summary.from_json)
        records = _read_records(folder / f"{name}.jsonl", path, summary)
        timeline_path = folder / f"{name}.timeline.jsonl"
        timeline = read_json_lines(timeline_path, Snapshot.from_json) if timeline_path.is_file() else []
        points.append(Point(replace(summary, first_failure=first_failure(records)), records, timeline))
    return Series(folder.name, environment, sorted(points, key=_by_load))


def _read_records(path: Path, summary_path: Path, summary: Summary) -> list[RequestRecord]:
    """Raises:
    ValueError: they are not there, or not those of all requests that the summary tells of.
    """
    remedy = (
        f"copy it anew, or remove {summary_path.name} and run the same command again, which measures that load anew"
    )
    try:
        records = read_json_lines(path, RequestRecord.from_json)
    except FileNotFoundError:
        raise ValueError(f"{path}, with the requests of {summary_path.name}, is missing: {remedy}") from None
    wanted = summary.num_requests + summary.num_failed
    if len(records) != wanted:
        found = f"{len(records)} {plural('request', len(records))}"
        raise ValueError(f"{path} holds {found}, not the {wanted} of {summary_path.name}: {remedy}")
    return records


def _checked_environment(data: dict[str, Any]) -> dict[str, Any]:
    """As it is, if what is read of it is of the right kind.

    Raises:
        ValueError: it is not.
    """
    from_json(_Environment, data, ignore_unknown=True)
    return data


def find_series(folder: Path) -> list[Series]:
    """Every run below a folder, or the one that it is itself.

    Loads of one configuration that were measured into several folders are put together (of a load that is there twice, the
    one of the later run counts). Runs that differ and have the same name get their folder's beside it.

    Raises:
        ValueError: there is none, or a file is not what was written there.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}: give a folder that `jaxserve bench --output FOLDER` wrote")
    found: list[Series] = []
    for path in sorted(path.parent for path in folder.rglob(_ENVIRONMENT)):
        part = read_series(path)
        if not part.points:
            continue
        number = next((n for n, other in enumerate(found) if not differing(part.environment, other.environment)), None)
        if number is None:
            found.append(replace(part, folder=path.relative_to(folder).as_posix()))
        else:
            found[number] = _together(found[number], part)
    if not found:
        raise ValueError(f"{folder} holds no finished run of `jaxserve bench`")
    names = [part.name for part in found]
    return [
        part if names.count(part.name) == 1
        else replace(part, environment={**part.environment, "name": f"{part.name} ({part.folder})"})
        for part in found
    ]  # fmt: skip


def _together(one: Series, other: Series) -> Series:
    first, second = sorted((one, other), key=lambda part: str(part.environment.get("date", "")))
    points = {point.summary.load: point for part in (first, second) for point in part.points}
    commands = dict.fromkeys(
        str(part.environment["command"]) for part in (first, second) if "command" in part.environment
    )
    versions = _versions_of(first.environment, second.environment)
    environment = {**second.environment, **versions, "command": "\n".join(commands)}
    return Series(one.folder, environment, sorted(points.values(), key=_by_load))


def _versions_of(*environments: dict[str, Any]) -> dict[str, str]:
    """What all of them were measured with."""
    told = {key: [part for each in environments for part in str(each.get(key, "")).split(", ")] for key in _VERSIONS}
    return {key: ", ".join(filter(None, dict.fromkeys(parts))) for key, parts in told.items() if any(parts)}


def _by_load(point: Point) -> tuple[str, float]:
    return point.summary.load.kind, point.summary.load.value


def _lines(entries: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def _write(path: Path, text: str) -> None:
    """All of it or nothing, whatever interrupts."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
