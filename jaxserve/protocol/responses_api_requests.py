"""Requests of the responses route, in its text form: a conversation under other names. The rule of `requests` holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.request_rules import check_chat_rules, check_logit_bias
from jaxserve.protocol.requests import MAX_MESSAGES, MAX_TEMPLATE_VARIABLES, ChatCompletionRequest, SamplingFields
from jaxserve.protocol.validation import StrictModel, kind, shown, supported, validate
from jaxserve.sampling_params import MAX_LOGPROBS

_NO_REASONING: tuple[Any, ...] = ({}, {"effort": None}, {"effort": "none"}, {"effort": None, "summary": None})

# Field -> values that ask for nothing, so that sending them is no error.
UNSUPPORTED_RESPONSES: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": ({},),
    "reasoning": _NO_REASONING,
    "stream_options": ({}, {"include_obfuscation": False}),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
}
_ITEM_FIELDS = ("role", "content")
# An answer that comes back as input brings these along; they tell nothing that the model reads.
_ITEM_NEUTRAL = frozenset(("type", "id", "status", "phase"))
_PART_TYPES = ("input_text", "output_text", "text")
_PART_NEUTRAL = frozenset(("type", "annotations", "logprobs"))


class InputMessage(StrictModel):
    """One turn of the input."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[str]  # the texts of its parts


class ResponsesRequest(SamplingFields):
    """Body of POST /v1/responses.

    Attributes:
        input: the conversation so far; clients may send a question as a plain string.
        instructions: stands before the input as a system message.
        include: log probabilities are told if this names them, with `top_logprobs` alternatives.
    """

    input: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    include: list[Literal["message.output_text.logprobs"]] = Field([], max_length=16)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=MAX_TEMPLATE_VARIABLES)

    def as_chat(self) -> ChatCompletionRequest:
        """The conversation that this asks for.

        Raises:
            BadRequestError: it breaks a rule of conversations.
        """
        messages = [_chat_message(turn.role, turn.content) for turn in self.input]
        if self.instructions:
            messages.insert(0, _chat_message("system", self.instructions))
        fields = self.model_dump(include=set(SamplingFields.model_fields), exclude_unset=True)
        fields |= {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": bool(self.include),
            "top_logprobs": self.top_logprobs,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
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
        fields["input"] = _clean_input(fields["input"])
    request = validate(ResponsesRequest, fields)
    if request.top_logprobs and not request.include:
        raise BadRequestError(
            '`top_logprobs` goes with `include: ["message.output_text.logprobs"]` only', param="top_logprobs"
        )
    return request


def _clean_input(value: object) -> list[dict[str, Any]]:
    """By hand: a union's errors would speak of both forms at once."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise BadRequestError(f"`input` must be a string or a list of messages, not {kind(value)}", param="input")
    return [_clean_item(item, f"input[{position}]") for position, item in enumerate(value)]


def _clean_item(item: object, path: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise BadRequestError(f"`{path}` must be a message, not {kind(item)}", param=path)
    if item.get("type", "message") != "message":
        found = shown(item["type"])
        raise BadRequestError(
            f"`{path}` is of type {found}: only items of type 'message' are supported", param=f"{path}.type"
        )
    asked = {name: value for name, value in item.items() if name not in _ITEM_NEUTRAL}
    fields = supported(asked, _ITEM_FIELDS, {}, f"{path}.")
    if "content" in fields:
        fields["content"] = _clean_content(fields["content"], f"{path}.content")
    return fields


def _clean_content(content: object, path: str) -> str | list[str]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise BadRequestError(f"`{path}` must be a string or a list of text parts", param=path)
    return [_part_text(part, f"{path}[{position}]") for position, part in enumerate(content)]


def _part_text(part: object, path: str) -> str:
    if not isinstance(part, dict) or part.get("type") not in _PART_TYPES:
        found = shown(part.get("type")) if isinstance(part, dict) else kind(part)
        raise BadRequestError(f"`{path}` is {found}: this model reads text parts only", param=path)
    asked = {name: value for name, value in part.items() if name not in _PART_NEUTRAL}
    text = supported(asked, ("text",), {}, f"{path}.").get("text")
    if not isinstance(text, str):
        raise BadRequestError(f"`{path}.text` must be a string, not {kind(text)}", param=f"{path}.text")
    return text


def _chat_message(role: str, content: str | list[str]) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": role, "content": content}
    return {"role": role, "content": [{"type": "text", "text": text} for text in content]}
