"""Dataclasses from the JSON that they were written as: each value is of the type that its field declares, or named."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_LONGEST_SHOWN = 80  # characters of a value in a message


def from_json(kind: type[T], data: dict[str, Any], *, ignore_unknown: bool = False) -> T:
    """A dataclass from its fields: plain values, lists, tuples, dicts by texts, other dataclasses, and unions of them.

    Args:
        data: as `json.loads` gives it, with lists for tuples, or as `dataclasses.asdict` does.
        ignore_unknown: leave fields out that the dataclass has not, as a newer version may have written them; otherwise
            they are refused.

    Raises:
        ValueError: a field is missing or unknown, or its value is of another type or not one that the dataclass takes.
            The message begins with the field's name, such as "model_config.num_layers".
    """
    return _dataclass(data, kind, "", ignore_unknown)


def _dataclass(data: Any, kind: Any, place: str, ignore_unknown: bool) -> Any:
    if not isinstance(data, dict):
        raise _wrong(place or "it", data, kind)
    fields, hints = dataclasses.fields(kind), _hints(kind)
    unknown = sorted(set(data) - {field.name for field in fields})
    if unknown and not ignore_unknown:
        raise ValueError(f"{_joined(place, unknown[0])} is not known: made by a newer version of jaxserve?")
    values: dict[str, Any] = {}
    for field in fields:
        name = _joined(place, field.name)
        if field.name in data:
            values[field.name] = _value(data[field.name], hints[field.name], name, ignore_unknown)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name} is missing")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{place}: {error}" if place else str(error)) from error


def _value(value: Any, kind: Any, place: str, ignore_unknown: bool) -> Any:
    """The value as a field of that type holds it."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(value, kind, place, ignore_unknown)
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = parts[:1] * len(value) if parts[1:] == (...,) else parts
        if len(kinds) == len(value):
            return tuple(_items(value, kinds, place, ignore_unknown))
    elif origin is list and isinstance(value, list):
        return _items(value, parts * len(value), place, ignore_unknown)
    elif origin is dict and isinstance(value, dict):
        return {key: _value(part, parts[1], f"{place}[{key!r}]", ignore_unknown) for key, part in value.items()}
    elif dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else _dataclass(value, kind, place, ignore_unknown)  # pyright: ignore[reportArgumentType]
    elif _is_plain(value, kind):
        return value
    raise _wrong(place, value, kind)


def _one_of(value: Any, union: Any, place: str, ignore_unknown: bool) -> Any:
    kinds = [kind for kind in get_args(union) if kind is not types.NoneType]
    if value is None and len(kinds) < len(get_args(union)):
        return None
    if len(kinds) == 1 and dataclasses.is_dataclass(kinds[0]) and isinstance(value, dict):
        return _value(value, kinds[0], place, ignore_unknown)  # tells which of its fields is wrong
    for kind in kinds:
        try:
            return _value(value, kind, place, ignore_unknown)
        except ValueError:
            continue
    raise _wrong(place, value, union)


def _items(values: Any, kinds: Any, place: str, ignore_unknown: bool) -> list[Any]:
    pairs = enumerate(zip(values, kinds, strict=True))
    return [_value(value, kind, f"{place}[{index}]", ignore_unknown) for index, (value, kind) in pairs]


def _is_plain(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:  # JSON's whole numbers may be too long for one
        return isinstance(value, float) or (_is_plain(value, int) and abs(value) < 1 << 1023)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind is Any or (isinstance(kind, type) and isinstance(value, kind))


def _wrong(place: str, value: Any, kind: Any) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= _LONGEST_SHOWN else shown[:_LONGEST_SHOWN] + "..."
    return ValueError(f"{place}={shown} must be {_described(kind)}")


def _described(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_described, parts))
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (list, tuple):
        return "a list" if origin is list or parts[1:] == (...,) else f"a list of {len(parts)}"
    if origin is dict or dataclasses.is_dataclass(kind):
        return "an object"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "null"}
    return names.get(kind, str(kind))


def _joined(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
