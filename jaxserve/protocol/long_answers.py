"""Answers too long to be written in one go: lists whose items are made when they are needed, and JSON in pieces.

Millions of log probabilities would take gigabytes as objects, and seconds as one piece of JSON, in which nothing else of
the process gets on, in whatever thread that is: the encoder does not let go of the interpreter before it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

from pydantic_core import to_json

from jaxserve.protocol.responses import ResponseModel

ItemT = TypeVar("ItemT")

ITEMS_AT_ONCE = 64  # of a lazy list: a millisecond or so, where each holds 20 alternatives
PLAIN_ITEMS_AT_ONCE = 4096  # of numbers or strings
PIECE_BYTES = 64 * 1024  # of one piece of JSON, about


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
    """Whether it should be written in pieces."""
    if value is None or isinstance(value, (str, int, float)):
        return False
    if isinstance(value, ResponseModel):
        return not value.is_small and any(is_long(part) for part in vars(value).values())
    if isinstance(value, list):
        return len(value) > PLAIN_ITEMS_AT_ONCE or (_holds_models(value) and any(map(is_long, value)))
    return isinstance(value, LazyList)


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
    if not isinstance(value, (ResponseModel, list, LazyList)):
        yield to_json(value)
    elif isinstance(value, ResponseModel):
        if is_long(value):
            yield from _object(value)
        else:
            yield value.to_json().encode("utf-8")
    elif isinstance(value, list) and _holds_models(value):
        yield from _joined(b"[", (_parts(item) for item in value), b"]")
    else:
        step = ITEMS_AT_ONCE if isinstance(value, LazyList) else PLAIN_ITEMS_AT_ONCE
        slices = (value[start : start + step] for start in range(0, len(value), step))
        yield from _joined(b"[", ([to_json(items)[1:-1]] for items in slices), b"]")


def _holds_models(items: list[Any]) -> bool:
    return bool(items) and isinstance(items[0], ResponseModel)


def _object(model: ResponseModel) -> Iterator[bytes]:
    fields = model.written_fields().items()
    yield from _joined(b"{", (_field(name, value) for name, value in fields), b"}")


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
