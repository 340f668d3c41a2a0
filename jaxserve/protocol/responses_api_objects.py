"""What the responses route answers: one object, or the events that build it up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, SkipValidation

from jaxserve.protocol.responses import ResponseModel, TokenLogprob
from jaxserve.protocol.responses_api_tools import NamedResponsesFunction

ResponseStatus = Literal["in_progress", "completed", "incomplete"]


class _Object(ResponseModel):
    """The API leaves nothing out: what is not set is written as what it stands for."""

    writes_unset = True


class OutputText(_Object):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default=[])
    logprobs: SkipValidation[Sequence[TokenLogprob]] = Field(default=[])


class OutputMessage(_Object):
    """The assistant's turn. It can be sent back as an item of the next request's input."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ResponseStatus
    content: list[OutputText]


class OutputFunctionCall(_Object):
    """A call of one of the request's functions. It can be sent back too, with what came of it."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ResponseStatus
    call_id: str
    name: str
    arguments: str  # a JSON object as text


OutputItem = OutputMessage | OutputFunctionCall


class InputTokensDetails(_Object):
    """Of the input's tokens: those whose KV pages were there already, and those written for the next."""

    cached_tokens: int
    cache_write_tokens: int = 0  # nothing is charged for it here


class OutputTokensDetails(_Object):
    reasoning_tokens: int = 0


class ResponseUsage(_Object):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class IncompleteDetails(_Object):
    reason: Literal["max_output_tokens"]


class TextSettings(_Object):
    format: dict[str, Any]  # as it was asked for


class ResponseObject(_Object):
    """The answer, with what was asked for beside it. Nothing of it is stored."""

    id: str
    object: Literal["response"] = "response"
    created_at: int  # seconds since 1970
    status: ResponseStatus
    background: Literal[False] = False
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float
    text: TextSettings
    tool_choice: Literal["none", "auto", "required"] | NamedResponsesFunction
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class ResponseEvent(_Object):
    """One event of a streamed answer. Their numbers go up by one from 0."""

    sequence_number: int
    type: str


class ResponseStateEvent(ResponseEvent):
    """`response.created`, `.in_progress`, `.completed` or `.incomplete`: the answer as it stands."""

    response: ResponseObject


class OutputItemEvent(ResponseEvent):
    """`response.output_item.added` or `.done`."""

    output_index: int
    item: OutputItem


class ArgumentsDeltaEvent(ResponseEvent):
    """`response.function_call_arguments.delta`; the deltas joined are the arguments."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(ResponseEvent):
    """`response.function_call_arguments.done`"""

    item_id: str
    output_index: int
    name: str
    arguments: str


class _PartEvent(ResponseEvent):
    item_id: str
    output_index: int
    content_index: int


class ContentPartEvent(_PartEvent):
    """`response.content_part.added` or `.done`."""

    part: OutputText


class TextDeltaEvent(_PartEvent):
    """`response.output_text.delta`; the deltas joined are the text."""

    delta: str
    logprobs: SkipValidation[Sequence[TokenLogprob]]


class TextDoneEvent(_PartEvent):
    """`response.output_text.done`"""

    text: str
    logprobs: SkipValidation[Sequence[TokenLogprob]]
