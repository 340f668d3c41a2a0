"""An engine to be measured, made from its settings: with random weights or a checkpoint's, in this process."""

from __future__ import annotations

import dataclasses
import gc
import math
import platform
import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.floor import (
    Ceiling,
    device_ceiling,
    operations_per_token,
    prompt_floor_ms,
    step_floor_ms,
    weight_bytes_per_step,
)
from jaxserve.bench.in_process import InProcessTarget
from jaxserve.bench.records import RunResult, Summary, decoding_of_held
from jaxserve.bench.run import BenchOptions, Keep, run_loads
from jaxserve.bench.workload import Prompts, Workload
from jaxserve.config import EngineConfig
from jaxserve.engine import replicas
from jaxserve.engine.build import build_dummy_engine
from jaxserve.engine.build_devices import resolve_cache_dtype, select_devices
from jaxserve.engine.client import EngineClient
from jaxserve.engine.process_messages import HostedEngine
from jaxserve.engine.remote_engine import RemoteEngine
from jaxserve.engine.replicas import ReplicatedEngine
from jaxserve.models.presets import is_preset, preset_config
from jaxserve.progress import Progress
from jaxserve.version import versions

MeasuredEngine = EngineClient | ReplicatedEngine | RemoteEngine


def engine_config(settings: dict[str, Any]) -> EngineConfig:
    """The configuration with those settings that are not None.

    Raises:
        ValueError: a setting that this engine does not have, or whose value it does not take.
    """
    wanted = {name: value for name, value in settings.items() if value is not None}
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(wanted) - known)
    if unknown:
        flags = ", ".join("--" + name.replace("_", "-") for name in unknown)
        raise ValueError(f"this version's engine has no {flags}")
    return EngineConfig(**wanted)


def start_engine(model: str, config: EngineConfig, progress: Progress) -> EngineClient | ReplicatedEngine:
    """An engine with random weights for a named architecture or its JSON file, with a checkpoint's for anything else."""
    if config.load_format == "dummy" or is_preset(model):
        architecture = preset_config(model)
        return replicas.start_engine(
            dataclasses.replace(config, load_format="dummy"),
            lambda config, replica: build_dummy_engine(architecture, config, progress, replica),
        )
    # Here and not at the top: benchmarks with random weights need none of what these bring.
    from jaxserve.checkpoint.manifest import TOKENIZER_FOLDER
    from jaxserve.checkpoint.source import resolve_model
    from jaxserve.protocol.checkpoint_engine import start_checkpoint_engine
    from jaxserve.protocol.launch import resolve_draft_model
    from jaxserve.text.tokenizer import load_tokenizer

    folder = resolve_model(model, progress)
    draft_folder = resolve_draft_model(config, lambda: load_tokenizer(folder / TOKENIZER_FOLDER), progress)
    return start_checkpoint_engine(folder, draft_folder, config, progress).engine


def start_hosted_engine(model: str, config: EngineConfig, progress: Progress) -> HostedEngine:
    """As `start_engine`, in a process of the engine's own."""
    return HostedEngine(start_engine(model, config, progress))


def measure_engine(
    engine: EngineClient | ReplicatedEngine,
    options: BenchOptions,
    *,
    ceiling: Ceiling,
    temperature: float,
    on_summary: Callable[[Summary], None],
    folder: Path | None = None,
    keep: Keep | None = None,
) -> tuple[list[Summary], dict[str, list[RunResult]]]:
    """Runs the loads on an engine in this process, with floor, MBU and MFU beside each.

    Args:
        folder, keep: as for `run_loads`.

    Raises:
        ValueError: a workload that is text, or that does not fit the model.
        LoadTimeoutError, RuntimeError: as `run_loads`.
    """
    if options.workload.needs_text:
        raise ValueError(f"workload {options.workload.name!r} is sent as text: give --endpoint, or --http")
    options = dataclasses.replace(options, workload=options.workload.fitting(engine.max_model_len))
    prompts = Prompts(engine.model_config.vocab_size, longest=options.workload.longest)
    target = InProcessTarget(engine, prompts, temperature=temperature)
    judge = judge_of(engine, options.workload, ceiling)
    # As in an engine's own process: else Python looks through all that the start has left each time it looks for cycles.
    gc.collect()
    gc.freeze()
    try:
        return run_loads(target, options, judge=judge, on_summary=on_summary, folder=folder, keep=keep)
    finally:
        gc.unfreeze()


def judge_of(
    engine: MeasuredEngine, workload: Workload, ceiling: Ceiling
) -> Callable[[Summary, Sequence[RunResult]], Summary]:
    """What adds an engine's floor and its use of the device's compute to a summary."""
    config, model = engine.config, engine.model_config
    num_devices = devices_of(config)

    def judge(summary: Summary, runs: Sequence[RunResult]) -> Summary:
        replicas = num_devices // config.tensor_parallel_size
        room = _room(config, workload.mean_context)
        # Sequences that share pages may be more than there is room for each by itself; pages are read that there are.
        running = _running(summary, runs, config, math.inf if config.enable_prefix_caching else room)
        # With drafts a step gives a sequence several tokens: what it takes at least is no floor of the time for one.
        floor = (
            None
            if config.speculative_config is not None
            else step_floor_ms(
                model,
                jnp.dtype(config.dtype),
                engine.device_kind,
                batch=min(running / replicas, room),
                context=workload.mean_context,
                num_devices=config.tensor_parallel_size,
                bandwidth=ceiling.bandwidth,
                cache_dtype=resolve_cache_dtype(config, jnp.dtype(config.dtype)),
            )
        )
        prompts = sum(record.prompt_tokens for run in runs for record in run.records)
        outputs = sum(record.output_tokens for run in runs for record in run.records)
        tokens = summary.output_tokens_per_second * (1 + prompts / max(1, outputs))
        rate = tokens * operations_per_token(model, workload.mean_context)
        return dataclasses.replace(
            summary,
            mean_running=running,
            floor_ms=floor,
            ttft_floor_ms=_prompt_floor(prompts / max(1, sum(len(run.records) for run in runs))),
            compute_utilization=rate / (ceiling.matrix_rate * num_devices),
        )

    def _prompt_floor(tokens: float) -> float | None:
        # Quantized products may be faster than those that the ceiling is of, and pages that are found are not computed.
        if model.quantization is not None or config.enable_prefix_caching:
            return None
        dtype = jnp.dtype(config.dtype)
        return prompt_floor_ms(model, dtype, ceiling, tokens=tokens, num_devices=config.tensor_parallel_size)

    return judge


def _room(config: EngineConfig, context: float) -> float:
    """How many sequences with so many tokens each the pages of one replica hold."""
    return math.inf if config.num_pages is None else config.num_pages * config.page_size / context


def _running(summary: Summary, runs: Sequence[RunResult], config: EngineConfig, room: float) -> float:
    """`mean_running` of what the engine's slots hold and its pages: what else is in flight waits, and is in no step.

    Args:
        room: sequences for which one replica has pages.
    """
    running, load = summary.mean_running, summary.load
    if config.static_batching and load.kind == "concurrency":
        # Slots of those that have ended stay empty until all of the batch have; one always runs.
        answered = [[record for record in run.records if record.error is None] for run in runs]
        running = max(1.0, float(np.median([decoding_of_held(part, load) for part in answered if part])))
    return min(running, min(config.max_num_seqs or math.inf, room) * config.data_parallel_size)


def ceiling_of(engine: EngineClient | ReplicatedEngine) -> Ceiling:
    """Of one of the engine's devices. Those that a CPU is split into share its memory and its cores."""
    device = select_devices(engine.config)[0]
    ceiling = device_ceiling(device)
    share = devices_of(engine.config) if device.platform == "cpu" else 1
    return dataclasses.replace(ceiling, bandwidth=ceiling.bandwidth / share, matrix_rate=ceiling.matrix_rate / share)


def devices_of(config: EngineConfig) -> int:
    """How many devices the engine runs on."""
    return config.tensor_parallel_size * config.data_parallel_size


def engine_environment(
    engine: EngineClient | ReplicatedEngine, ceiling: Ceiling, *, model: str, name: str, command: Sequence[str]
) -> dict[str, Any]:
    """What was measured, with what and on what, for the record."""
    return {
        "name": name,
        "engine": "jaxserve",
        "transport": "in process",
        "model": model,
        "device": engine.device_kind,
        "num_devices": devices_of(engine.config),
        "settings": dataclasses.asdict(engine.config),
        "architecture": engine.model_config.to_json(),
        "weight_bytes": weight_bytes_per_step(engine.model_config, jnp.dtype(engine.config.dtype)),
        "ceiling": dataclasses.asdict(ceiling),
        **versions(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
    }
