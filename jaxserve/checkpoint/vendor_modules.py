"""Which modules of a vendor's quantized checkpoint are quantized, by the patterns that its config lists."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.checkpoint.errors import CheckpointError

ALL_LINEAR = "Linear"  # a class and no name: every product with a weight
_REGULAR_EXPRESSION = "re:"
_MAX_REPEATS = 4  # in a regular expression: a checkpoint is not trusted with more of the time that a match may take


@dataclass(frozen=True)
class ModulePatterns:
    """What is quantized: modules that a target names, but for those that are left. `checked` makes one.

    A pattern is a regular expression behind "re:", which must match from a module's start on; or has stars, as file names
    have; or is a module's name, that of one that it lies in, or the last parts of its own.
    """

    targets: tuple[str, ...]
    left: tuple[str, ...]

    @staticmethod
    def checked(targets: Any, left: Any, where: str) -> ModulePatterns:
        """From the lists of a config.

        Raises:
            CheckpointError: one of them is no list of patterns, or a pattern cannot be used.
        """
        return ModulePatterns(_patterns(targets, "targets", where), _patterns(left, "ignored modules", where))

    def quantizes(self, module: str) -> bool:
        """Whether a module, such as "model.layers.0.mlp.down_proj", is quantized."""
        is_target = ALL_LINEAR in self.targets or _matches_one(self.targets, module)
        return is_target and not _matches_one(self.left, module)


def _patterns(given: Any, what: str, where: str) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(pattern, str) for pattern in given):
        raise CheckpointError(f"{where}: {what}={given!r} must be a list of names or patterns")
    for pattern in given:
        if pattern.startswith(_REGULAR_EXPRESSION):
            _check_expression(pattern, where)
    return tuple(given)


def _check_expression(pattern: str, where: str) -> None:
    expression = pattern.removeprefix(_REGULAR_EXPRESSION)
    # Repeats within repeats take a time that grows exponentially with the name's length; many in a row, as a high power.
    if re.search(r"\)[*+{]", expression) or len(re.findall(r"[*+{]", expression)) > _MAX_REPEATS:
        raise CheckpointError(
            f"{where}: the pattern {pattern!r} could take forever: list the modules' names, or use at most "
            f"{_MAX_REPEATS} repeats and no repeated groups"
        )
    try:
        re.compile(expression)
    except re.error as error:
        raise CheckpointError(f"{where}: the pattern {pattern!r} is no regular expression ({error})") from error


def _matches_one(patterns: Sequence[str], module: str) -> bool:
    return any(_matches(pattern, module) for pattern in patterns)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith(_REGULAR_EXPRESSION):
        return re.match(pattern.removeprefix(_REGULAR_EXPRESSION), module) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern)
    return f".{pattern}." in f".{module}."
