"""Entry point of the `jaxserve` command: which commands there are. Each lives in a module of its own."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Annotated

import typer

from jaxserve.cli.bench import build_bench
from jaxserve.cli.chat import chat
from jaxserve.cli.convert import convert
from jaxserve.cli.export import export
from jaxserve.cli.inspect import inspect
from jaxserve.cli.profile import profile
from jaxserve.cli.pull import pull
from jaxserve.cli.serve import serve
from jaxserve.cli.top import top


def version_text() -> str:
    """Versions that a bug report needs, found without importing the packages."""
    lines = [f"{name} {installed_version(name)}" for name in ("jaxserve", "jax", "jaxlib")]
    return "\n".join([*lines, f"python {platform.python_version()}"])


def installed_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # such as jaxserve run from a checkout that was never installed
        return "(not installed)"


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version_text())
        raise typer.Exit


def version() -> None:
    """Print the versions of jaxserve, jax and Python."""
    typer.echo(version_text())


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print versions and leave.")
    ] = False,
) -> None:
    """Serve Llama-family language models with JAX."""


def build_app() -> typer.Typer:
    # Plain texts and tracebacks: what is printed can be grepped and pasted.
    app = typer.Typer(
        name="jaxserve",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(options)
    for command in (chat, serve, pull, convert, export, inspect, profile, top, version):
        app.command()(command)
    app.add_typer(build_bench())
    return app


def main() -> None:
    """Runs the command line in sys.argv, and exits."""
    build_app()(prog_name="jaxserve")
