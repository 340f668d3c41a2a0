"""Requests of the responses route: a conversation under other names. The rule of `requests` holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.request_rules import check_chat_rules, check_logit_bias
from jaxserve.protocol.requests import MAX_MESSAGES, MAX_TEMPLATE_VARIABLES, ChatCompletionRequest, SamplingFields
from jaxserve.protocol.responses_api_input import InputItem, chat_messages, clean_input
from jaxserve.protocol.responses_api_tools import (
    AskedText,
    ResponsesFunction,
    ResponsesToolChoice,
    chat_tool_choice,
    clean_tools_and_text,
    own_names,
)
from jaxserve.protocol.tools import MAX_TOOLS
from jaxserve.protocol.validation import supported, validate
from jaxserve.sampling_params import MAX_LOGPROBS

_NO_REASONING: tuple[Any, ...] = ({}, {"effort": None}, {"effort": "none"}, {"effort": None, "summary": None})

# Field -> values that ask for nothing, so that sending them is no error.
UNSUPPORTED_RESPONSES: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": ({},),
    "reasoning": _NO_REASONING,
    "stream_options": ({}, {"include_obfuscation": False}),
    "truncation": ("disabled",),
}


class ResponsesRequest(SamplingFields):
    """Body of POST /v1/responses.

    Attributes:
        input: the conversation so far; clients may send a question as a plain string.
        instructions: stands before the input as a system message.
        include: log probabilities are told if this names them, with `top_logprobs` alternatives.
        text: what the answer must look like.
        tools, tool_choice, parallel_tool_calls: as in chat completions.
    """

    input: list[InputItem] = Field(min_length=1, max_length=MAX_MESSAGES)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    include: list[Literal["message.output_text.logprobs"]] = Field([], max_length=16)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=MAX_TEMPLATE_VARIABLES)
    text: AskedText = AskedText()
    tools: list[ResponsesFunction] = Field([], max_length=MAX_TOOLS)
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool = True

    def as_chat(self) -> ChatCompletionRequest:
        """The conversation that this asks for.

        Raises:
            BadRequestError: it breaks a rule of conversations.
        """
        fields = self.model_dump(include=set(SamplingFields.model_fields), exclude_unset=True)
        fields |= {
            "messages": chat_messages(self.input, self.instructions),
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": bool(self.include),
            "top_logprobs": self.top_logprobs,
            "chat_template_kwargs": self.chat_template_kwargs,
            "response_format": None if self.text.format is None else self.text.format.for_chat(),
            "tools": [tool.for_chat() for tool in self.tools],
            "tool_choice": chat_tool_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        with own_names():
            request = validate(ChatCompletionRequest, fields)
            check_chat_rules(request)
        return request


def parse_responses_request(body: Mapping[str, Any]) -> ResponsesRequest:
    """Validates the body of a request to the responses route.

    Raises:
        BadRequestError: names the first field at fault.
    """
    fields = supported(body, ResponsesRequest.model_fields, UNSUPPORTED_RESPONSES, "")
    check_logit_bias(fields)
    if "input" in fields:
        fields["input"] = clean_input(fields["input"])
    clean_tools_and_text(fields)
    request = validate(ResponsesRequest, fields)
    if request.top_logprobs and not request.include:
        raise BadRequestError(
            '`top_logprobs` goes with `include: ["message.output_text.logprobs"]` only', param="top_logprobs"
        )
    if request.include and request.tools and request.tool_choice != "none":
        raise BadRequestError("`include`: log probabilities are told of answers without `tools` only", param="include")
    return request
