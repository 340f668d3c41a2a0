"""`jaxserve inspect`: what is in a checkpoint, and the memory that it takes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxserve.cli.errors import reported_errors
from jaxserve.cli.logs import configure_logging
from jaxserve.cli.options import Verbose
from jaxserve.progress_display import amount_text

if TYPE_CHECKING:
    from jaxserve.checkpoint.inspection import DeviceMemory, Inspection


def inspect(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A converted folder, a Hugging Face or Meta folder, or a GGUF file."),
    ],
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, metavar="DEVICES", help="Devices that the model is cut across.")
    ] = 1,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="That it would run with: of weights that are not quantized, and of the KV cache."),
    ] = "bfloat16",
    verbose: Verbose = 0,
) -> None:
    """Print the config and the tensors of PATH, their bytes, and the memory that each device would need."""
    configure_logging(verbose)
    with reported_errors(verbose):
        # Here and not at the top: it brings jax, which --help need not wait for.
        from jaxserve.checkpoint.inspection import device_memory, inspect_checkpoint

        inspection = inspect_checkpoint(path)
        memory = device_memory(inspection.config, tensor_parallel_size, dtype)
        context = inspection.config.max_position_embeddings
        for line in describe_checkpoint(inspection):
            typer.echo(line)
        for line in describe_memory(memory, context, tensor_parallel_size, dtype):
            typer.echo(line)


def describe_checkpoint(inspection: Inspection) -> Iterable[str]:
    made_from = f", made from {inspection.source}" if inspection.form == "converted" else ""
    yield f"{inspection.name}: {inspection.architecture}, {inspection.form}{made_from}"
    yield ""
    yield "config"
    for key, value in inspection.config.to_json().items():
        yield f"  {key} = {value}"
    yield ""
    yield "tensors"
    counts: dict[tuple[str, str], int] = {}
    for name, info in inspection.arrays.items():
        # Layers are alike: one line for all of them.
        kind = (re.sub(r"\d+", "*", name, count=1), f"{list(info.shape)} {info.dtype}")
        counts[kind] = counts.get(kind, 0) + 1
    for (name, shape), count in counts.items():
        yield f"  {name}  {shape}{f'  ({count} times)' if count > 1 else ''}"
    yield ""
    yield "bytes"
    sizes = inspection.bytes_by_dtype()
    for dtype, size in sizes.items():
        yield f"  {dtype}: {size:,} ({amount_text(size, 'B')})"
    yield f"  all {len(inspection.arrays)} tensors: {sum(sizes.values()):,} ({amount_text(sum(sizes.values()), 'B')})"


def describe_memory(memory: DeviceMemory, context: int, tensor_parallel_size: int, dtype: str) -> Iterable[str]:
    yield ""
    yield f"memory of each device, --tensor-parallel-size {tensor_parallel_size}, {dtype}"
    yield f"  weights: {memory.weights:,} ({amount_text(memory.weights, 'B')})"
    per_token = memory.kv_cache_per_token
    yield f"  KV cache: {per_token:,} a token, {amount_text(per_token * context, 'B')} for {context} tokens"
