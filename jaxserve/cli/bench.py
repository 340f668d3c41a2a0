"""`jaxserve bench`: time per token, time to first token and throughput, beside the floor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli.errors import reported_errors
from jaxserve.cli.logs import configure_logging
from jaxserve.cli.options import (
    DTypeName,
    KVCacheDTypeName,
    MaxTpotMs,
    PrefixCaching,
    QuantizationName,
    SchedulingPolicyName,
    Verbose,
)
from jaxserve.cli.progress import progress_on
from jaxserve.config import EngineConfig


def bench(
    model: Annotated[str, typer.Argument(help="Architecture with random weights (llama-3-8b), or a JSON file.")],
    concurrency: Annotated[
        str, typer.Option(help="Requests held in flight: a list such as 1,8,64.")
    ] = "1,4,8,16,30,64",
    workload: Annotated[str, typer.Option(help="sharegpt-like, or fixed:PROMPT/OUTPUT.")] = "sharegpt-like",
    num_requests: Annotated[int | None, typer.Option(help="Measured requests; default max(8, 3N).")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens of a step at most.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence in tokens.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of device memory to use.")] = 0.9,
    tensor_parallel_size: Annotated[int, typer.Option(help="Devices that share the model.")] = 1,
    dtype: DTypeName = "auto",
    quantization: QuantizationName = None,
    kv_cache_dtype: KVCacheDTypeName = "auto",
    enable_prefix_caching: PrefixCaching = False,
    scheduling_policy: SchedulingPolicyName = "fcfs",
    max_tpot_ms: MaxTpotMs = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for every figure.")] = None,
    verbose: Verbose = 0,
) -> None:
    """Measures an engine in this process with random weights: closed loop, greedy, end-of-text ignored."""
    configure_logging(verbose)
    with reported_errors(verbose):
        config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=enable_prefix_caching,
            scheduling_policy=scheduling_policy,
            max_tpot_ms=max_tpot_ms,
            load_format="dummy",
        )
        _measure(model, config, workload, _parse_list(concurrency), num_requests, temperature, output)


def _measure(
    model: str,
    config: EngineConfig,
    workload: str,
    concurrency: tuple[int, ...],
    num_requests: int | None,
    temperature: float,
    output: Path | None,
) -> None:
    # Here and not at the top: they bring jax, which --help need not wait for.
    from jaxserve.bench.records import Summary, format_table
    from jaxserve.bench.run import BenchOptions, run_in_process, write_results
    from jaxserve.engine.build import build_dummy_engine
    from jaxserve.models.presets import preset_config

    options = BenchOptions(
        workload=workload, concurrency=concurrency, num_requests=num_requests, temperature=temperature
    )
    engine = build_dummy_engine(preset_config(model), config, progress_on())

    def show(summary: Summary) -> None:
        typer.echo(f"  {summary.load}: TPOT {summary.tpot_ms['mean']:.2f} ms", err=True)

    try:
        summaries, records = run_in_process(engine, options, show)
    finally:
        engine.shutdown()
    typer.echo(f"{model}, {engine.device_kind}, times in ms")
    typer.echo(format_table(summaries))
    if output is not None:
        write_results(output, engine, model, summaries, records)


def _parse_list(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(",") if part.strip().isdecimal())
    if not values or min(values) < 1 or len(values) != len(text.split(",")):
        raise ValueError(f"--concurrency {text!r} must be whole numbers from 1, such as 1,8,64")
    return values
