"""Runs as a sweep would leave them, from a simple model of an engine: figures that look like real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.records import Load, RequestRecord, RunResult, Snapshot, summarize
from jaxserve.bench.results import Series, read_series, write_environment, write_load

LOADS = tuple(Load("concurrency", value) for value in (1, 4, 8, 16, 30, 64))
RATES = tuple(Load("rate", value) for value in (1, 2, 4, 8))


def write_run(
    folder: Path,
    name: str,
    *,
    tpot_ms: float = 5.0,
    growth_ms: float = 0.06,
    loads: tuple[Load, ...] = LOADS,
    floor_share: float | None = 0.8,
    seed: int = 0,
    noise: float = 0.03,
    failures: int = 0,
    **environment: Any,
) -> Path:
    """One configuration whose TPOT is `tpot_ms + growth_ms * requests in flight`.

    Args:
        floor_share: floor over TPOT; None: there is no floor.
        environment: beside the name: "num_devices", "settings" and the like.
    """
    runs = folder / "runs" / name.replace(" ", "-").lower()
    known = {"name": name, "engine": "jaxserve", "transport": "in process", "model": "tiny", "device": "made up",
             "jaxserve": "0.1", "git_commit": "0123abc"}  # fmt: skip
    write_environment(runs, {**known, "command": f"jaxserve bench tiny --name '{name}'", **environment})
    random = np.random.default_rng(seed)
    for load in loads:
        running = load.value if load.kind == "concurrency" else 1.2 * load.value
        step = (tpot_ms + growth_ms * running) / 1e3
        count = max(8, 3 * int(running))
        records = []
        for index in range(count):
            tokens = int(random.integers(50, 350))
            begun = 0.02 * index
            first = begun + 0.018 + 0.3 * growth_ms / 12 * running * random.lognormal(0, 0.4)
            last = first + (tokens - 1) * step * random.lognormal(0, noise)
            error = "status 500" if index < failures else None
            records.append(RequestRecord(229, tokens, begun, first, last, index=index, error=error))
        duration = 202 * step * count / running
        timeline = [
            Snapshot(moment, int(running), int(index % 3), int(40 * running * (1 + index % 5 / 10)), 8192,
                     int(moment * running / step), 0, int(moment / step))
            for index, moment in enumerate(np.arange(0.0, duration, 0.25).tolist())
        ]  # fmt: skip
        run = RunResult(records, duration, duration * running / step, host_gap=0.01, timeline=timeline)
        summary = summarize(load, [run])
        if floor_share is not None:
            summary = _with_floor(summary, floor_share * step * 1e3, 0.004 * running)
        write_load(runs, summary, [run])
    return runs


def _with_floor(summary: Any, floor_ms: float, compute: float) -> Any:
    from dataclasses import replace

    return replace(summary, floor_ms=floor_ms, compute_utilization=compute)


def write_sweep(folder: Path) -> None:
    """Everything that charts are drawn of."""
    both = (*LOADS, *RATES)
    write_run(folder, "TP1", loads=both, settings={"tensor_parallel_size": 1})
    write_run(folder, "TP2", tpot_ms=3.3, growth_ms=0.045, floor_share=0.6, loads=both, num_devices=2,
              settings={"tensor_parallel_size": 2})  # fmt: skip
    write_run(folder, "TP4", tpot_ms=2.6, growth_ms=0.062, floor_share=0.45, num_devices=4,
              settings={"tensor_parallel_size": 4})  # fmt: skip
    write_run(folder, "TP1 speculation", tpot_ms=3.2, growth_ms=0.14, floor_share=None,
              settings={"tensor_parallel_size": 1, "speculative_config": "{}"})  # fmt: skip
    write_run(folder, "TP1 static", tpot_ms=5.4, growth_ms=0.2, loads=both,
              settings={"tensor_parallel_size": 1, "static_batching": True})  # fmt: skip
    write_run(folder, "127.0.0.1:8001", tpot_ms=6.6, growth_ms=0.06, floor_share=None, engine="127.0.0.1:8001",
              transport="http")  # fmt: skip


def series_of(folder: Path, name: str, **options: Any) -> Series:
    """What `write_run` leaves, without noise, read back."""
    return read_series(write_run(folder, name, noise=0.0, **options))
