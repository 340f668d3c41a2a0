"""`jaxserve pull`: a model into the cache."""

from __future__ import annotations

import typer

from jaxserve.cli.errors import reported_errors
from jaxserve.cli.logs import configure_logging
from jaxserve.cli.options import DEFAULT_MODEL, Model, Verbose
from jaxserve.progress_display import progress_on


def pull(model: Model = DEFAULT_MODEL, verbose: Verbose = 0) -> None:
    """Fetch MODEL into the model cache, converted, and print the folder it lies in.

    The cache is in $JAXSERVE_HOME (default: ~/.cache/jaxserve).
    """
    configure_logging(verbose)
    with reported_errors(verbose):
        from jaxserve.checkpoint.source import resolve_model  # here: it brings jax, which --help need not wait for

        typer.echo(resolve_model(model, progress_on()))
