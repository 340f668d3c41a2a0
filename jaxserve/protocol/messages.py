"""Chat messages: their form, and how templates know them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from pydantic_core import from_json

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.validation import StrictModel, kind, shown, supported

MAX_TOOL_CALLS = 128  # of one message

# Field -> values that ask for nothing, so that sending them is no error.
UNSUPPORTED_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": ("",),
}


class TextPart(StrictModel):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(StrictModel):
    """What the assistant called; `arguments` is JSON as the assistant wrote it, so it may be broken."""

    name: str
    arguments: str


class ToolCall(StrictModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(StrictModel):
    """One turn.

    Attributes:
        role: `developer` is rendered as `system`, which is what chat templates know it by.
        content: None only for an assistant that called tools.
        tool_calls: of an assistant; tool_call_id: of a tool, which says whose result it is.
        reasoning_content: what an assistant thought before it answered; templates of models that think show it.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOL_CALLS)
    reasoning_content: str | None = None

    def texts(self) -> list[str]:
        """Everything that a template may print."""
        texts = [self.name or "", self.tool_call_id or "", self.reasoning_content or ""]
        if isinstance(self.content, str):
            texts.append(self.content)
        elif self.content is not None:
            texts += [part.text for part in self.content]
        for call in self.tool_calls or ():
            texts += [call.id, call.function.name, call.function.arguments]
        return texts

    def for_template(self) -> dict[str, Any]:
        """The message as templates know it: without absent fields, the arguments of calls as objects."""
        fields = self.model_dump(exclude_none=True)
        if self.role == "developer":
            fields["role"] = "system"
        for call in fields.get("tool_calls", ()):
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
        return fields


def clean_message(message: object, path: str) -> dict[str, Any]:
    """The fields of a message that ask for something.

    Raises:
        BadRequestError: names the first part of it that is not understood.
    """
    if not isinstance(message, dict):
        raise BadRequestError(f"`{path}` must be an object with `role` and `content`, not {kind(message)}", param=path)
    fields = supported(message, ChatMessage.model_fields, UNSUPPORTED_MESSAGE, f"{path}.")
    if "content" in fields:
        fields["content"] = _clean_content(fields["content"], f"{path}.content")
    if fields.get("tool_calls") == []:
        del fields["tool_calls"]
    return fields


def check_message(message: ChatMessage, path: str) -> None:
    """Rules between a message's fields, which types alone do not express."""
    if message.content is None and not message.tool_calls:
        raise _missing(f"{path}.content", "only an assistant's message with `tool_calls` may lack it")
    if message.role == "tool" and message.tool_call_id is None:
        raise _missing(f"{path}.tool_call_id", "a tool message says which call it answers")
    owners = {"tool_call_id": "tool", "tool_calls": "assistant", "reasoning_content": "assistant"}
    for field, role in owners.items():
        if getattr(message, field) is not None and message.role != role:
            raise BadRequestError(
                f"`{path}.{field}` belongs to {role} messages, not to role {message.role!r}", param=f"{path}.{field}"
            )


def _missing(param: str, why: str) -> BadRequestError:
    return BadRequestError(f"`{param}` is missing: {why}", param=param, code="missing_required_parameter")


def _clean_content(content: object, path: str) -> str | list[dict[str, Any]]:
    """A string or text parts, checked by hand: a union's errors would speak of both at once."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError(f"`{path}` must be a string or a list of text parts, not {kind(content)}", param=path)
    if not content:
        raise BadRequestError(f"`{path}` must hold at least one part", param=path)
    return [_clean_part(part, f"{path}[{position}]") for position, part in enumerate(content)]


def _clean_part(part: object, path: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise BadRequestError(f"`{path}` must be a text part, not {kind(part)}", param=path)
    if part.get("type") != "text":
        found = shown(part.get("type"))
        raise BadRequestError(f"`{path}` is of type {found}: this model reads parts of type 'text' only", param=path)
    fields = supported(part, TextPart.model_fields, {}, f"{path}.")
    if not isinstance(fields.get("text"), str):
        raise BadRequestError(f"`{path}.text` must be a string, not {kind(fields.get('text'))}", param=f"{path}.text")
    return fields


def _arguments(text: str) -> dict[str, Any] | str:
    """The arguments as an object, which is what templates print; as the text they are where they are no JSON object."""
    try:
        value = from_json(text or "{}", allow_inf_nan=False)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
