"""An OpenAI endpoint to be measured: this process is its client and needs no jax."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from jaxserve.bench.client_processes import ProcessTarget, make_client
from jaxserve.bench.endpoint import EndpointOptions, first_model
from jaxserve.bench.http_target import HttpTarget
from jaxserve.bench.records import RunResult, Summary, format_table
from jaxserve.bench.results import make_folder, write_environment, write_one_file
from jaxserve.bench.run import BenchOptions, run_loads
from jaxserve.bench.workload import Prompts
from jaxserve.version import versions

_FIRST_TOKEN_ID = 1000  # below lie most vocabularies' control tokens and single bytes


def measure_endpoint(
    endpoint: EndpointOptions,
    options: BenchOptions,
    *,
    name: str,
    vocab_size: int,
    client: str,
    client_processes: int,
    num_devices: int,
    on_summary: Callable[[Summary], None],
    output: Path | None,
    command: Sequence[str],
) -> tuple[str, list[Summary]]:
    """Runs the loads against an endpoint, writes what is to be written, and returns the table and the figures in it.

    Args:
        num_devices: that the endpoint runs on, which it does not tell.
        output: folder, or file whose name ends in .json, to write to.

    There is no floor beside the figures: what the endpoint runs on is not known here.
    """
    folder = make_folder(output)
    first = _FIRST_TOKEN_ID if vocab_size > 4 * _FIRST_TOKEN_ID else 0
    prompts = Prompts(vocab_size, first=first, longest=options.workload.longest)
    model = endpoint.model or first_model(endpoint)
    target: HttpTarget | ProcessTarget
    if client_processes == 1:
        target = HttpTarget(endpoint, model, prompts, make_client(client, endpoint))
    else:
        target = ProcessTarget(
            replace(endpoint, model=model), prompts, client=client, processes=client_processes, warms_up=True
        )
    environment = {
        "name": name,
        "engine": name,
        "transport": "http",
        "model": model,
        "client": client,
        "num_devices": num_devices,
        "workload": options.workload.name,
        "traffic": options.traffic(endpoint.temperature),
        **versions(),  # of the client
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
    }
    try:
        if folder is not None:
            write_environment(folder, environment)
        keep = partial(write_one_file, output, environment) if output is not None and folder is None else None
        summaries, _ = run_loads(target, options, judge=_as_it_is, on_summary=on_summary, folder=folder, keep=keep)
    finally:
        target.close()
    return "\n".join([f"{model} at {endpoint.root}, times in ms", format_table(summaries)]), summaries


def _as_it_is(summary: Summary, runs: Sequence[RunResult]) -> Summary:
    del runs
    return summary
