"""Responses, shaped as the `openai` package's: the server writes them as JSON, the Python API returns them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

TextFinishReason = Literal["stop", "length"]


class _Response(BaseModel):
    """Of its parts only those set are written, so that an optional one (`usage` of a chunk) can be left out."""

    model_config = ConfigDict(frozen=True)

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)


class PromptTokensDetails(_Response):
    """Of the prompt's tokens: those whose KV pages were there already."""

    cached_tokens: int


class Usage(_Response):
    """Tokens of a request, over all its prompts and choices. A stop token counts as completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @staticmethod
    def of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        )


class ChatCompletionMessage(_Response):
    """The assistant's turn. It can be sent back as a message of the next request."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Response):
    index: int
    message: ChatCompletionMessage
    logprobs: None
    finish_reason: TextFinishReason


class ChatCompletion(_Response):
    """Answer to a chat completion that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int  # seconds since 1970
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None


class ChoiceDelta(_Response):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(_Response):
    index: int
    delta: ChoiceDelta
    logprobs: None
    finish_reason: TextFinishReason | None


class ChatCompletionChunk(_Response):
    """One event of a streamed chat completion. `usage` is absent unless it was asked for, and null until the last."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str | None
    usage: Usage | None = None


class CompletionChoice(_Response):
    index: int
    text: str
    logprobs: None
    finish_reason: TextFinishReason | None


class Completion(_Response):
    """Answer to a completion; streamed, each event is one too, as in OpenAI's API."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None
    usage: Usage | None = None


class Model(_Response):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(_Response):
    object: Literal["list"]
    data: list[Model]
