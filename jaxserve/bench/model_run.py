"""All that is measured of one engine in its own process, and the record of what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve.bench.engine_run import ceiling_of, engine_environment, measure_engine
from jaxserve.bench.floor import Ceiling
from jaxserve.bench.records import RunResult, Summary
from jaxserve.bench.results import write_environment, write_one_file
from jaxserve.bench.run import BenchOptions
from jaxserve.engine.client import EngineClient
from jaxserve.engine.replicas import ReplicatedEngine


@dataclass(frozen=True)
class ModelRun:
    """What is measured, and how it is told. Can be pickled, so that another process can do it.

    Attributes:
        name: what charts call it.
        command: that asked for it.
        folder: where it is written to; None: nowhere.
        file: one file for all of it in place of that.
        loads_in_process: whether the loads are run; not where they can only be sent as text.
    """

    model: str
    name: str
    command: tuple[str, ...]
    options: BenchOptions
    temperature: float
    on_summary: Callable[[Summary], None]
    folder: Path | None
    file: Path | None = None
    loads_in_process: bool = True


@dataclass(frozen=True)
class Measured:
    environment: dict[str, Any]
    ceiling: Ceiling
    summaries: list[Summary]
    results: dict[str, list[RunResult]]


def measure(engine: EngineClient | ReplicatedEngine, run: ModelRun) -> Measured:
    """Measures the device and then the engine, which this process must have.

    Raises:
        ValueError, LoadTimeoutError, RuntimeError: as `measure_engine`.
    """
    ceiling = ceiling_of(engine)
    environment = engine_environment(engine, ceiling, model=run.model, name=run.name, command=run.command)
    environment["workload"] = run.options.workload.name
    environment["traffic"] = run.options.traffic(run.temperature)
    if run.folder is not None:
        write_environment(run.folder, environment)
    if not run.loads_in_process:
        return Measured(environment, ceiling, [], {})
    summaries, results = measure_engine(
        engine,
        run.options,
        ceiling=ceiling,
        temperature=run.temperature,
        on_summary=run.on_summary,
        folder=run.folder,
        keep=None if run.file is None else partial(write_one_file, run.file, environment),
    )
    return Measured(environment, ceiling, summaries, results)
