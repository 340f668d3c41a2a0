"""The calls awaited, on the caller's event loop."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, overload

from pydantic_core import PydanticSerializationError, from_json, to_json

from jaxserve.config import EngineConfig
from jaxserve.engine.request import EngineStoppedError, FinishReason, QueueFullError, RequestError, TokenLogprobs
from jaxserve.progress import NoProgress, Progress
from jaxserve.progress_display import progress_on
from jaxserve.protocol.chunk_stream import ChunkStream
from jaxserve.protocol.engine_protocol import Stats
from jaxserve.protocol.errors import BadRequestError, from_engine_error, from_error_output
from jaxserve.protocol.launch import launch
from jaxserve.protocol.parsed import class_of, with_parsed, with_schema
from jaxserve.protocol.parsing import parse_chat_request, parse_completion_request
from jaxserve.protocol.responses import ChatCompletion, ChatCompletionChunk, Completion
from jaxserve.protocol.service import OpenAIService
from jaxserve.sampling_params import SamplingParams

ChunkT = TypeVar("ChunkT")
ResultT = TypeVar("ResultT")
Messages = Iterable[Mapping[str, Any] | Any]  # dicts, or messages that came out of a response
PromptInput = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class GeneratedTokens:
    """One choice of `generate`: its new token ids (a stop token included) and why it ended.

    Attributes:
        logprobs: of each new token, if the sampling parameters ask for them.
        prompt_logprobs: of each prompt token, if they do; the first is None.
    """

    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class AsyncStream(Generic[ChunkT]):
    """Chunks as they come. Leaving the loop early, or closing the stream, ends the work."""

    def __init__(self, chunks: ChunkStream[ChunkT]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncGenerator[ChunkT]:
        try:
            async for chunk in self._chunks:
                yield chunk
        finally:
            await self._chunks.aclose()

    async def __anext__(self) -> ChunkT:
        return await self._chunks.__anext__()

    async def close(self) -> None:
        await self._chunks.aclose()

    async def __aenter__(self) -> AsyncStream[ChunkT]:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class AsyncChatCompletions:
    """`engine.chat.completions`."""

    def __init__(self, service: OpenAIService) -> None:
        self._service = service

    @overload
    async def create(self, *, messages: Messages, stream: Literal[False] = False, **options: Any) -> ChatCompletion: ...
    @overload
    async def create(
        self, *, messages: Messages, stream: Literal[True], **options: Any
    ) -> AsyncStream[ChatCompletionChunk]: ...
    async def create(
        self, *, messages: Messages, stream: bool = False, **options: Any
    ) -> ChatCompletion | AsyncStream[ChatCompletionChunk]:
        """Answers a conversation.

        Args:
            options: fields of POST /v1/chat/completions, such as `max_tokens`, `temperature`, `stop`, `n`, `seed`. As
                `response_format` a pydantic class will do: then answers that are whole have `message.parsed`.

        Raises:
            ApiError: `BadRequestError` for a wrong option, `RateLimitError` for a full queue, and so on.
        """
        wanted = class_of(options)
        if wanted is not None:
            options = with_schema(options, wanted)
        request = parse_chat_request(_as_json({"messages": list(messages), "stream": stream, **options}))
        if request.stream:
            return AsyncStream(await self._service.chat_completion_stream(request))
        completion = await self._service.chat_completion(request)
        return completion if wanted is None else with_parsed(completion, wanted)


class AsyncCompletions:
    """`engine.completions`."""

    def __init__(self, service: OpenAIService) -> None:
        self._service = service

    @overload
    async def create(self, *, prompt: PromptInput, stream: Literal[False] = False, **options: Any) -> Completion: ...
    @overload
    async def create(
        self, *, prompt: PromptInput, stream: Literal[True], **options: Any
    ) -> AsyncStream[Completion]: ...
    async def create(
        self, *, prompt: PromptInput, stream: bool = False, **options: Any
    ) -> Completion | AsyncStream[Completion]:
        """Continues a prompt (text or token ids), or several.

        Args:
            options: fields of POST /v1/completions, such as `max_tokens` (16 unless given), `stop`, `echo`.

        Raises:
            ApiError: as `chat.completions.create`.
        """
        request = parse_completion_request(_as_json({"prompt": prompt, "stream": stream, **options}))
        if request.stream:
            return AsyncStream(await self._service.completion_stream(request))
        return await self._service.completion(request)


class AsyncChat:
    """`engine.chat`."""

    def __init__(self, completions: AsyncChatCompletions) -> None:
        self.completions = completions


class AsyncEngine:
    """A model loaded in this process, for code on an event loop.

    Args:
        model: a known name, a local folder or file, "hf:ORG/NAME"; or a service that was launched already.
        config: how the engine runs it.
        progress: True: how far loading is, on stderr, as the commands show it; or what shows it; False: nothing is shown.

    Building one loads and compiles, which blocks for seconds to minutes: do it before the event loop has other work.
    """

    def __init__(
        self, model: str | OpenAIService, config: EngineConfig | None = None, *, progress: Progress | bool = False
    ) -> None:
        self._service = (
            model if isinstance(model, OpenAIService) else launch(model, config or EngineConfig(), _shown(progress))
        )
        # An interpreter that ends around a thread inside the device's runtime crashes, so the engine stops before that.
        atexit.register(self._service.close)
        self.chat = AsyncChat(AsyncChatCompletions(self._service))
        self.completions = AsyncCompletions(self._service)

    @property
    def model_name(self) -> str:
        return self._service.model_name

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self._service.engine.max_model_len

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> list[GeneratedTokens]:
        """Continues token ids, without any text in between; one result for each of `sampling.n` choices.

        Raises:
            ApiError: the prompt is refused, the queue is full, or the engine fails.
        """
        try:
            stream = self._service.engine.submit(token_ids, sampling)
        except (RequestError, QueueFullError, EngineStoppedError) as error:
            raise from_engine_error(error) from error
        new_tokens: list[list[int]] = [[] for _ in range(sampling.n)]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in range(sampling.n)]
        of_prompt: tuple[TokenLogprobs | None, ...] | None = None
        reasons: dict[int, FinishReason] = {}
        try:
            async for output in stream:
                new_tokens[output.index].extend(output.token_ids)
                logprobs[output.index].extend(output.logprobs or ())
                of_prompt = output.prompt_logprobs or of_prompt
                if output.finish_reason == "error":
                    raise from_error_output(output)
                if output.finish_reason is not None:
                    reasons[output.index] = output.finish_reason
        finally:
            await stream.aclose()
        return [
            GeneratedTokens(
                index,
                tuple(new_tokens[index]),
                reasons[index],
                logprobs=None if sampling.logprobs is None else tuple(logprobs[index]),
                prompt_logprobs=of_prompt,
            )
            for index in range(sampling.n)
        ]

    def stats(self) -> Stats:
        """A snapshot of the engine's numbers."""
        return self._service.engine.stats()

    async def close(self) -> None:
        """Stops the engine; what still runs fails. Safe to call again."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """As `close`, blocking: for code without an event loop."""
        atexit.unregister(self._service.close)
        self._service.close()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def _shown(progress: Progress | bool) -> Progress:
    if isinstance(progress, bool):
        return progress_on() if progress else NoProgress()
    return progress


def _as_json(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as a client of the server would have sent them: tuples become lists, messages of a response dicts."""
    try:
        return from_json(to_json(fields))
    except (PydanticSerializationError, ValueError) as error:
        raise BadRequestError(f"the options cannot be written as JSON: {error}") from error
