"""Tools: what a request offers, what the model must do with them, and the calls in its answer."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxserve.config import ToolCallFormat
from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.messages import MAX_TOOL_CALLS
from jaxserve.protocol.validation import StrictModel, kind, shown, supported
from jaxserve.text.tool_call_text import ParsedText, ToolCallParser, make_parser

MAX_TOOLS = 128
ToolName = Annotated[str, Field(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_.-]+$")]


class FunctionTool(StrictModel):
    """A function that the model may call.

    Attributes:
        parameters: JSON Schema of its arguments; None: it takes none, or any.
        strict: the arguments of every call satisfy the schema, whatever the model says.
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(StrictModel):
    name: str


class NamedToolChoice(StrictModel):
    """The model must call this function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def clean_tool_fields(
    fields: dict[str, Any],
    clean_tool: Callable[[object, str], dict[str, Any]] | None = None,
    clean_choice: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Drops what asks for nothing inside `tools` and `tool_choice`, and checks the latter by hand.

    Args:
        clean_tool, clean_choice: for one tool with its path, and for a choice that is an object; None: those of chat
            completions.

    Raises:
        BadRequestError: names a part that is not understood.
    """
    clean_tool, clean_choice = clean_tool or _clean_tool, clean_choice or _clean_choice
    tools = fields.get("tools")
    if isinstance(tools, list) and len(tools) <= MAX_TOOLS:
        fields["tools"] = [clean_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        fields["tool_choice"] = clean_choice(choice)
    elif choice is not None and choice not in ("none", "auto", "required"):
        message = f"`tool_choice` must be 'none', 'auto', 'required' or name a function, not {kind(choice)}"
        raise BadRequestError(message, param="tool_choice")


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raises:
    BadRequestError: two tools have one name, one takes no object, or the choice is none of them.
    """
    names = [tool.function.name for tool in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            param = f"tools[{place}].function.name"
            raise BadRequestError(f"`{param}`: {name!r} is the name of another tool too", param=param)
    for place, tool in enumerate(tools):
        wanted = (tool.function.parameters or {}).get("type", "object")
        if wanted != "object":  # no form of calls has a place for anything else
            param = f"tools[{place}].function.parameters.type"
            raise BadRequestError(f"`{param}` must be 'object', not {shown(wanted)}", param=param)
    if not names and choice not in (None, "none", "auto"):
        raise BadRequestError("`tool_choice` asks for a call, and there are no `tools`", param="tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        param = "tool_choice.function.name"
        raise BadRequestError(f"`{param}` is {choice.function.name[:64]!r}, which is none of the tools", param=param)


@dataclass(frozen=True)
class ToolUse:
    """How the calls in an answer are found and told.

    Attributes:
        kind: what they look like.
        tools: those that may be called.
        choice: "auto": the model decides; "required": it must call; "named": it must call the only one of `tools`.
        several: whether one answer may hold more than one call.
    """

    kind: ToolCallFormat
    tools: tuple[Tool, ...]
    choice: Literal["auto", "required", "named"]
    several: bool

    @property
    def parser_kind(self) -> ToolCallFormat:
        """Calls that are forced on a model of the pythonic form are JSON: only that can be held to a schema."""
        return "llama3_json" if self.kind == "pythonic" and self.choice != "auto" else self.kind

    def find_calls(self) -> CallFinder:
        """For one answer."""
        parser = make_parser(self.parser_kind, frozenset(tool.function.name for tool in self.tools))
        return CallFinder(self, parser)

    def new_id(self) -> str:
        """Mistral's templates take ids of nine letters and digits only."""
        if self.kind == "mistral":
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class FoundCall:
    """One call of an answer, with its place among them."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class FoundCalls:
    """What a piece of text led to."""

    content: str
    calls: tuple[FoundCall, ...] = ()


class CallFinder:
    """Splits one answer into content and calls, as its text comes."""

    def __init__(self, use: ToolUse, parser: ToolCallParser) -> None:
        self._use = use
        self._parser = parser
        self.num_calls = 0

    def push(self, text: str, *, is_last: bool) -> FoundCalls:
        """Takes the next piece, and at the end what was held back."""
        parsed = self._parser.push(text)
        found = self._number(parsed)
        if not is_last:
            return found
        rest = self._number(self._parser.finish())
        return FoundCalls(found.content + rest.content, found.calls + rest.calls)

    def finish_reason(self, reason: Literal["stop", "length"]) -> Literal["stop", "length", "tool_calls"]:
        """As OpenAI has it: "tool_calls" where the model decided to call, "stop" where it was told what to call."""
        return "tool_calls" if reason == "stop" and self.num_calls and self._use.choice != "named" else reason

    def _number(self, parsed: ParsedText) -> FoundCalls:
        most = MAX_TOOL_CALLS if self._use.several else 1
        calls: list[FoundCall] = []
        for call in parsed.calls[: max(0, most - self.num_calls)]:
            calls.append(FoundCall(self.num_calls, self._use.new_id(), call.name, call.arguments))
            self.num_calls += 1
        return FoundCalls(parsed.content, tuple(calls))


def _clean_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """By hand: a union's errors would speak of all its forms at once."""
    fields = supported(choice, ("type", "function"), {}, "tool_choice.")
    if fields.get("type") != "function":
        found = shown(fields.get("type"))
        raise BadRequestError(f"`tool_choice.type` must be 'function', not {found}", param="tool_choice.type")
    function = fields.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or set(function) != {"name"}:
        param = "tool_choice.function"
        raise BadRequestError(f"`{param}` must be an object with a `name`", param=param)
    return fields


def _clean_tool(tool: object, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise BadRequestError(f"`{path}` must be an object, not {kind(tool)}", param=path)
    fields = supported(tool, Tool.model_fields, {}, f"{path}.")
    if isinstance(fields.get("function"), dict):
        fields["function"] = supported(fields["function"], FunctionTool.model_fields, {}, f"{path}.function.")
    return fields
