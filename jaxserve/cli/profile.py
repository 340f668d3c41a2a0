"""`jaxserve profile` and `jaxserve bench kernels`: where the time of a step goes, and what each kernel takes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli.bench_options import at_least_one, parse_counts
from jaxserve.cli.errors import reported_errors
from jaxserve.cli.logs import configure_logging
from jaxserve.cli.options import (
    DeviceName,
    DTypeName,
    KVCacheDTypeName,
    MemoryUtilization,
    QuantizationName,
    SpeculativeConfigJson,
    SyntheticAcceptance,
    Verbose,
    read_speculative_config,
)
from jaxserve.device_memory import claim_device_memory
from jaxserve.progress_display import progress_on
from jaxserve.wording import plural

_ATTENTION = "1x1024,8x330,8x1024,16x8192,32x1024,64x330,64x1024"
_PREFILL = "256,1024,4096"
_AS_FAR = "as far as the model's max_position_embeddings go"


def profile(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for `jaxserve bench`.")],
    concurrency: Annotated[
        int, typer.Option(metavar="COUNT", callback=at_least_one, help="Sequences that decode.")
    ] = 1,
    context: Annotated[
        int, typer.Option(metavar="TOKENS", callback=at_least_one, help="In the cache of each of them, at the start.")
    ] = 400,
    steps: Annotated[int, typer.Option(metavar="COUNT", callback=at_least_one, help="That are traced.")] = 20,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="For the trace.")] = Path("profile"),
    kernels: Annotated[
        int, typer.Option(metavar="COUNT", callback=at_least_one, help="Rows of the table of kernels.")
    ] = 25,
    tensor_parallel_size: Annotated[int, typer.Option(help="Devices that share the model.")] = 1,
    quantization: QuantizationName = None,
    kv_cache_dtype: KVCacheDTypeName = "auto",
    max_num_seqs: Annotated[int | None, typer.Option(metavar="COUNT", help="Sequences that run at once.")] = None,
    max_model_len: Annotated[int | None, typer.Option(metavar="COUNT", help="Longest sequence in tokens.")] = None,
    gpu_memory_utilization: MemoryUtilization = 0.9,
    dtype: DTypeName = "auto",
    speculative_config: SpeculativeConfigJson = None,
    speculative_synthetic_acceptance: SyntheticAcceptance = None,
    device: DeviceName = "auto",
    verbose: Verbose = 0,
) -> None:
    """Trace one decode window: time and floor by paragraph of the forward pass and by kernel, host gap, Perfetto file."""
    configure_logging(verbose)
    with reported_errors(verbose):
        # Here and not at the top: it brings jax, which --help need not wait for.
        import jax.numpy as jnp

        from jaxserve.bench.engine_run import ceiling_of, devices_of, engine_config, start_engine
        from jaxserve.bench.profile import check_room, format_window, profile_decode, scope_floors
        from jaxserve.engine.build import resolve_cache_dtype

        check_room(concurrency, context + steps, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        output.mkdir(parents=True, exist_ok=True)  # what stands in its way is told before minutes of compiling
        claim_device_memory(gpu_memory_utilization, tensor_parallel_size)
        settings = {
            "tensor_parallel_size": tensor_parallel_size, "quantization": quantization,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_dtype": kv_cache_dtype, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len,
            "dtype": dtype, "device": device, "enable_prefix_caching": False,
            "speculative_config": read_speculative_config(speculative_config, speculative_synthetic_acceptance),
            "load_format": None if speculative_synthetic_acceptance is None else "dummy",
        }  # fmt: skip
        engine = start_engine(model, engine_config(settings), progress_on())
        try:
            window = profile_decode(engine, concurrency=concurrency, context=context, num_steps=steps, folder=output)
            floors = scope_floors(
                engine.model_config, jnp.dtype(engine.config.dtype), ceiling_of(engine), batch=concurrency,
                context=window.context, num_devices=devices_of(engine.config),
                cache_dtype=resolve_cache_dtype(engine.config, jnp.dtype(engine.config.dtype)),
            )  # fmt: skip
        finally:
            engine.shutdown()
        sequences = f"{concurrency} {plural('sequence', concurrency)}"
        typer.echo(f"{model}, {engine.device_kind}, {sequences} at about {window.context:.0f} tokens")
        typer.echo(format_window(window, floors, most=kernels))
        for path in sorted(output.rglob("perfetto_trace.json.gz"))[-1:]:
            typer.echo(f"trace for https://ui.perfetto.dev: {path}")


def kernels(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Architecture whose shapes are timed.")] = "llama-3-8b",
    rows: Annotated[str, typer.Option(metavar="LIST", help="Of the products, norms, sums and sampling.")] = "1,16,64",
    attention: Annotated[
        str | None,
        typer.Option(metavar="LIST", help=f"BATCHxTOKENS of decode attention; unset: {_ATTENTION}, {_AS_FAR}."),
    ] = None,
    prefill: Annotated[
        str | None, typer.Option(metavar="LIST", help=f"Tokens of prefill attention; unset: {_PREFILL}, {_AS_FAR}.")
    ] = None,
    page_size: Annotated[
        int, typer.Option(metavar="COUNT", callback=at_least_one, help="Tokens that a KV page holds.")
    ] = 16,
    quantization: QuantizationName = None,
    dtype: DTypeName = "auto",
    calls: Annotated[str, typer.Option(metavar="FEW,MANY", help="Calls of the two programs timed.")] = "4,24",
    verbose: Verbose = 0,
) -> None:
    """Time each kernel alone at a model's shapes: bytes, bandwidth, share of the measured ceiling."""
    configure_logging(verbose)
    with reported_errors(verbose):
        import jax
        import jax.numpy as jnp

        from jaxserve.bench.floor import device_ceiling
        from jaxserve.bench.kernel_cases import kernel_cases
        from jaxserve.bench.kernels import format_kernels, time_kernel
        from jaxserve.bench.records import significant
        from jaxserve.config import EngineConfig
        from jaxserve.engine.build import make_engine_mesh, peer_memory, resolve_dtype
        from jaxserve.models.presets import preset_config
        from jaxserve.quantization_config import QuantizationConfig
        from jaxserve.sharding.mesh import make_mesh

        few, many = parse_calls(calls)
        config, architecture, row_counts = EngineConfig(dtype=dtype), preset_config(model), parse_counts(rows, "--rows")
        longest = architecture.max_position_embeddings
        shapes = default_shapes(longest) if attention is None else parse_shapes(attention)
        prompts = default_prompts(longest) if prefill is None else parse_counts(prefill, "--prefill")
        element = jnp.dtype(resolve_dtype(config, make_engine_mesh(config)))
        devices = jax.devices()
        mesh = make_mesh(devices, len(devices)) if len(devices) > 1 else None
        cases = kernel_cases(
            architecture, element, rows=row_counts, attention=shapes, mesh=mesh,
            peers=None if mesh is None else peer_memory(architecture, mesh, element, max(row_counts)),
            prefill=prompts, page_size=page_size,
            quantization=None if quantization is None else QuantizationConfig.named(quantization),
        )  # fmt: skip
        device = devices[0]
        ceiling = device_ceiling(device)
        times = []
        for case in cases:
            times.append(time_kernel(case, calls=(few, many)))
            took = times[-1].microseconds
            typer.echo(f"  {case.kernel} {case.shape}: {took}{'' if took == 'noise' else ' us'}", err=True)
        typer.echo(
            f"{device.device_kind}, jax {jax.__version__}, ceiling {significant(ceiling.bandwidth / 1e9)} GB/s, "
            f"{significant(ceiling.matrix_rate / 1e12)} TFLOP/s ({ceiling.origin})"
        )
        typer.echo(format_kernels(times, ceiling))
        if mesh is None:
            typer.echo("left out: the sum over devices (all-reduce, add, norm), since there is one device only")


def parse_calls(text: str) -> tuple[int, int]:
    """Raises:
    ValueError: not two rising numbers.
    """
    counts = parse_counts(text, "--calls")
    if len(counts) != 2 or counts[0] >= counts[1]:
        raise ValueError(f"--calls {text!r} must be two rising numbers, such as 4,24")
    return counts[0], counts[1]


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """Raises:
    ValueError: not a list such as 1x1024,8x330.
    """
    shapes = []
    for part in text.split(","):
        batch, _, length = part.partition("x")
        if not (batch.isdecimal() and length.isdecimal() and int(batch) and int(length)):
            raise ValueError(f"--attention {text!r} must be a list of BATCHxTOKENS, such as 1x1024,8x330")
        shapes.append((int(batch), int(length)))
    return shapes


def default_shapes(longest: int) -> list[tuple[int, int]]:
    """Batch and tokens of decode attention for a model of so many positions at most."""
    return list(dict.fromkeys((batch, min(length, longest)) for batch, length in parse_shapes(_ATTENTION)))


def default_prompts(longest: int) -> list[int]:
    """Tokens of prefill attention, likewise."""
    return list(dict.fromkeys(min(count, longest) for count in parse_counts(_PREFILL, "--prefill")))
