"""`jaxserve serve`: a model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxserve.cli.errors import reported_errors
from jaxserve.cli.logs import configure_logging
from jaxserve.cli.options import (
    DEFAULT_MODEL,
    DeviceName,
    DTypeName,
    MaxModelLen,
    MemoryUtilization,
    Model,
    NumPages,
    PageSize,
    Verbose,
)
from jaxserve.cli.progress import progress_on
from jaxserve.config import EngineConfig, ServerConfig

_ENGINE = EngineConfig()
_SERVER = ServerConfig()


def serve(
    model: Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0: all.")] = _SERVER.host,
    port: Annotated[int, typer.Option(metavar="PORT", help="Port to listen on; 0: any free one.")] = _SERVER.port,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(metavar="COUNT", help="Answers that are generated at once; unset: what suits the device."),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Tokens that one step computes at most; unset: what suits the device."),
    ] = None,
    max_num_queued_requests: Annotated[
        int, typer.Option(metavar="COUNT", help="Requests that may wait; one more is refused.")
    ] = _ENGINE.max_num_queued_requests,
    max_num_queued_tokens: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Prompt tokens that may wait; a request with more is refused. Unset: any."),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(metavar="COUNT", help="Devices that the model is cut across.")
    ] = _ENGINE.tensor_parallel_size,
    gpu_memory_utilization: MemoryUtilization = _ENGINE.gpu_memory_utilization,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", envvar="JAXSERVE_API_KEY", show_envvar=True,
            help="Key that clients must send; may be given several times. Unset: none is asked for.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name that clients ask for; unset: MODEL as given.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Of requests that bring none; unset: drawn at random.")
    ] = None,
    dtype: DTypeName = "auto",
    page_size: PageSize = _ENGINE.page_size,
    num_pages: NumPages = None,
    device: DeviceName = "auto",
    shutdown_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="What running answers get to end in after SIGTERM.")
    ] = _SERVER.shutdown_timeout,
    verbose: Verbose = 0,
) -> None:  # fmt: skip
    """Serve MODEL over HTTP, the way OpenAI's API does."""
    configure_logging(verbose, shown=("jaxserve.server",))  # where it listens, when it is ready, how it ends
    with reported_errors(verbose):
        engine_config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            num_pages=num_pages,
            gpu_memory_utilization=gpu_memory_utilization,
            dtype=dtype,
            seed=seed,
            device=device,
            tensor_parallel_size=tensor_parallel_size,
            max_num_queued_requests=max_num_queued_requests,
            max_num_queued_tokens=max_num_queued_tokens,
        )
        server_config = ServerConfig(
            host=host,
            port=port,
            api_keys=tuple(api_key or ()),
            served_model_name=served_model_name,
            shutdown_timeout=shutdown_timeout,
        )
        # Here and not at the top: it brings jax, which --help need not wait for.
        from jaxserve.server.run import serve as run_server

        raise typer.Exit(run_server(model, engine_config, server_config, progress_on()))
