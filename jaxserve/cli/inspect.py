"""`jaxserve inspect`: what is in a model, and the memory that it takes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxserve.cli.errors import reported_errors
from jaxserve.cli.logs import configure_logging
from jaxserve.cli.options import QuantizationName, Verbose
from jaxserve.progress_display import amount_text, progress_on

if TYPE_CHECKING:
    from jaxserve.checkpoint.inspection import DeviceMemory, Inspection
    from jaxserve.config import ModelConfig

_SERVED_WITH = {  # which dtype `jaxserve serve` takes where none is asked for
    "bfloat16": " (serve's on a GPU; on a CPU it takes --dtype float32)",
    "float32": " (serve's on a CPU; on a GPU it takes --dtype bfloat16)",
}


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A converted folder, a Hugging Face or Meta folder, a GGUF file; a known name or hf:ORG/NAME, which are "
            "fetched as `jaxserve pull` does; or an architecture (llama-3-8b, llama-3-70b, llama-3.2-1b, a JSON file). A "
            "local folder or file counts before an architecture of that name.",
        ),
    ],
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, metavar="DEVICES", help="Devices that the model is cut across.")
    ] = 1,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(
            help="That it would run with: of weights that are not quantized, and of the KV cache. `jaxserve serve` takes "
            "bfloat16 on a GPU and float32 on a CPU; this asks no device."
        ),
    ] = "bfloat16",
    quantization: QuantizationName = None,
    verbose: Verbose = 0,
) -> None:
    """Print the config and the tensors of MODEL, their bytes, and the memory that each device would need."""
    configure_logging(verbose)
    with reported_errors(verbose):
        # Here and not at the top: it brings jax, which --help need not wait for.
        from jaxserve.checkpoint.errors import on_one_line
        from jaxserve.checkpoint.inspection import device_memory, inspect_architecture, inspect_checkpoint
        from jaxserve.models.presets import is_preset, preset_config

        if is_preset(model):
            config = _quantized(preset_config(model), quantization)
            inspection = inspect_architecture(model, config, dtype)
        else:
            inspection = inspect_checkpoint(_local_path(model))
            config = _quantized(inspection.config, quantization)
        memory = device_memory(config, tensor_parallel_size, dtype)
        for line in describe_checkpoint(inspection):
            typer.echo(on_one_line(line))
        name = None if config.quantization is None else config.quantization.name
        for line in describe_memory(memory, config.max_position_embeddings, tensor_parallel_size, dtype, name):
            typer.echo(line)


def _local_path(model: str) -> Path:
    """Where the model lies; it is fetched first where it is one that `jaxserve serve` would fetch.

    Raises:
        CheckpointError: there is none, or it cannot be fetched.
    """
    from jaxserve.checkpoint.errors import CheckpointError
    from jaxserve.checkpoint.source import KNOWN_MODELS, is_fetched, resolve_model
    from jaxserve.models.presets import preset_names

    if is_fetched(model):
        return resolve_model(model, progress_on())
    path = Path(model).expanduser()
    if not path.exists():
        names = ", ".join((*KNOWN_MODELS, *preset_names()))
        raise CheckpointError(
            f"unknown model {model!r}: give a local folder or GGUF file, a name ({names}) or hf:ORG/NAME"
        )
    return path


def _quantized(config: ModelConfig, quantization: str | None) -> ModelConfig:
    """The config of the model as an engine that is to quantize it so would hold it."""
    from jaxserve.config import EngineConfig
    from jaxserve.engine.build import wanted_quantization

    wanted = wanted_quantization(config, EngineConfig(quantization=quantization))  # pyright: ignore[reportArgumentType]
    return config if wanted is None else dataclasses.replace(config, quantization=wanted)


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


def describe_memory(
    memory: DeviceMemory, context: int, tensor_parallel_size: int, dtype: str, quantization: str | None
) -> Iterable[str]:
    """Args:
    quantization: of the weights in the device, by name; None: none.
    """
    yield ""
    weights = "" if quantization is None else f", weights {quantization}"
    held = f"{dtype}{weights}{_SERVED_WITH.get(dtype, '')}"
    yield f"memory of each device, --tensor-parallel-size {tensor_parallel_size}, {held}"
    yield f"  weights: {memory.weights:,} ({amount_text(memory.weights, 'B')})"
    per_token = memory.kv_cache_per_token
    yield f"  KV cache: {per_token:,} a token, {amount_text(per_token * context, 'B')} for {context} tokens"
