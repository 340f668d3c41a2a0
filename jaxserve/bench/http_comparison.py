"""The same model over HTTP: the server and the engine as `jaxserve serve` has them, and the clients in other processes."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from jaxserve.bench.engine_run import MeasuredEngine, judge_of
from jaxserve.bench.model_run import Measured
from jaxserve.bench.records import RunResult, Summary, format_table
from jaxserve.bench.results import one_object, write_environment, write_one_file
from jaxserve.bench.run import BenchOptions, run_loads
from jaxserve.config import ServerConfig
from jaxserve.engine.remote_engine import RemoteEngine
from jaxserve.wording import plural

_PACKAGES = ("starlette", "uvicorn", "httptools", "pydantic", "prometheus_client", "tokenizers", "httpx", "jinja2")


def check_packages(client: str = "own") -> None:
    """Raises:
    RuntimeError: packages that the server or the client needs are not installed, with their names.
    """
    wanted = (*_PACKAGES, "openai") if client == "openai" else _PACKAGES
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"measuring over HTTP needs packages that are not installed here: pip install {' '.join(missing)}"
        )


def compare_over_http(
    engine: MeasuredEngine,
    options: BenchOptions,
    in_process: Measured,
    *,
    temperature: float,
    client: str,
    client_processes: int,
    on_summary: Callable[[Summary], None],
    folder: Path | None,
    file: Path | None = None,
) -> tuple[str, list[Summary]]:
    """Runs the same loads over HTTP, and returns their table with what differs from the figures taken in process, and the
    figures in it.

    Args:
        engine: the one that was measured in process, or one like it in a process of its own.
        folder: a folder `http` in it gets the figures.
        file: gets those of both.

    Raises:
        RuntimeError: a package is missing, or no request was answered.
        LoadTimeoutError: a load took too long.
    """
    check_packages(client)
    # Here and not at the top: they need what `check_packages` looks for, and a run in process does not.
    from jaxserve.bench.client_processes import ProcessTarget
    from jaxserve.bench.http_target import EndpointOptions
    from jaxserve.bench.workload import Prompts

    options = replace(options, workload=options.workload.fitting(engine.max_model_len))
    form = "chat" if options.workload.needs_text else "token-ids"
    vocabulary = engine.model_config.vocab_size
    environment = {
        **in_process.environment,
        "name": f"{in_process.environment['name']} over HTTP",
        "transport": "http",
        "client": client,
        "engine_process": isinstance(engine, RemoteEngine),
    }

    def keep(summaries: Sequence[Summary], results: dict[str, list[RunResult]]) -> None:
        if file is not None:
            http = one_object(environment, summaries, results)
            write_one_file(file, in_process.environment, in_process.summaries, in_process.results, http=http)

    with serving(engine) as url:
        endpoint = EndpointOptions(url=url, model="bench", form=form, temperature=temperature)
        prompts = Prompts(vocabulary, longest=options.workload.longest)
        target = ProcessTarget(endpoint, prompts, client=client, processes=client_processes, warms_up=True)
        try:
            if folder is not None:
                write_environment(folder / "http", environment)
            summaries, _ = run_loads(
                target,
                options,
                judge=judge_of(engine, options.workload, in_process.ceiling),
                on_summary=on_summary,
                folder=None if folder is None else folder / "http",
                keep=keep,
            )
        finally:
            target.close()
    place = "one like it in a process of its own" if isinstance(engine, RemoteEngine) else "in the server's process"
    clients = f"{client} client in {client_processes} {plural('process', client_processes)}"
    head = f"the same engine over HTTP ({place}), {clients}, times in ms"
    return "\n".join([head, format_table(summaries), *differences(in_process.summaries, summaries)]), summaries


def differences(in_process: Sequence[Summary], over_http: Sequence[Summary]) -> list[str]:
    """One line for each load: what HTTP adds."""
    before = {summary.load: summary for summary in in_process}
    lines = []
    for summary in over_http:
        if (other := before.get(summary.load)) is None or not other.tpot_ms["mean"]:
            continue
        tpot, ttft = summary.tpot_ms["mean"], summary.ttft_ms["mean"]
        lines.append(
            f"over HTTP at {summary.load.label}: TPOT {tpot / other.tpot_ms['mean'] - 1:+.1%} "
            f"({other.tpot_ms['mean']:.2f} -> {tpot:.2f} ms), TTFT {ttft - other.ttft_ms['mean']:+.1f} ms, "
            f"throughput {summary.output_tokens_per_second / other.output_tokens_per_second - 1:+.1%}"
        )
    return lines


@contextmanager
def serving(engine: MeasuredEngine) -> Iterator[str]:
    """The server of this engine, with a made-up tokenizer, on a free port of this machine; yields its URL."""
    from jaxserve.bench.random_tokenizer import plain_template, random_tokenizer
    from jaxserve.protocol.service import OpenAIService
    from jaxserve.server.app import create_app
    from jaxserve.server.connection import uvicorn_config
    from jaxserve.server.lifecycle import QuietServer
    from jaxserve.server.listener import listener

    config = ServerConfig(port=0, access_log="none")
    service = OpenAIService(engine, random_tokenizer(engine.model_config.vocab_size), plain_template(), "bench")
    with listener(config) as bound:
        settings = uvicorn_config(create_app(service, config), config)
        server = QuietServer(settings)

        def serve() -> None:
            with asyncio.Runner(loop_factory=settings.get_loop_factory()) as runner:
                runner.run(server.serve(sockets=[bound]))

        thread = threading.Thread(target=serve, name="bench-server", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
