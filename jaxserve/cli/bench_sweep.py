"""`jaxserve bench sweep`, `report` and `compare`: many configurations, their charts, and what differs between two runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli import bench_options as options
from jaxserve.cli.errors import EXIT_FAILURE, reported_errors
from jaxserve.cli.logs import configure_logging
from jaxserve.cli.options import (
    DTypeName,
    KVCacheDTypeName,
    PrefixCaching,
    QuantizationName,
    SyntheticAcceptance,
    Verbose,
    read_speculative_config,
)
from jaxserve.config import EngineConfig
from jaxserve.wording import plural

SWEEP_CONCURRENCY = "1,4,8,10,16,20,30,64"

SloTpot = Annotated[
    float | None,
    typer.Option(
        metavar="MS",
        callback=options.positive,
        help="Say which configuration gives most while a token takes no longer than this.",
    ),
]
Title = Annotated[str, typer.Option(metavar="TEXT", help="Of the report.")]


def sweep(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", help="As for `jaxserve bench`; may be given several times."),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="For everything; what is done there is kept.")] = Path(
        "bench-sweep"
    ),
    tensor_parallel_size: Annotated[str, typer.Option(metavar="LIST", help="Such as 1,2,4.")] = "1",
    data_parallel_size: Annotated[str, typer.Option(metavar="LIST", help="Such as 1,2.")] = "1",
    speculative_config: Annotated[
        list[str] | None, typer.Option(metavar="JSON", help="Measured beside plain decoding; may be repeated.")
    ] = None,
    speculative_synthetic_acceptance: SyntheticAcceptance = None,
    static_batching: Annotated[
        bool, typer.Option("--static-batching", help="Measure static batching too, with the first configuration.")
    ] = False,
    endpoint: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A competitor: any OpenAI endpoint; may be repeated.")
    ] = None,
    endpoint_devices: options.EndpointDevices = 1,
    served_model_name: options.ServedModelName = None,
    prompt_form: options.PromptForm = "token-ids",
    vocab_size: options.VocabSize = 30000,
    ignore_eos: options.IgnoreEos = True,
    extra_body: options.ExtraBody = None,
    client: options.ClientName = "own",
    client_processes: options.ClientProcesses = 1,
    max_devices: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT", callback=options.at_least_one, help="Leave combinations out that need more devices."
        ),
    ] = None,
    concurrency: options.Concurrency = None,
    request_rate: options.RequestRate = None,
    trace_speed: options.TraceSpeed = None,
    workload: options.WorkloadName = "sharegpt-like",
    num_requests: options.NumRequests = None,
    rounds: options.Rounds = 1,
    temperature: options.Temperature = 0.0,
    timeout: options.Timeout = 600.0,
    max_num_seqs: Annotated[int | None, typer.Option(metavar="COUNT", help="Sequences that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(metavar="COUNT", help="Tokens of a step.")] = None,
    max_model_len: Annotated[int | None, typer.Option(metavar="COUNT", help="Longest sequence in tokens.")] = None,
    enable_prefix_caching: PrefixCaching = False,
    quantization: QuantizationName = None,
    kv_cache_dtype: KVCacheDTypeName = "auto",
    dtype: DTypeName = "auto",
    slo_tpot_ms: SloTpot = None,
    title: Title = "Throughput against latency",
    seconds: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            callback=options.positive,
            help="End after so long with a report of what is done; the same command goes on from there. Unset: when all is.",
        ),
    ] = None,
    verbose: Verbose = 0,
) -> None:
    """Measure several configurations at the same loads, and write records, charts and a report into one folder."""
    configure_logging(verbose)
    with reported_errors(verbose):
        from jaxserve.bench.model_check import check_model
        from jaxserve.bench.run import BenchOptions
        from jaxserve.bench.sweep import Outcome, failed_of_sweep, plan, run_sweep
        from jaxserve.bench.workload import load_workload
        from jaxserve.cli.bench import parse_loads

        chosen = load_workload(workload)
        has_arrivals = chosen.has_arrivals
        if concurrency is None and request_rate is None and trace_speed is None and not has_arrivals:
            concurrency = SWEEP_CONCURRENCY
        loads = parse_loads(concurrency, request_rate, trace_speed, has_arrivals=has_arrivals)
        # All that each run would check as well, after it was started.
        BenchOptions(chosen, loads, num_requests, rounds, timeout)
        if extra_body is not None:
            options.parse_json_object(extra_body, "--extra-body")
        for name in model or []:
            check_model(name, chosen, max_model_len)
        for text in speculative_config or [None]:
            speculation = None if text is None else read_speculative_config(text, speculative_synthetic_acceptance)
            EngineConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len,
                quantization=quantization, kv_cache_dtype=kv_cache_dtype, speculative_config=speculation,
                load_format="auto" if speculative_synthetic_acceptance is None else "dummy",
            )  # fmt: skip
        over_http = chosen.needs_text
        asked = {
            "--endpoint-devices": endpoint_devices, "--served-model-name": served_model_name,
            "--prompt-form": prompt_form, "--vocab-size": vocab_size, "--extra-body": extra_body,
            "--client": client, "--client-processes": client_processes,
        }  # fmt: skip
        configurations = plan(
            model or [],
            tensor_parallel_sizes=options.parse_counts(tensor_parallel_size, "--tensor-parallel-size"),
            data_parallel_sizes=options.parse_counts(data_parallel_size, "--data-parallel-size"),
            speculative_configs=speculative_config or [],
            static_batching=static_batching,
            endpoints=endpoint or [],
            engine_arguments=["--enable-prefix-caching"] if enable_prefix_caching else [],
            endpoint_arguments=[*_flags(asked), *([] if ignore_eos else ["--no-ignore-eos"])],
            synthetic_acceptance=speculative_synthetic_acceptance,
            most_devices=max_devices,
            over_http=over_http,
        )
        passed = {
            "--concurrency": concurrency, "--request-rate": request_rate, "--trace-speed": trace_speed,
            "--workload": workload, "--num-requests": num_requests, "--rounds": rounds, "--temperature": temperature,
            "--timeout": timeout, "--max-num-seqs": max_num_seqs, "--max-num-batched-tokens": max_num_batched_tokens,
            "--max-model-len": max_model_len,
            "--quantization": quantization, "--kv-cache-dtype": None if kv_cache_dtype == "auto" else kv_cache_dtype,
            "--dtype": dtype,
        }  # fmt: skip
        _check_charts()
        outcome = run_sweep(
            configurations, loads, _flags(passed), output, lambda text: typer.echo(text, err=True), seconds=seconds
        )
        failures = ""
        try:
            if any(output.rglob("*.summary.json")):
                _report(output, title, slo_tpot_ms)
                failures = failed_of_sweep(configurations, loads, output)
        finally:  # whatever is wrong with the figures
            if outcome.failed:
                typer.echo(f"failed: {', '.join(outcome.failed)}", err=True)
            if outcome.unfinished:
                unfinished = ", ".join(outcome.unfinished)
                typer.echo(f"not done yet: {unfinished}; the same command goes on from here", err=True)
        if failures:
            tell_failed_requests(failures, output / "runs")
        if failures or outcome != Outcome():
            raise typer.Exit(EXIT_FAILURE)


def tell_failed_requests(failures: str, folder: Path | None) -> None:
    """One line on stderr; with what has the loads measured again where their figures were written into a folder."""
    again = "" if folder is None else f"; a load whose .summary.json below {folder} is removed is measured again"
    typer.echo(f"requests failed: {failures}{again}", err=True)


def _flags(values: dict[str, object]) -> list[str]:
    return [part for flag, value in values.items() if value is not None for part in (flag, str(value))]


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="With runs of `jaxserve bench --output` below it.")],
    slo_tpot_ms: SloTpot = None,
    title: Title = "Throughput against latency",
    verbose: Verbose = 0,
) -> None:
    """Draw charts and report of the runs in FOLDER anew."""
    configure_logging(verbose)
    with reported_errors(verbose):
        from jaxserve.bench.results import find_series

        find_series(folder)  # what is not there is told first
        _check_charts()
        _report(folder, title, slo_tpot_ms)


def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="Folder of a run or of a sweep.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The one that is judged against it.")],
    verbose: Verbose = 0,
) -> None:
    """Say which differences between two runs are beyond the noise (95% bootstrap intervals)."""
    configure_logging(verbose)
    with reported_errors(verbose):
        from jaxserve.bench.compare import compare as compare_series
        from jaxserve.bench.results import find_series

        comparison = compare_series(find_series(before), find_series(after))
        for line in (*comparison.notes, *comparison.differences):
            typer.echo(str(line))
        differences = [difference for difference in comparison.differences if difference.is_judged]
        if not differences:
            typer.echo("nothing is judged: requests failed at each load that the two have in common")
            return
        beyond = sum(difference.is_beyond_noise for difference in differences)
        typer.echo(
            f"{beyond} of {len(differences)} {plural('difference', len(differences))} {'is' if beyond == 1 else 'are'} "
            "beyond the noise between requests (where nothing changed, one in twenty is)"
        )


def _check_charts() -> None:
    """Before anything is measured.

    Raises:
        RuntimeError: what draws the charts is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError(
            "charts need matplotlib: scripts/setup bench in the checkout, or pip install matplotlib (`jaxserve bench MODEL "
            "--output DIR` measures without)"
        )


def _report(folder: Path, title: str, slo_tpot_ms: float | None) -> None:
    from jaxserve.bench.report import build_report

    words = build_report(folder, title=title, slo_tpot_ms=slo_tpot_ms)
    typer.echo(f"{folder / 'report.html'}")
    if words:
        typer.echo(words)
