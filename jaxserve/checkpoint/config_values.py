"""Values of a model's config file, checked for what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

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
    if not _is_number(value):
        raise CheckpointError(f"{where}: {key}={value!r} must be a number")
    return float(value)


def numbers(config: Mapping[str, Any], key: str, where: str) -> tuple[float, ...]:
    values = config.get(key)
    if not isinstance(values, list) or not all(map(_is_number, values)):
        raise CheckpointError(f"{where}: {key}={values!r} must be a list of numbers")
    return tuple(map(float, values))


def flag(config: Mapping[str, Any], key: str, where: str, default: bool = False) -> bool:
    """Not what Python takes for true: the text "false" would be."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}: {key}={value!r} must be true or false")
    return value


def _is_number(value: Any) -> TypeGuard[float]:
    """Also whether a float can hold it: JSON's whole numbers may have any length."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) < 1 << 1023
