"""JSON that was written here, read back: what is foreign, damaged or cut off is told with the file and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

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
