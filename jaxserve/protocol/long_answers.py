"""Answers too long to be written in one go: lists whose items are made when they are needed, and JSON in pieces.

Millions of log probabilities would take gigabytes as objects, and seconds as one piece of JSON, in which nothing else of
the process gets on, in whatever thread that is: the encoder does not let go of the interpreter before it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

from pydantic_core import to_json

from jaxserve.protocol.responses import ResponseModel

ItemT = TypeVar("ItemT")

ITEMS_AT_ONCE = 64  # of a lazy list: a millisecond or so, where each holds 20 alternatives
PLAIN_ITEMS_AT_ONCE = 4096  # of numbers or strings
PIECE_BYTES = 64 * 1024  # of one piece of JSON, about
_VALUE_BYTES = 16  # of a number and the like, about
_SMALL_BYTES = 1024  # of a small part


class LazyList(Sequence[ItemT]):
    """What `write` makes of each of `items`, anew each time it is asked for.

    It stands where a response has a list, and only `json_pieces` can write it: pydantic refuses to.
    """

    def __init__(self, items: Sequence[Any], write: Callable[[Any], ItemT]) -> None:
        self._items = items
        self._write = write

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> ItemT: ...

    @overload
    def __getitem__(self, index: slice) -> list[ItemT]: ...

    def __getitem__(self, index: int | slice) -> ItemT | list[ItemT]:
        if isinstance(index, slice):
            return [self._write(item) for item in self._items[index]]
        return self._write(self._items[index])


def is_long(value: object) -> bool:
    """Whether it should be written in pieces. Looks at no more than would make it so."""
    return _bytes_left(value, PIECE_BYTES) < 0


def _bytes_left(value: object, limit: int) -> int:
    """The limit less what the value takes, about; it is looked at until that is below 0."""
    if isinstance(value, str):
        return limit - len(value)
    if value is None or isinstance(value, (int, float)):  # early, for the classes below take long to tell
        return limit - _VALUE_BYTES
    if isinstance(value, (list, tuple)):
        return _all_left(value, limit) if value else limit
    if isinstance(value, dict):
        return _all_left(value.values(), _all_left(value, limit))
    if isinstance(value, ResponseModel):
        return limit - _SMALL_BYTES if value.is_small else _all_left(vars(value).values(), limit)
    return -1 if isinstance(value, LazyList) else limit - _VALUE_BYTES


def _all_left(values: Iterable[object], limit: int) -> int:
    for value in values:
        if limit < 0:
            break
        limit = _bytes_left(value, limit)
    return limit


def json_pieces(value: object) -> Iterator[bytes]:
    """JSON of a response, in pieces of about `PIECE_BYTES` each, of which none holds up other threads."""
    piece = bytearray()
    for part in _parts(value):
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def _parts(value: object) -> Iterator[bytes]:
    if isinstance(value, LazyList):
        slices = (value[start : start + ITEMS_AT_ONCE] for start in range(0, len(value), ITEMS_AT_ONCE))
        yield from _joined(b"[", ([to_json(items)[1:-1]] for items in slices), b"]")
    elif not is_long(value):
        yield value.to_json().encode("utf-8") if isinstance(value, ResponseModel) else to_json(value)
    elif isinstance(value, ResponseModel):
        fields = value.written_fields().items()
        yield from _joined(b"{", (_field(name, part) for name, part in fields), b"}")
    elif isinstance(value, dict):
        yield from _joined(b"{", (_field(name, part) for name, part in value.items()), b"}")
    elif isinstance(value, list):
        yield from _joined(b"[", _items(value), b"]")
    elif isinstance(value, str):
        starts = range(0, len(value), PIECE_BYTES)
        yield from (b'"', *(to_json(value[start : start + PIECE_BYTES])[1:-1] for start in starts), b'"')
    else:
        yield to_json(value)


def _items(values: list[Any]) -> Iterator[Iterator[bytes]] | Iterator[list[bytes]]:
    if any(isinstance(value, (ResponseModel, list, dict)) or is_long(value) for value in values):
        return (_parts(value) for value in values)
    starts = range(0, len(values), PLAIN_ITEMS_AT_ONCE)
    return ([to_json(values[start : start + PLAIN_ITEMS_AT_ONCE])[1:-1]] for start in starts)


def _field(name: str, value: object) -> Iterator[bytes]:
    yield to_json(name) + b":"
    yield from _parts(value)


def _joined(start: bytes, items: Iterator[Iterator[bytes]] | Iterator[list[bytes]], end: bytes) -> Iterator[bytes]:
    yield start
    for number, item in enumerate(items):
        if number:
            yield b","
        yield from item
    yield end
