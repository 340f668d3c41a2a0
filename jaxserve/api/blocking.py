"""The same calls blocking: an event loop in a thread of its own makes them."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Coroutine, Generator, Sequence
from typing import Any, Generic, Literal, TypeVar, overload

from jaxserve.api.asynchronous import (
    AsyncChatCompletions,
    AsyncCompletions,
    AsyncEngine,
    AsyncStream,
    GeneratedTokens,
    Messages,
    PromptInput,
)
from jaxserve.config import EngineConfig
from jaxserve.loop_thread import LoopThread
from jaxserve.progress import Progress
from jaxserve.protocol.engine_protocol import Stats
from jaxserve.protocol.responses import ChatCompletion, ChatCompletionChunk, Completion
from jaxserve.protocol.service import OpenAIService
from jaxserve.sampling_params import SamplingParams

ChunkT = TypeVar("ChunkT")


class Stream(Generic[ChunkT]):
    """Chunks as they come. Leaving the loop early, or closing the stream, ends the work."""

    def __init__(self, loop: LoopThread, opening: Coroutine[Any, Any, AsyncStream[ChunkT]]) -> None:
        self._loop = loop
        self._received: queue.SimpleQueue[tuple[ChunkT | None, BaseException | None]] = queue.SimpleQueue()
        self._ended = False
        # The pump knows the queue and not the stream: a stream that nobody holds any more is collected, and ends it.
        self._pump = loop.run(_start_pump(opening, self._received))

    def __iter__(self) -> Generator[ChunkT]:
        try:
            while True:
                try:
                    chunk = next(self)
                except StopIteration:
                    return
                yield chunk
        finally:
            self.close()

    def __next__(self) -> ChunkT:
        if self._ended:
            raise StopIteration
        chunk, error = self._received.get()
        if chunk is not None:
            return chunk
        self._ended = True
        raise StopIteration if error is None else error

    def close(self) -> None:
        """Ends the work, if it goes on. Safe to call again."""
        self._ended = True
        self._loop.cancel(self._pump)

    def __enter__(self) -> Stream[ChunkT]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_pump"):  # it lacks one if it was refused
            self.close()


async def _start_pump(
    opening: Coroutine[Any, Any, AsyncStream[ChunkT]],
    received: queue.SimpleQueue[tuple[ChunkT | None, BaseException | None]],
) -> asyncio.Task[None]:
    # Its first step comes before anyone can learn of the task and cancel it: so it reaches its `finally` in any case.
    return asyncio.create_task(_pump(await opening, received))


async def _pump(
    chunks: AsyncStream[ChunkT], received: queue.SimpleQueue[tuple[ChunkT | None, BaseException | None]]
) -> None:
    """What is received waits for the consumer, who may be slower."""
    try:
        async for chunk in chunks:
            received.put((chunk, None))
    except Exception as error:
        received.put((None, error))
    else:
        received.put((None, None))
    finally:
        await chunks.close()


class ChatCompletions:
    """`engine.chat.completions`."""

    def __init__(self, loop: LoopThread, calls: AsyncChatCompletions) -> None:
        self._loop = loop
        self._calls = calls

    @overload
    def create(self, *, messages: Messages, stream: Literal[False] = False, **options: Any) -> ChatCompletion: ...
    @overload
    def create(self, *, messages: Messages, stream: Literal[True], **options: Any) -> Stream[ChatCompletionChunk]: ...
    def create(
        self, *, messages: Messages, stream: bool = False, **options: Any
    ) -> ChatCompletion | Stream[ChatCompletionChunk]:
        """As `AsyncChatCompletions.create`, blocking."""
        if stream is True:
            return Stream(self._loop, self._calls.create(messages=messages, stream=True, **options))
        return self._loop.run(self._calls.create(messages=messages, stream=stream, **options))  # False, or refused


class Completions:
    """`engine.completions`."""

    def __init__(self, loop: LoopThread, calls: AsyncCompletions) -> None:
        self._loop = loop
        self._calls = calls

    @overload
    def create(self, *, prompt: PromptInput, stream: Literal[False] = False, **options: Any) -> Completion: ...
    @overload
    def create(self, *, prompt: PromptInput, stream: Literal[True], **options: Any) -> Stream[Completion]: ...
    def create(self, *, prompt: PromptInput, stream: bool = False, **options: Any) -> Completion | Stream[Completion]:
        """As `AsyncCompletions.create`, blocking."""
        if stream is True:
            return Stream(self._loop, self._calls.create(prompt=prompt, stream=True, **options))
        return self._loop.run(self._calls.create(prompt=prompt, stream=stream, **options))  # False, or refused


class Chat:
    """`engine.chat`."""

    def __init__(self, completions: ChatCompletions) -> None:
        self.completions = completions


class Engine:
    """A model loaded in this process. Calls block; any thread may make them, several at once.

    Args:
        model, config, progress: as `AsyncEngine` has them.
    """

    def __init__(
        self, model: str | OpenAIService, config: EngineConfig | None = None, *, progress: Progress | bool = False
    ) -> None:
        self._engine = AsyncEngine(model, config, progress=progress)
        self._loop = LoopThread()
        self.chat = Chat(ChatCompletions(self._loop, self._engine.chat.completions))
        self.completions = Completions(self._loop, self._engine.completions)

    @property
    def model_name(self) -> str:
        return self._engine.model_name

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self._engine.max_model_len

    def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> list[GeneratedTokens]:
        """As `AsyncEngine.generate`, blocking."""
        return self._loop.run(self._engine.generate(token_ids, sampling))

    def stats(self) -> Stats:
        """A snapshot of the engine's numbers."""
        return self._engine.stats()

    def close(self) -> None:
        """Stops the engine; what still runs fails. Safe to call again."""
        if self._loop.is_running:
            self._engine.stop()
            self._loop.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
