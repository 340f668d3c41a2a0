"""One benchmark from its options to its figures."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.bench.floor import step_floor_ms
from jaxserve.bench.in_process import ClosedLoop
from jaxserve.bench.records import RequestRecord, Summary, summarize
from jaxserve.bench.workload import load_workload
from jaxserve.engine.build import resolve_cache_dtype
from jaxserve.engine.client import EngineClient


@dataclass(frozen=True)
class BenchOptions:
    """What is measured.

    Attributes:
        concurrency: requests held in flight; one run for each.
        num_requests: measured at each concurrency; None: max(8, 3 x concurrency).
        timeout: seconds that one run may take.
    """

    workload: str
    concurrency: tuple[int, ...]
    num_requests: int | None = None
    temperature: float = 0.0
    timeout: float = 600.0


def run_in_process(
    engine: EngineClient, options: BenchOptions, on_summary: Callable[[Summary], None]
) -> tuple[list[Summary], dict[str, list[RequestRecord]]]:
    """Measures each concurrency in turn, after one short unmeasured run."""
    workload = load_workload(options.workload)
    config = engine.config
    ClosedLoop(engine, workload, concurrency=2, num_requests=2, temperature=options.temperature).run(options.timeout)
    summaries: list[Summary] = []
    records: dict[str, list[RequestRecord]] = {}
    for concurrency in options.concurrency:
        count = options.num_requests or max(8, 3 * concurrency)
        loop = ClosedLoop(
            engine, workload, concurrency=concurrency, num_requests=count, temperature=options.temperature
        )
        result = loop.run(options.timeout)
        floor = step_floor_ms(
            engine.model_config,
            jnp.dtype(config.dtype),
            engine.device_kind,
            batch=concurrency,
            context=workload.mean_context,
            num_devices=config.tensor_parallel_size,
            cache_dtype=resolve_cache_dtype(config, jnp.dtype(config.dtype)),
        )
        summary = summarize(
            str(concurrency),
            result.records,
            floor_ms=floor,
            host_gap=result.host_gap,
            tokens_per_second=result.tokens_per_second,
        )
        on_summary(summary)
        summaries.append(summary)
        records[summary.load] = result.records
    return summaries, records


def write_results(
    path: Path, engine: EngineClient, model: str, summaries: list[Summary], records: dict[str, list[RequestRecord]]
) -> None:
    """Everything as JSON: where and with what it was measured, the figures, each request."""
    data = {
        "model": model,
        "device": engine.device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "engine": asdict(engine.config),
        "summaries": [
            {**asdict(summary), "bandwidth_utilization": summary.bandwidth_utilization} for summary in summaries
        ],
        "requests": {load: [record.to_json() for record in entries] for load, entries in records.items()},
    }
    path.write_text(json.dumps(data, indent=1))
