"""Values of a model's config file, checked for what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.errors import CheckpointError


def whole_number(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{where}: {key}={value!r} must be a whole number")
    return value


def number(config: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CheckpointError(f"{where}: {key}={value!r} must be a number")
    return float(value)


def numbers(config: Mapping[str, Any], key: str, where: str) -> tuple[float, ...]:
    values = config.get(key)
    if not isinstance(values, list) or any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in values):
        raise CheckpointError(f"{where}: {key}={values!r} must be a list of numbers")
    return tuple(map(float, values))
