"""Responses, shaped as the `openai` package's: the server writes them as JSON, the Python API returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation
from pydantic.json_schema import SkipJsonSchema

TextFinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ResponseModel(BaseModel):
    """Of its parts only those set are written, so that an optional one (`usage` of a chunk) can be left out.

    Lists that may be long are not checked when a model is made of them: it is our own code that writes them.

    Attributes:
        writes_unset: parts that are not set are written too.
        is_small: it is never long.
    """

    model_config = ConfigDict(frozen=True)
    writes_unset: ClassVar[bool] = False
    is_small: ClassVar[bool] = False

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=not self.writes_unset)

    def written_fields(self) -> dict[str, Any]:
        """The parts that JSON shows, by name."""
        return {
            name: getattr(self, name)
            for name, field in type(self).model_fields.items()
            if not field.exclude and (self.writes_unset or name in self.model_fields_set)
        }


class PromptTokensDetails(ResponseModel):
    """Of the prompt's tokens: those whose KV pages were there already."""

    cached_tokens: int


class Usage(ResponseModel):
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


class TopLogprob(ResponseModel):
    """One of the tokens that were most likely at a place. `token` is escaped where its bytes alone are no text."""

    is_small = True

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that stands there, and the most likely ones, most likely first."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """One entry for each token that counts as completion, those that no text shows (stop tokens) included."""

    content: SkipValidation[Sequence[TokenLogprob]]
    refusal: None


class CompletionLogprobs(ResponseModel):
    """Parallel lists, one item for each token; with `echo`, the prompt's come first."""

    text_offset: SkipValidation[Sequence[int]]  # characters from the start of the choice's text
    token_logprobs: SkipValidation[Sequence[float | None]]
    tokens: SkipValidation[Sequence[str]]
    top_logprobs: SkipValidation[Sequence[dict[str, float] | None]]


class PromptLogprob(ResponseModel):
    """One candidate for a place in the prompt. `rank` is 1 for the most likely; null if it is not among those asked for."""

    is_small = True

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = Sequence[
    dict[str, PromptLogprob] | None
]  # by token id; the first is null, for nothing stands before it


class CalledFunction(ResponseModel):
    """`arguments` is a JSON object as text, as the model wrote it."""

    name: str
    arguments: str


class CalledTool(ResponseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatCompletionMessage(ResponseModel):
    """The assistant's turn. It can be sent back as a message of the next request.

    Attributes:
        content: None beside calls alone.
        parsed: in the Python API, the answer as an object of the class that `response_format` was; never sent.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[CalledTool] | None = None
    parsed: SkipJsonSchema[Any] = Field(default=None, exclude=True)


class ChatChoice(ResponseModel):
    index: int
    message: ChatCompletionMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(ResponseModel):
    """Answer to a chat completion that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int  # seconds since 1970
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    prompt_logprobs: SkipValidation[PromptLogprobs | None] = None


class CalledFunctionDelta(ResponseModel):
    name: str | None = None
    arguments: str | None = None


class CalledToolDelta(ResponseModel):
    """Part of the call with that index: the first has its id and name, the next ones its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionDelta


class ChoiceDelta(ResponseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CalledToolDelta] | None = None


class ChunkChoice(ResponseModel):
    index: int
    delta: ChoiceDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletionChunk(ResponseModel):
    """One event of a streamed chat completion. `usage` is absent unless it was asked for, and null until the last."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str | None
    usage: Usage | None = None


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: TextFinishReason | None
    prompt_logprobs: SkipValidation[PromptLogprobs | None] = None


class Completion(ResponseModel):
    """Answer to a completion; streamed, each event is one too, as in OpenAI's API."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None
    usage: Usage | None = None


class Model(ResponseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[Model]


class Tokens(ResponseModel):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: SkipValidation[list[int]]
    token_strs: SkipValidation[list[str] | None]


class DetokenizedText(ResponseModel):
    """Answer of /detokenize."""

    prompt: str
