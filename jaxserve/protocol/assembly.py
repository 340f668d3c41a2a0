"""Responses and stream chunks from text deltas. Chunks of one index, joined, are the text of the whole response."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from jaxserve.protocol.choice_text import TextDelta
from jaxserve.protocol.generation import TextGeneration, merged_deltas
from jaxserve.protocol.responses import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChoiceDelta,
    ChunkChoice,
    Completion,
    CompletionChoice,
    TextFinishReason,
    Usage,
)

UsageMode = Literal["none", "last", "always"]


@dataclass(frozen=True)
class Answer:
    """What a response is made of, streamed or not.

    Attributes:
        generations: one for each prompt; prompt p holds the choices p * n .. p * n + n - 1.
        echo: text that a choice starts with (its prompt, where that was asked for), by index.
        usage: none; "last": one chunk at the end; "always": in every chunk as well. Streams only.
    """

    model: str
    generations: Sequence[TextGeneration]
    num_choices: int
    id: str
    echo: Mapping[int, str] = field(default_factory=dict)
    usage: UsageMode = "none"
    created: int = field(default_factory=lambda: int(time.time()))

    def total_usage(self) -> Usage:
        """Over all prompts and choices, so far."""
        return Usage.of(
            sum(generation.prompt_tokens for generation in self.generations),
            sum(generation.completion_tokens for generation in self.generations),
            sum(generation.cached_tokens for generation in self.generations),
        )

    async def aclose(self) -> None:
        """Ends whatever still runs in the engine."""
        for generation in self.generations:
            await generation.aclose()


def new_id(kind: Literal["chatcmpl", "cmpl"]) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


async def gather_texts(answer: Answer) -> list[tuple[str, TextFinishReason]]:
    """Text and finish reason of every choice, by index."""
    pieces: list[list[str]] = [[answer.echo.get(index, "")] for index in range(answer.num_choices)]
    reasons: dict[int, TextFinishReason] = {}
    try:
        async for delta in merged_deltas(answer.generations):
            pieces[delta.index].append(delta.text)
            if delta.finish_reason is not None:
                reasons[delta.index] = delta.finish_reason
    finally:
        await answer.aclose()
    return [("".join(texts), reasons[index]) for index, texts in enumerate(pieces)]


async def chat_completion(answer: Answer) -> ChatCompletion:
    texts = await gather_texts(answer)
    choices = [
        ChatChoice(
            index=index,
            message=ChatCompletionMessage(role="assistant", content=text, refusal=None),
            logprobs=None,
            finish_reason=reason,
        )
        for index, (text, reason) in enumerate(texts)
    ]
    return ChatCompletion(
        id=answer.id,
        object="chat.completion",
        created=answer.created,
        model=answer.model,
        choices=choices,
        usage=answer.total_usage(),
        system_fingerprint=None,
    )


async def completion(answer: Answer) -> Completion:
    texts = await gather_texts(answer)
    choices = [
        CompletionChoice(index=index, text=text, logprobs=None, finish_reason=reason)
        for index, (text, reason) in enumerate(texts)
    ]
    return _completion(answer, choices, usage=answer.total_usage())


async def chat_completion_chunks(answer: Answer) -> AsyncGenerator[ChatCompletionChunk]:
    """For each index: its role, its text, its finish reason; then the usage, if it was asked for.

    Nothing is yielded before the engine's first token, so that a failure until then is still an HTTP error.
    """
    opened = False
    async with aclosing(merged_deltas(answer.generations)) as deltas:
        async for delta in deltas:
            if not opened:
                opened = True
                for index in range(answer.num_choices):
                    yield _chat_chunk(answer, index, ChoiceDelta(role="assistant", content=""))
            if delta.text:
                yield _chat_chunk(answer, delta.index, ChoiceDelta(content=delta.text))
            if delta.finish_reason is not None:
                yield _chat_chunk(answer, delta.index, ChoiceDelta(), delta.finish_reason)
    if answer.usage != "none":
        yield _new_chat_chunk(answer, [], usage=answer.total_usage())


async def completion_chunks(answer: Answer) -> AsyncGenerator[Completion]:
    """For each index: its text, its finish reason; then the usage, if it was asked for."""
    echoes = dict(answer.echo)
    async with aclosing(merged_deltas(answer.generations)) as deltas:
        async for delta in deltas:
            text = echoes.pop(delta.index, "") + delta.text
            if text:
                yield _completion_chunk(answer, TextDelta(delta.index, text))
            if delta.finish_reason is not None:
                yield _completion_chunk(answer, TextDelta(delta.index, "", delta.finish_reason))
    if answer.usage != "none":
        yield _completion(answer, [], usage=answer.total_usage())


def _chat_chunk(
    answer: Answer, index: int, delta: ChoiceDelta, finish_reason: TextFinishReason | None = None
) -> ChatCompletionChunk:
    choices = [ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=finish_reason)]
    if answer.usage == "none":
        return _new_chat_chunk(answer, choices)
    return _new_chat_chunk(answer, choices, usage=answer.total_usage() if answer.usage == "always" else None)


def _new_chat_chunk(answer: Answer, choices: list[ChunkChoice], **usage: Usage | None) -> ChatCompletionChunk:
    return ChatCompletionChunk(
        id=answer.id,
        object="chat.completion.chunk",
        created=answer.created,
        model=answer.model,
        choices=choices,
        system_fingerprint=None,
        **usage,
    )


def _completion_chunk(answer: Answer, delta: TextDelta) -> Completion:
    choices = [CompletionChoice(index=delta.index, text=delta.text, logprobs=None, finish_reason=delta.finish_reason)]
    if answer.usage == "none":
        return _completion(answer, choices)
    return _completion(answer, choices, usage=answer.total_usage() if answer.usage == "always" else None)


def _completion(answer: Answer, choices: list[CompletionChoice], **usage: Usage | None) -> Completion:
    return Completion(
        id=answer.id,
        object="text_completion",
        created=answer.created,
        model=answer.model,
        choices=choices,
        system_fingerprint=None,
        **usage,
    )
