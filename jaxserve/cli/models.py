"""`jaxserve pull` and `jaxserve convert`: models on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from jaxserve.cli.errors import reported_errors
from jaxserve.cli.logs import configure_logging
from jaxserve.cli.options import DEFAULT_MODEL, Model, Verbose
from jaxserve.cli.progress import progress_on


def pull(model: Model = DEFAULT_MODEL, verbose: Verbose = 0) -> None:
    """Fetch MODEL into the model cache, converted, and print the folder it lies in.

    The cache is in $JAXSERVE_HOME (default: ~/.cache/jaxserve).
    """
    configure_logging(verbose)
    with reported_errors(verbose):
        from jaxserve.checkpoint.source import resolve_model  # here: it brings jax, which --help need not wait for

        typer.echo(resolve_model(model, progress_on()))


def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A Hugging Face folder or a GGUF file.")],
    destination: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to make; it must not exist.")],
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of the weights; auto: as SOURCE has them, and float32 where they are quantized."),
    ] = "auto",
    quantization: Annotated[
        Literal["fp8", "fp8-weight-only", "int8", "int4", "int4-32"] | None,
        typer.Option(help="What the layers' weights are made into; unset: they stay as they are."),
    ] = None,
    verbose: Verbose = 0,
) -> None:
    """Convert SOURCE into a FOLDER that loads faster; `jaxserve serve FOLDER` then serves it."""
    configure_logging(verbose)
    with reported_errors(verbose):
        # Here and not at the top, as above; by another name, since this command has that one.
        from jaxserve.checkpoint.convert import convert as convert_checkpoint
        from jaxserve.checkpoint.quantize import quantization_step

        step = quantization_step(quantization)
        typer.echo(convert_checkpoint(source, destination, dtype=dtype, step=step, progress=progress_on()))
