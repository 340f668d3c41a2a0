"""`jaxserve bench`: time per token, time to first token and throughput, beside the floor."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli import bench_options as options
from jaxserve.cli.bench_sweep import compare, report, sweep, tell_failed_requests
from jaxserve.cli.default_command import GroupWithDefault
from jaxserve.cli.errors import EXIT_FAILURE, reported_errors
from jaxserve.cli.logs import configure_logging
from jaxserve.cli.options import (
    DeviceName,
    DisableCustomAllReduce,
    DTypeName,
    KVCacheDTypeName,
    MaxTpotMs,
    PrefixCaching,
    QuantizationName,
    SchedulingPolicyName,
    SpeculativeConfigJson,
    SyntheticAcceptance,
    Verbose,
    read_speculative_config,
)
from jaxserve.cli.profile import kernels
from jaxserve.cli.serve_options import EngineProcessName
from jaxserve.config import EngineConfig, EngineProcess
from jaxserve.device_memory import claim_device_memory
from jaxserve.progress_display import progress_on
from jaxserve.wording import plural

if TYPE_CHECKING:
    from jaxserve.bench.records import Load, Summary
    from jaxserve.bench.run import BenchOptions

DEFAULT_CONCURRENCY = "1,4,8,16,30,64"


def run(
    model: options.MeasuredModel = None,
    concurrency: options.Concurrency = None,
    request_rate: options.RequestRate = None,
    trace_speed: options.TraceSpeed = None,
    workload: options.WorkloadName = "sharegpt-like",
    num_requests: options.NumRequests = None,
    rounds: options.Rounds = 1,
    temperature: options.Temperature = 0.0,
    timeout: options.Timeout = 600.0,
    endpoint: options.Endpoint = None,
    api_key: options.ApiKey = None,
    served_model_name: options.ServedModelName = None,
    prompt_form: options.PromptForm = "token-ids",
    vocab_size: options.VocabSize = 30000,
    ignore_eos: options.IgnoreEos = True,
    extra_body: options.ExtraBody = None,
    endpoint_devices: options.EndpointDevices = 1,
    http: Annotated[
        bool, typer.Option("--http", help="Measure in process, then over HTTP as `serve` has it, and compare.")
    ] = False,
    client: options.ClientName = "own",
    client_processes: options.ClientProcesses = 1,
    engine_process: EngineProcessName = "auto",
    max_num_seqs: Annotated[int | None, typer.Option(metavar="COUNT", help="Sequences that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(metavar="COUNT", help="Tokens of a step.")] = None,
    max_model_len: Annotated[int | None, typer.Option(metavar="COUNT", help="Longest sequence in tokens.")] = None,
    page_size: Annotated[int | None, typer.Option(metavar="COUNT", help="Tokens that a KV page holds.")] = None,
    num_pages: Annotated[int | None, typer.Option(metavar="COUNT", help="KV pages.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of device memory to use.")] = 0.9,
    tensor_parallel_size: Annotated[int, typer.Option(help="Devices that share the model.")] = 1,
    disable_custom_all_reduce: DisableCustomAllReduce = EngineConfig.disable_custom_all_reduce,
    data_parallel_size: Annotated[int | None, typer.Option(help="Replicas of the model.")] = None,
    quantization: QuantizationName = None,
    kv_cache_dtype: KVCacheDTypeName = "auto",
    speculative_config: SpeculativeConfigJson = None,
    speculative_synthetic_acceptance: SyntheticAcceptance = None,
    static_batching: options.StaticBatching = False,
    enable_prefix_caching: PrefixCaching = False,
    scheduling_policy: SchedulingPolicyName = "fcfs",
    max_tpot_ms: MaxTpotMs = None,
    dtype: DTypeName = "auto",
    device: DeviceName = "auto",
    output: options.OutputFolder = None,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="What charts call this run.")] = None,
    failure_file: Annotated[Path | None, typer.Option(hidden=True, help="For why it failed: a sweep reads it.")] = None,
    verbose: Verbose = 0,
) -> None:
    """Measure an engine in this process, or any OpenAI endpoint, at some loads."""
    configure_logging(verbose)
    with reported_errors(verbose, failure_file):
        from jaxserve.bench.model_check import check_model
        from jaxserve.bench.records import failed_requests
        from jaxserve.bench.run import BenchOptions
        from jaxserve.bench.workload import load_workload

        if (model is None) == (endpoint is None):
            raise ValueError("give either MODEL or --endpoint URL")
        further = {} if extra_body is None else options.parse_json_object(extra_body, "--extra-body")
        chosen = load_workload(workload)
        bench_options = BenchOptions(
            workload=chosen,
            loads=parse_loads(concurrency, request_rate, trace_speed, has_arrivals=chosen.has_arrivals),
            num_requests=num_requests,
            rounds=rounds,
            timeout=timeout,
            on_load=_tell_load,
        )
        if endpoint is not None:
            from jaxserve.bench.endpoint import EndpointOptions
            from jaxserve.bench.endpoint_run import measure_endpoint

            endpoint_options = EndpointOptions(
                url=endpoint,
                model=served_model_name,
                api_key=api_key,
                form=prompt_form,
                temperature=temperature,
                ignore_eos=ignore_eos,
                extra_body=further,
            )
            text, summaries = measure_endpoint(
                endpoint_options, bench_options, name=name or endpoint, vocab_size=vocab_size, client=client,
                client_processes=client_processes, num_devices=endpoint_devices, on_summary=show,
                output=output, command=_command(),
            )  # fmt: skip
            measured = {name or endpoint: summaries}
        else:
            claim_device_memory(gpu_memory_utilization, tensor_parallel_size)
            check_model(model or "", chosen, max_model_len)
            settings: dict[str, Any] = {
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "max_model_len": max_model_len,
                "page_size": page_size,
                "num_pages": num_pages,
                "gpu_memory_utilization": gpu_memory_utilization,
                "tensor_parallel_size": tensor_parallel_size,
                "disable_custom_all_reduce": disable_custom_all_reduce,
                "data_parallel_size": data_parallel_size,
                "quantization": quantization,
                "kv_cache_dtype": kv_cache_dtype,
                "speculative_config": read_speculative_config(speculative_config, speculative_synthetic_acceptance),
                "load_format": None if speculative_synthetic_acceptance is None else "dummy",
                "static_batching": static_batching or None,
                "enable_prefix_caching": enable_prefix_caching,
                "scheduling_policy": scheduling_policy,
                "max_tpot_ms": max_tpot_ms,
                "dtype": dtype,
                "device": device,
            }
            text, measured = measure_model(
                model or "", settings, bench_options, temperature=temperature, name=name, output=output,
                http_client=client if http else None, client_processes=client_processes,
                engine_process=engine_process, verbose=verbose,
            )  # fmt: skip
        typer.echo(text)
        failures = failed_requests(measured)
        if failures and failure_file is None:  # a sweep tells those of all that it ran
            tell_failed_requests(failures, None if output is None or output.suffix == ".json" else output)
            raise typer.Exit(EXIT_FAILURE)


def measure_model(
    model: str,
    settings: dict[str, Any],
    bench_options: BenchOptions,
    *,
    temperature: float,
    name: str | None,
    output: Path | None,
    http_client: str | None,
    client_processes: int,
    engine_process: EngineProcess,
    verbose: int,
) -> tuple[str, dict[str, list[Summary]]]:
    """Builds the engine, measures it, writes what is to be written, and returns the table and the figures by name: those in
    process, and those over HTTP.

    Args:
        http_client: with what the same engine is measured over HTTP afterwards; None: it is not.
    """
    # Here and not at the top: it brings jax, which --help need not wait for.
    from jaxserve.bench.engine_run import engine_config, start_engine
    from jaxserve.bench.http_comparison import check_packages, compare_over_http
    from jaxserve.bench.in_own_process import measure_in_own_process, start_remote_engine
    from jaxserve.bench.model_run import ModelRun, measure
    from jaxserve.bench.records import format_table
    from jaxserve.bench.results import make_folder
    from jaxserve.engine.engine_process import ProcessSetup
    from jaxserve.engine.process_choice import has_own_process

    if http_client is not None:
        check_packages(http_client)  # before minutes of compiling
    config, folder = engine_config(settings), make_folder(output, model=model)
    only_over_http = http_client is not None and bench_options.workload.needs_text
    file = output if folder is None else None
    run = ModelRun(
        model, name or model, _command(), bench_options, temperature, show, folder, file,
        loads_in_process=not only_over_http,
    )  # fmt: skip
    setup = ProcessSetup(partial(configure_logging, verbose), progress_on)
    engine = None
    try:
        if http_client is not None and has_own_process(engine_process, config):
            # One engine at a time has room on the device, and a process that had one keeps its memory.
            measured = measure_in_own_process(run, config, setup)
            engine = start_remote_engine(model, config, setup)
        else:
            engine = start_engine(model, config, progress_on())
            measured = measure(engine, run)
        parts, figures = [], {run.name: measured.summaries}
        if not only_over_http:
            device = measured.environment["device"]
            parts += [f"{model}, {device}, in process, times in ms", format_table(measured.summaries)]
        if http_client is not None:
            text, figures[f"{run.name} over HTTP"] = compare_over_http(
                engine, bench_options, measured, temperature=temperature, client=http_client,
                client_processes=client_processes, on_summary=show, folder=folder, file=file,
            )  # fmt: skip
            parts.append(text)
    finally:
        if engine is not None:
            engine.shutdown()
    return "\n".join(parts), figures


def show(summary: Summary) -> None:
    failures = f"; {summary.failures}" if summary.failures else ""
    typer.echo(f"  {summary.load.label}: TPOT {summary.tpot_ms['mean']:.2f} ms{failures}", err=True)


def _tell_load(load: Load, num_requests: int) -> None:
    typer.echo(f"measuring {num_requests} {plural('request', num_requests)} at {load.label} …", err=True)


def _command() -> tuple[str, ...]:
    """The command line as anybody would type it, whatever started Python and wherever that lies."""
    program = Path(sys.argv[0]).name
    return ("jaxserve" if program == "__main__.py" else program, *sys.argv[1:])


def parse_loads(
    concurrency: str | None, request_rate: str | None, trace_speed: float | None, *, has_arrivals: bool
) -> tuple[Load, ...]:
    """The loads that are asked for; a trace runs at its own times, and else concurrency is held, where nothing is asked.

    Raises:
        ValueError: a list that is none.
    """
    from jaxserve.bench.records import Load

    if concurrency is None and request_rate is None and trace_speed is None:
        if has_arrivals:
            trace_speed = 1.0
        else:
            concurrency = DEFAULT_CONCURRENCY
    held = options.parse_counts(concurrency, "--concurrency") if concurrency is not None else ()
    rates = options.parse_numbers(request_rate, "--request-rate") if request_rate is not None else ()
    loads = [*(Load("concurrency", value) for value in held), *(Load("rate", value) for value in rates)]
    if trace_speed is not None:
        loads.append(Load("trace", trace_speed))
    return tuple(dict.fromkeys(loads))


def build_bench() -> typer.Typer:
    """The commands of `jaxserve bench`; `run` is meant where none is named."""
    app = typer.Typer(
        name="bench",
        cls=GroupWithDefault,
        help="Measure an engine or an endpoint: `jaxserve bench MODEL`, or one of the commands below.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command("run")(run)
    for command in (sweep, report, compare, kernels):
        app.command()(command)
    return app
