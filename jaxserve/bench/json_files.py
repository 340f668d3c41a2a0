"""JSON that was written here, read back: what is foreign, damaged or cut off is told with the file and what is wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def read_json(path: Path, make: Callable[[dict[str, Any]], T] = lambda data: data) -> T:
    """What `make` makes of a file's JSON object.

    Raises:
        ValueError: the file holds none, or one that `make` refuses.
        OSError: it cannot be read.
    """
    return _parsed(path.read_bytes(), make, str(path))


def read_json_lines(path: Path, make: Callable[[dict[str, Any]], T]) -> list[T]:
    """As `read_json`, of a file with an object on each line."""
    lines = path.read_bytes().splitlines()
    return [_parsed(line, make, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _parsed(text: bytes, make: Callable[[dict[str, Any]], T], place: str) -> T:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is no whole JSON ({error}): was it cut off?") from error
    if not isinstance(data, dict):
        raise ValueError(f"{place} holds no JSON object")
    try:
        return make(data)
    except ValueError as error:
        raise ValueError(f"{place} is not what `jaxserve bench` writes: {error}") from error


def from_json(kind: type[T], data: dict[str, Any]) -> T:
    """A dataclass from its fields; others are left out, as a newer version may have written them.

    Raises:
        ValueError: a field is missing, or its value is of another type.
    """
    hints = _hints(kind)
    values = {}
    for field in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType] - kind is a dataclass
        if field.name in data:
            value = data[field.name]
            if not _fits(value, hints[field.name]):
                raise ValueError(f"{field.name} is {str(value)[:40]!r}")
            values[field.name] = value
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{field.name} is missing")
    return kind(**values)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: object, kind: Any) -> bool:
    """Whether a value is of a type, as far as dataclasses here have fields of such."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is list:
        return isinstance(value, list) and all(_fits(part, parts[0]) for part in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(part, parts[1]) for part in value.values())
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return kind is Any or isinstance(value, kind)
