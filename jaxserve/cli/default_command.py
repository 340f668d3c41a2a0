"""A group of commands, one of which is meant where none is named."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class GroupWithDefault(TyperGroup):
    """`bench MODEL ...` is `bench run MODEL ...`: the first argument names another command, or `run` is meant."""

    default_command = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)
