"""One streamed answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Generic, TypeVar

from jaxserve.protocol.assembly import Answer

ChunkT = TypeVar("ChunkT", covariant=True)


class ChunkStream(Generic[ChunkT]):
    """Chunks of one streamed answer. Close it (or run it to its end): that ends what still runs in the engine.

    A class and not a bare generator, since closing a generator that was never started would free nothing.

    Attributes:
        may_be_long: a chunk may hold more than text that was just generated.
    """

    def __init__(self, answer: Answer, chunks: AsyncGenerator[ChunkT]) -> None:
        self.may_be_long = bool(answer.logprobs or answer.echoes or answer.id.startswith("resp_"))
        self._answer = answer
        self._chunks = chunks

    def __aiter__(self) -> AsyncIterator[ChunkT]:
        return self

    async def __anext__(self) -> ChunkT:
        return await self._chunks.__anext__()

    async def aclose(self) -> None:
        await self._chunks.aclose()
        await self._answer.aclose()
