"""Input of the responses route: a string, or items that are turns, calls of functions and their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.validation import StrictModel, kind, shown, supported

# An answer that comes back as input brings these along; they tell nothing that the model reads.
_NEUTRAL = frozenset(("id", "status", "phase"))
_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
_PART_TYPES = ("input_text", "output_text", "text")
_PART_NEUTRAL = frozenset(("type", "annotations", "logprobs"))


class InputItem(StrictModel):
    """A turn (`role`, `content`), a call that the model made (`call_id`, `name`, `arguments`), or what came of one
    (`call_id`, `output`). Content and output are text, or the texts of their parts.
    """

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[str] | None = None
    call_id: str | None = Field(None, min_length=1)
    name: str | None = None
    arguments: str | None = None
    output: str | list[str] | None = None


def clean_input(value: object) -> list[dict[str, Any]]:
    """The items' fields. By hand: a union's errors would speak of all forms at once.

    Raises:
        BadRequestError: names the first part of it that is not understood.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise BadRequestError(f"`input` must be a string or a list of items, not {kind(value)}", param="input")
    items = [_clean_item(item, f"input[{position}]") for position, item in enumerate(value)]
    called: set[object] = set()
    for position, item in enumerate(items):
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in called:
            param = f"input[{position}].call_id"
            message = f"`{param}` is {shown(item['call_id'])}, and no function call before it has that id"
            raise BadRequestError(message, param=param)
    return items


def chat_messages(items: Sequence[InputItem], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation as chat completions have it: calls join the turn of the assistant before them, or are one."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        if item.type == "function_call":
            function = {"name": item.name, "arguments": item.arguments}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif item.type == "function_call_output":
            result = {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
            messages.append(result)
        else:
            messages.append({"role": item.role, "content": _content(item.content)})
    return messages


def _clean_item(item: object, path: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise BadRequestError(f"`{path}` must be an object, not {kind(item)}", param=path)
    form = item.get("type", "message")
    if not isinstance(form, str) or form not in _FIELDS:
        message = f"`{path}` is of type {shown(form)}: only items of type {', '.join(map(repr, _FIELDS))} are supported"
        raise BadRequestError(message, param=f"{path}.type")
    asked = {name: value for name, value in item.items() if name not in _NEUTRAL and name != "type"}
    fields = supported(asked, _FIELDS[form], {}, f"{path}.")
    for name in _FIELDS[form]:
        if name not in fields:
            param = f"{path}.{name}"
            raise BadRequestError(f"`{param}` is missing", param=param, code="missing_required_parameter")
    for name in ("content", "output"):
        if name in fields:
            fields[name] = _clean_content(fields[name], f"{path}.{name}")
    if "call_id" in fields and not isinstance(fields["call_id"], str):
        param = f"{path}.call_id"
        raise BadRequestError(f"`{param}` must be a string, not {kind(fields['call_id'])}", param=param)
    return {"type": form, **fields}


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


def _content(texts: str | list[str] | None) -> str | list[dict[str, Any]]:
    if isinstance(texts, list):
        return [{"type": "text", "text": text} for text in texts]
    return texts or ""
