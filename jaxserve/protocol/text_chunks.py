"""Chunks of a stream that bring nothing but text: most of them, and the same but for the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from json.encoder import encode_basestring

from jaxserve.protocol.responses import ResponseModel

_PLACE = "\ue000\ue001"  # stands for the text; between quotes that are not escaped it is in no other part


@dataclass(frozen=True)
class WrittenChunk:
    """A chunk that is JSON already."""

    json: str


class TextChunks:
    """Writes such chunks of one answer. The JSON around a choice's text is made once, of a chunk as it is otherwise.

    A chunk takes a third of a microsecond in place of ten or more.

    Args:
        make: the chunk of a choice with this text.
    """

    def __init__(self, make: Callable[[int, str], ResponseModel]) -> None:
        self._make = make
        self._around: dict[int, tuple[str, str]] = {}  # by choice

    def chunk(self, index: int, text: str) -> WrittenChunk:
        around = self._around.get(index)
        if around is None:
            around = self._around[index] = self._parts(index)
        return WrittenChunk(f"{around[0]}{encode_basestring(text)}{around[1]}")

    def _parts(self, index: int) -> tuple[str, str]:
        before, after = self._make(index, _PLACE).to_json().split(f'"{_PLACE}"')
        return before, after
