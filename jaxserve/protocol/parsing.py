"""From a client's JSON to a validated request, or to a 400 that names the field at fault."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.requests import (
    MAX_PROMPT_TOKEN_IDS,
    MAX_PROMPTS,
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    UNSUPPORTED_MESSAGE,
    UNSUPPORTED_STREAM_OPTIONS,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    StreamOptions,
    TextPart,
    check_chat_rules,
    check_completion_rules,
)

RequestT = TypeVar("RequestT", bound=BaseModel)
Neutral = Mapping[str, tuple[Any, ...]]


def parse_json(body: bytes) -> dict[str, Any]:
    """Parses a request body: strict JSON (no NaN), nesting bounded by the parser, an object on top."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequestError(f"the body must be a JSON object, not {_kind(value)}")
    return value


def parse_chat_request(body: Mapping[str, Any]) -> ChatCompletionRequest:
    """Validates the body of a chat completion.

    Raises:
        BadRequestError: names the first field at fault.
    """
    fields = _supported(body, ChatCompletionRequest.model_fields, UNSUPPORTED_CHAT, "")
    _clean_stream_options(fields)
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [_clean_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    request = _validate(ChatCompletionRequest, fields)
    check_chat_rules(request)
    return request


def parse_completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Validates the body of a completion.

    Raises:
        BadRequestError: names the first field at fault.
    """
    fields = _supported(body, CompletionRequest.model_fields, UNSUPPORTED_COMPLETION, "")
    _clean_stream_options(fields)
    if "prompt" in fields:
        _check_prompt(fields["prompt"])
    request = _validate(CompletionRequest, fields)
    check_completion_rules(request)
    return request


def _supported(body: Mapping[str, Any], known: Iterable[str], unsupported: Neutral, path: str) -> dict[str, Any]:
    """The fields that ask for something this server does; the rest asks for nothing, or is refused."""
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            fields[name] = value
        elif name not in unsupported:
            raise BadRequestError(
                f"unknown field `{path}{name[:100]}`{_suggestion(name, known)}",
                param=f"{path}{name[:100]}",
                code="unknown_parameter",
            )
        elif not _asks_for_nothing(value, unsupported[name]):
            raise BadRequestError(
                f"`{path}{name}` is not supported by this server; leave it out",
                param=f"{path}{name}",
                code="unsupported_parameter",
            )
    return fields


def _asks_for_nothing(value: object, neutral: tuple[Any, ...]) -> bool:
    return any(isinstance(value, bool) == isinstance(item, bool) and value == item for item in neutral)


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name[:100], list(known), n=1)
    return f": did you mean `{close[0]}`?" if close else ""


def _clean_stream_options(fields: dict[str, Any]) -> None:
    options = fields.get("stream_options")
    if isinstance(options, dict):
        known = StreamOptions.model_fields
        fields["stream_options"] = _supported(options, known, UNSUPPORTED_STREAM_OPTIONS, "stream_options.")


def _clean_message(message: object, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRequestError(f"`{path}` must be an object with `role` and `content`, not {_kind(message)}", param=path)
    fields = _supported(message, ChatMessage.model_fields, UNSUPPORTED_MESSAGE, f"{path}.")
    if "content" in fields:
        fields["content"] = _clean_content(fields["content"], f"{path}.content")
    return fields


def _clean_content(content: object, path: str) -> str | list[dict[str, Any]]:
    """A string or text parts, checked by hand: a union's errors would speak of both at once."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError(f"`{path}` must be a string or a list of text parts, not {_kind(content)}", param=path)
    if not content:
        raise BadRequestError(f"`{path}` must hold at least one part", param=path)
    return [_clean_part(part, f"{path}[{position}]") for position, part in enumerate(content)]


def _clean_part(part: object, path: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise BadRequestError(f"`{path}` must be a text part, not {_kind(part)}", param=path)
    if part.get("type") != "text":
        shown = _shown(part.get("type"))
        raise BadRequestError(f"`{path}` is of type {shown}: this model reads parts of type 'text' only", param=path)
    fields = _supported(part, TextPart.model_fields, {}, f"{path}.")
    if not isinstance(fields.get("text"), str):
        raise BadRequestError(f"`{path}.text` must be a string, not {_kind(fields.get('text'))}", param=f"{path}.text")
    return fields


def _check_prompt(prompt: object) -> None:
    """The four forms of a prompt, checked by hand: a union's errors would speak of all four at once."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise BadRequestError(
            f"`prompt` must be a string, a list of strings, or token ids, not {_kind(prompt)}", param="prompt"
        )
    if not prompt:
        raise BadRequestError("`prompt` must not be an empty list", param="prompt")
    if type(prompt[0]) is int:
        _check_token_ids(prompt, "prompt")
        return
    if len(prompt) > MAX_PROMPTS:
        raise BadRequestError(f"`prompt` holds {len(prompt)} prompts; the limit is {MAX_PROMPTS}", param="prompt")
    for position, item in enumerate(prompt):
        path = f"prompt[{position}]"
        if type(item) is not type(prompt[0]) or not isinstance(item, (str, list)):
            raise BadRequestError(
                f"`{path}` is {_kind(item)}: prompts must be all strings or all lists of token ids", param=path
            )
        if isinstance(item, list):
            _check_token_ids(item, path)


def _check_token_ids(token_ids: list[Any], path: str) -> None:
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
                f"`{path}[{position}]` must be a token id (an integer from 0), not {_shown(token_id)}",
                param=f"{path}[{position}]",
            )


def _validate(model: type[RequestT], fields: dict[str, Any]) -> RequestT:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _bad_request(first, fields) from None


def _bad_request(error: ErrorDetails, fields: dict[str, Any]) -> BadRequestError:
    param = _path(error["loc"], fields)
    if error["type"] == "missing":
        return BadRequestError(f"`{param}` is missing", param=param, code="missing_required_parameter")
    message = error["msg"][:1].lower() + error["msg"][1:].replace(" after validation", "")
    if error["type"] not in ("too_long", "too_short"):  # these say already what was found
        message += f", not {_shown(error['input'])}"
    return BadRequestError(f"`{param}`: {message}", param=param)


def _path(location: tuple[int | str, ...], fields: object) -> str:
    """`messages[0].content`: the part of pydantic's location that the client wrote (it adds names of union members)."""
    path = ""
    for step in location:
        if isinstance(step, int):
            if not isinstance(fields, list):
                break
            path += f"[{step}]"
            fields = fields[step] if step < len(fields) else None
        else:
            if not isinstance(fields, dict):
                break
            path += f".{step}" if path else step
            fields = fields.get(step)
    return path


def _shown(value: object) -> str:
    if isinstance(value, (dict, list, bool)) or value is None:
        return f"a list of {len(value)}" if isinstance(value, list) else _kind(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
