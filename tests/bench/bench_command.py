"""`jaxserve bench` in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from jaxserve.cli.main import build_app


def bench(*arguments: str) -> tuple[int, str]:
    """Its exit code, and what it says on stdout and stderr."""
    result = CliRunner().invoke(build_app(), ["bench", *arguments])
    return result.exit_code, result.output
