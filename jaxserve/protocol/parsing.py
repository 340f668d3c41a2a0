"""From a client's JSON to a validated request, or to a 400 that names the field at fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.json_cost import check_cost
from jaxserve.protocol.messages import clean_message
from jaxserve.protocol.output_format import clean_output_fields
from jaxserve.protocol.request_rules import check_chat_rules, check_completion_rules, check_logit_bias
from jaxserve.protocol.requests import (
    MAX_MESSAGES,
    MAX_PROMPT_TOKEN_IDS,
    MAX_PROMPTS,
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    UNSUPPORTED_STREAM_OPTIONS,
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
)
from jaxserve.protocol.tools import clean_tool_fields
from jaxserve.protocol.validation import kind, shown, supported, validate


def parse_json(body: bytes) -> dict[str, Any]:
    """Parses a request body: strict JSON (no NaN), nesting bounded by the parser, an object on top.

    Raises:
        BadRequestError: it is none, or holds more values than any request needs.
    """
    check_cost(body)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequestError(f"the body must be a JSON object, not {kind(value)}")
    return value


def parse_chat_request(body: Mapping[str, Any]) -> ChatCompletionRequest:
    """Validates the body of a chat completion.

    Raises:
        BadRequestError: names the first field at fault.
    """
    fields = supported(body, ChatCompletionRequest.model_fields, UNSUPPORTED_CHAT, "")
    _clean_stream_options(fields)
    clean_output_fields(fields)
    check_logit_bias(fields)
    clean_messages(fields)
    clean_tool_fields(fields)
    request = validate(ChatCompletionRequest, fields)
    check_chat_rules(request)
    return request


def parse_completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Validates the body of a completion.

    Raises:
        BadRequestError: names the first field at fault.
    """
    fields = supported(body, CompletionRequest.model_fields, UNSUPPORTED_COMPLETION, "")
    _clean_stream_options(fields)
    clean_output_fields(fields)
    check_logit_bias(fields)
    if "prompt" in fields:
        _check_prompt(fields["prompt"])
    request = validate(CompletionRequest, fields)
    check_completion_rules(request)
    return request


def _clean_stream_options(fields: dict[str, Any]) -> None:
    options = fields.get("stream_options")
    if isinstance(options, dict):
        known = StreamOptions.model_fields
        fields["stream_options"] = supported(options, known, UNSUPPORTED_STREAM_OPTIONS, "stream_options.")


def clean_messages(fields: dict[str, Any]) -> None:
    messages = fields.get("messages")
    if isinstance(messages, list) and len(messages) <= MAX_MESSAGES:  # of more, validation tells
        fields["messages"] = [clean_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_prompt(prompt: object) -> None:
    """The four forms of a prompt, checked by hand: a union's errors would speak of all four at once."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise BadRequestError(
            f"`prompt` must be a string, a list of strings, or token ids, not {kind(prompt)}", param="prompt"
        )
    if not prompt:
        raise BadRequestError("`prompt` must not be an empty list", param="prompt")
    if type(prompt[0]) is int:
        check_token_ids(prompt, "prompt")
        return
    if len(prompt) > MAX_PROMPTS:
        raise BadRequestError(f"`prompt` holds {len(prompt)} prompts; the limit is {MAX_PROMPTS}", param="prompt")
    for position, item in enumerate(prompt):
        path = f"prompt[{position}]"
        if type(item) is not type(prompt[0]) or not isinstance(item, (str, list)):
            raise BadRequestError(
                f"`{path}` is {kind(item)}: prompts must be all strings or all lists of token ids", param=path
            )
        if isinstance(item, list):
            check_token_ids(item, path)


def check_token_ids(token_ids: list[Any], path: str) -> None:
    if not token_ids:
        raise BadRequestError(f"`{path}` holds no tokens", param=path)
    if len(token_ids) > MAX_PROMPT_TOKEN_IDS:
        raise BadRequestError(
            f"`{path}` holds {len(token_ids)} token ids, more than any context has room for",
            param=path,
            code="context_length_exceeded",
        )
    for position, token_id in enumerate(token_ids):
        if type(token_id) is not int or token_id < 0:
            raise BadRequestError(
                f"`{path}[{position}]` must be a token id (an integer from 0), not {shown(token_id)}",
                param=f"{path}[{position}]",
            )
