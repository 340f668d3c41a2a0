"""Tools and formats as the responses route has them: those of chat completions with one level less."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import Field

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.output_format import MAX_NAME_LENGTH
from jaxserve.protocol.tools import ToolName, clean_tool_fields
from jaxserve.protocol.validation import StrictModel, kind, shown, supported

UNSUPPORTED_FUNCTION: dict[str, tuple[Any, ...]] = {"allowed_callers": ([], ["direct"]), "defer_loading": (False,)}
UNSUPPORTED_TEXT: dict[str, tuple[Any, ...]] = {"verbosity": ("medium",)}

# What chat completions call a field -> what it is here; the first that fits.
_NAMES = (
    (re.compile(r"^tools(\[\d+\])?\.function\b"), r"tools\1"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
    (re.compile(r"^response_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"^messages\b.*"), "input"),
)


class ResponsesFunction(StrictModel):
    """A function that the model may call; the fields are those of a chat completion's function."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class NamedResponsesFunction(StrictModel):
    """The model must call this function."""

    type: Literal["function"]
    name: str


ResponsesToolChoice = Literal["none", "auto", "required"] | NamedResponsesFunction


class AskedFormat(StrictModel):
    """ "text" asks for nothing; the others as in a chat completion's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, min_length=1, max_length=MAX_NAME_LENGTH, pattern="^[a-zA-Z0-9_-]+$")
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        named = {key: value for key, value in self.told().items() if key != "type"}
        return {"type": "json_schema", "json_schema": named}

    def told(self) -> dict[str, Any]:
        """As it was sent."""
        return self.model_dump(by_alias=True, exclude_none=True)


class AskedText(StrictModel):
    format: AskedFormat | None = None


def clean_tools_and_text(fields: dict[str, Any]) -> None:
    """Drops what asks for nothing inside `tools`, `tool_choice` and `text`, and checks by hand what types cannot tell.

    Raises:
        BadRequestError: names a part that is not understood.
    """
    clean_tool_fields(fields, _clean_tool, _clean_choice)
    if isinstance(fields.get("text"), dict):
        text = supported(fields["text"], AskedText.model_fields, UNSUPPORTED_TEXT, "text.")
        if isinstance(text.get("format"), dict):
            text["format"] = _clean_format(text["format"])
        fields["text"] = text


def chat_tool_choice(choice: ResponsesToolChoice | None) -> str | dict[str, Any] | None:
    if isinstance(choice, NamedResponsesFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def told_tools(tools: Sequence[ResponsesFunction]) -> list[dict[str, Any]]:
    """As a response repeats them."""
    return [tool.model_dump() | {"strict": bool(tool.strict)} for tool in tools]


@contextmanager
def own_names() -> Iterator[None]:
    """Refusals of what was made of a request for chat completions name the fields that the client has sent."""
    try:
        yield
    except BadRequestError as error:
        param = error.param
        for pattern, name in _NAMES:
            if param is not None and pattern.search(param):
                own = pattern.sub(name, param)
                raise BadRequestError(error.message.replace(param, own), param=own, code=error.code) from error
        raise


def _clean_tool(tool: object, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise BadRequestError(f"`{path}` must be an object, not {kind(tool)}", param=path)
    if tool.get("type") != "function":
        found = shown(tool.get("type"))
        raise BadRequestError(f"`{path}.type` is {found}: only functions can be called", param=f"{path}.type")
    return supported(tool, ResponsesFunction.model_fields, UNSUPPORTED_FUNCTION, f"{path}.")


def _clean_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """By hand: a union's errors would speak of all its forms at once."""
    if choice.get("type") != "function":
        found = shown(choice.get("type"))
        raise BadRequestError(f"`tool_choice.type` must be 'function', not {found}", param="tool_choice.type")
    fields = supported(choice, NamedResponsesFunction.model_fields, {}, "tool_choice.")
    if not isinstance(fields.get("name"), str):
        param = "tool_choice.name"
        raise BadRequestError(f"`{param}` must be a string, not {kind(fields.get('name'))}", param=param)
    return fields


def _clean_format(value: dict[str, Any]) -> dict[str, Any]:
    known = ("type", "name", "description", "schema", "strict")
    fields = supported(value, known, {}, "text.format.")
    for name in ("name", "schema"):
        if fields.get("type") == "json_schema" and name not in fields:
            param = f"text.format.{name}"
            raise BadRequestError(f"`{param}` is missing", param=param, code="missing_required_parameter")
    for name in known[1:]:
        if fields.get("type") in ("text", "json_object") and name in fields:
            param = f"text.format.{name}"
            raise BadRequestError(f"`{param}` goes with type 'json_schema' only", param=param)
    return fields
