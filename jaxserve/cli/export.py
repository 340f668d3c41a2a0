"""`jaxserve export`: a converted checkpoint back to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli.errors import reported_errors
from jaxserve.cli.logs import configure_logging
from jaxserve.cli.options import Verbose
from jaxserve.progress_display import progress_on


def export(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A folder that `jaxserve convert` made.")],
    destination: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to make; it must not exist.")],
    verbose: Verbose = 0,
) -> None:
    """Write SOURCE as a Hugging Face folder with safetensors: the bits that it was converted from."""
    configure_logging(verbose)
    with reported_errors(verbose):
        import jax  # here and not at the top: --help need not wait for it

        from jaxserve.checkpoint.export import export as export_checkpoint

        jax.config.update("jax_platforms", "cpu")  # a GPU may be at work for somebody else, and nothing here needs one
        typer.echo(export_checkpoint(source, destination, progress=progress_on()))
