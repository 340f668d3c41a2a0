"""`jaxserve convert`: a model in any format into a folder that loads fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from jaxserve.cli.errors import reported_errors
from jaxserve.cli.logs import configure_logging
from jaxserve.cli.options import Verbose
from jaxserve.progress_display import progress_on


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A Hugging Face folder, a folder in Meta's layout (params.json), or a GGUF file; or a known name "
            "or hf:ORG/NAME, which are fetched first.",
        ),
    ],
    destination: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to make; it must not exist.")],
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of the weights; auto: as SOURCE has them, and float32 where they are quantized."),
    ] = "auto",
    quantization: Annotated[
        Literal["fp8", "fp8-weight-only", "int8", "int4", "int4-32"] | None,
        typer.Option(help="What the layers' weights are made into; unset: they stay as they are."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with what an earlier run left, killed or failed, and leave what is done if this one fails.",
        ),
    ] = False,
    verbose: Verbose = 0,
) -> None:
    """Convert SOURCE into a FOLDER that loads faster; `jaxserve serve FOLDER` then serves it."""
    configure_logging(verbose)
    with reported_errors(verbose):
        # Here and not at the top: they bring jax, which --help need not wait for.
        import jax

        from jaxserve.checkpoint.quantize import quantization_step
        from jaxserve.checkpoint.source import convert_model

        jax.config.update("jax_platforms", "cpu")  # a GPU may be at work for somebody else, and nothing here needs one
        step = quantization_step(quantization)
        typer.echo(convert_model(source, destination, dtype=dtype, step=step, resume=resume, progress=progress_on()))
