"""`jaxserve chat`: a conversation with a model, in a terminal or through a pipe."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from jaxserve.cli.chat_screen import run_lines, run_terminal
from jaxserve.cli.chat_session import ChatSession
from jaxserve.cli.chat_settings import ChatSettings
from jaxserve.cli.errors import reported_errors
from jaxserve.cli.logs import configure_logging
from jaxserve.cli.options import (
    DEFAULT_MODEL,
    DeviceName,
    DTypeName,
    KVCacheDTypeName,
    MaxModelLen,
    MemoryUtilization,
    Model,
    NumPages,
    PageSize,
    QuantizationName,
    SpeculativeConfigJson,
    Verbose,
    read_speculative_config,
)
from jaxserve.config import EngineConfig
from jaxserve.device_memory import claim_device_memory
from jaxserve.progress_display import progress_on

_SETTINGS = ChatSettings()
_ENGINE = EngineConfig()

# One person, one answer at a time: few programs to compile, so the prompt is there soon.
MAX_NUM_SEQS = 1
MAX_NUM_BATCHED_TOKENS = 256


def chat(
    model: Model = DEFAULT_MODEL,
    system_prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model is told before the first question.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(metavar="NUMBER", help="0: always the most likely token; up to 2.")
    ] = _SETTINGS.temperature,
    top_p: Annotated[
        float, typer.Option(metavar="SHARE", help="Draw from the likeliest tokens that make up this share.")
    ] = _SETTINGS.top_p,
    top_k: Annotated[
        int, typer.Option(metavar="COUNT", help="Draw from this many likeliest tokens; 0: all.")
    ] = _SETTINGS.top_k,
    min_p: Annotated[
        float, typer.Option(metavar="SHARE", help="Draw from tokens at least this share as likely as the likeliest.")
    ] = _SETTINGS.min_p,
    seed: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="The same seed gives the same answers; unset: random.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Of an answer at most; unset: what the context has room for.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text that ends an answer; may be given several times.")
    ] = None,
    max_model_len: MaxModelLen = None,
    gpu_memory_utilization: MemoryUtilization = _ENGINE.gpu_memory_utilization,
    dtype: DTypeName = "auto",
    quantization: QuantizationName = None,
    kv_cache_dtype: KVCacheDTypeName = "auto",
    page_size: PageSize = _ENGINE.page_size,
    num_pages: NumPages = None,
    speculative_config: SpeculativeConfigJson = None,
    device: DeviceName = "auto",
    verbose: Verbose = 0,
) -> None:
    """Talk to MODEL. In the chat, /help lists what can be done; each line of a pipe is a message."""
    configure_logging(verbose)
    with reported_errors(verbose):
        settings = ChatSettings(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            max_tokens=max_tokens,
            stop=tuple(stop or ()),
        )
        config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            page_size=page_size,
            num_pages=num_pages,
            gpu_memory_utilization=gpu_memory_utilization,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            speculative_config=read_speculative_config(speculative_config),
            device=device,
        )
        claim_device_memory(config.gpu_memory_utilization)
        run_chat(model, config, settings, system_prompt)


def run_chat(model: str, config: EngineConfig, settings: ChatSettings, system_prompt: str | None) -> None:
    """Loads the model, and talks until the person leaves or the input ends."""
    # Here and not at the top: they bring jax, which --help need not wait for.
    from jaxserve.cli.chat_backend import ServiceBackend
    from jaxserve.protocol.launch import launch

    service = launch(model, config, progress_on())
    try:
        session = ChatSession(ServiceBackend(service), settings, system_prompt)
        greeting = (
            f"{model} on {service.engine.device_kind}, {service.engine.max_model_len} tokens of context. "
            "/help lists what can be done."
        )
        asyncio.run(talk(session, greeting))
    finally:
        service.close()


async def talk(session: ChatSession, greeting: str) -> None:
    """In the terminal, if there is one at both ends; line by line otherwise."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        await run_terminal(session, greeting)
        return
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue] - they are TextIOWrappers
    await run_lines(session, sys.stdin, sys.stdout, sys.stderr)
