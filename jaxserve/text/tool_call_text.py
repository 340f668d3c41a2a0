"""Tool calls in what a model says: found as the text comes, whole, or left as the text they are.

A call is told when it is complete and not before: half a call, or one of a tool that nobody offered, is text.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from jaxserve.config import ToolCallFormat

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
MISTRAL_BEGIN, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
LLAMA_BEGIN = "<|python_tag|>"
MARKERS = (
    HERMES_BEGIN,
    HERMES_END,
    MISTRAL_BEGIN,
    MISTRAL_ARGUMENTS,
)  # to be shown, even where they are control tokens


@dataclass(frozen=True)
class ParsedCall:
    """One call; `arguments` is a JSON object as text, as the model wrote it where it wrote JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedText:
    """What a piece of text led to: text that is shown, and calls that are complete."""

    content: str = ""
    calls: tuple[ParsedCall, ...] = ()


class ToolCallParser(Protocol):
    """Finds the calls in one answer. Contents and calls joined are the same however the text is cut into pieces."""

    def push(self, text: str) -> ParsedText:
        """Takes the next piece."""
        ...

    def finish(self) -> ParsedText:
        """What was held back, now that nothing follows."""
        ...


def make_parser(kind: ToolCallFormat, names: Collection[str]) -> ToolCallParser:
    """A parser for one answer.

    Args:
        names: of the tools that may be called.
    """
    if kind == "hermes":
        return _MarkedParser(HERMES_BEGIN, _Hermes(), names)
    if kind == "mistral":
        return _MarkedParser(MISTRAL_BEGIN, _Mistral(), names)
    return _WholeParser("[" if kind == "pythonic" else "{", kind == "pythonic", names)


def format_of_template(source: str) -> ToolCallFormat | None:
    """What the calls of a model look like, told by its chat template; None if that does not say."""
    if HERMES_BEGIN in source:
        return "hermes"
    if MISTRAL_BEGIN in source:
        return "mistral"
    if "func_name1(" in source or "func1(" in source:
        return "pythonic"
    if LLAMA_BEGIN in source or '"parameters": dictionary' in source:
        return "llama3_json"
    return None


class _Span:
    """Finds the end of a bracketed value in a text that grows, reading each character once."""

    def __init__(self, quotes: str = '"') -> None:
        self._quotes = quotes
        self._position = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def end(self, text: str) -> int | None:
        """The place behind the closing bracket, if it has come. The text must begin with a bracket, and only grow."""
        for position in range(self._position, len(text)):
            character = text[position]
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in self._quotes:
                self._quote = character
            elif character in "{[(":
                self._depth += 1
            elif character in "}])":
                self._depth -= 1
                if self._depth == 0:
                    return position + 1
        self._position = len(text)
        return None


class _Format(Protocol):
    """What follows the marker of a call."""

    def start(self) -> None: ...
    def read(self, body: str) -> tuple[int, list[ParsedCall]] | None:
        """How long the part is, and its calls (none: it is no call); None: it goes on."""
        ...


class _Hermes:
    """`{"name": …, "arguments": {…}}` and the end marker."""

    def start(self) -> None:
        self._span = _Span()
        self._end: int | None = None

    def read(self, body: str) -> tuple[int, list[ParsedCall]] | None:
        value = body.lstrip()
        start = len(body) - len(value)
        if not value:
            return None
        if not value.startswith("{"):
            return 0, []
        if self._end is None:
            self._end = self._span.end(value)
        if self._end is None:
            return None
        rest = value[self._end :]
        after = rest.lstrip()
        if after.startswith(HERMES_END):
            call = _json_call(value[: self._end], "arguments")
            length = start + self._end + len(rest) - len(after) + len(HERMES_END)
            return (length, [call]) if call else (0, [])
        return None if HERMES_END.startswith(after) else (0, [])


class _Mistral:
    """A JSON list of calls; or, as newer models write, a name and its arguments, with or without `[ARGS]` between them."""

    def start(self) -> None:
        self._span = _Span()

    def read(self, body: str) -> tuple[int, list[ParsedCall]] | None:
        value = body.lstrip()
        start = len(body) - len(value)
        if not value:
            return None
        if value.startswith("["):
            end = self._span.end(value)
            return None if end is None else (start + end, _json_calls(value[:end]))
        brace = value.find("{")
        if brace < 0:
            return (0, []) if "\n" in value.strip() else None
        end = self._span.end(value[brace:])
        if end is None:
            return None
        name = value[:brace].strip().removesuffix(MISTRAL_ARGUMENTS).strip()
        arguments = value[brace : brace + end]
        return (start + brace + end, [ParsedCall(name, arguments)]) if _is_object(arguments) else (0, [])


class _MarkedParser:
    """Calls behind a marker, anywhere in the text. White space before a marker, and after a call, belongs to neither."""

    def __init__(self, marker: str, form: _Format, names: Collection[str]) -> None:
        self._marker = marker
        self._form = form
        self._names = names
        self._buffer = ""
        self._inside = False
        self._held_space = ""  # before the marker, if what follows is no call after all
        self._after_call = False

    def push(self, text: str) -> ParsedText:
        self._buffer += text
        content: list[str] = []
        calls: list[ParsedCall] = []
        while self._step(content, calls):
            pass
        return ParsedText("".join(content), tuple(calls))

    def finish(self) -> ParsedText:
        rest, self._buffer = self._buffer, ""
        if self._inside:
            return ParsedText(self._held_space + rest)
        return ParsedText(rest.lstrip() if self._after_call else rest)

    def _step(self, content: list[str], calls: list[ParsedCall]) -> bool:
        """Takes one part off the buffer; whether there may be more."""
        if self._inside:
            return self._read_call(content, calls)
        if self._after_call:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return False
        place = self._buffer.find(self._marker)
        if place >= 0:
            self._show(self._buffer[:place], content)
            self._buffer = self._buffer[place:]
            self._inside = True
            self._form.start()
            return True
        undecided = _beginning(self._buffer, self._marker)
        visible = self._buffer[:undecided].rstrip()
        if visible:
            content.append(visible)
            self._after_call = False
            self._buffer = self._buffer[len(visible) :]
        return False

    def _show(self, text: str, content: list[str]) -> None:
        if text.strip():
            content.append(text.rstrip())
        self._held_space = text[len(text.rstrip()) :]

    def _read_call(self, content: list[str], calls: list[ParsedCall]) -> bool:
        found = self._form.read(self._buffer[len(self._marker) :])
        if found is None:
            return False
        length, new_calls = found
        self._inside = False
        if new_calls and all(call.name in self._names for call in new_calls):
            calls += new_calls
            self._buffer = self._buffer[len(self._marker) + length :]
            self._after_call = True
        else:  # text after all, and so is the space before it
            content.append(self._held_space + self._marker)
            self._buffer = self._buffer[len(self._marker) :]
            self._after_call = False
        return True


class _WholeParser:
    """An answer that consists of calls, from its first character on: JSON objects, or Python's list of calls."""

    def __init__(self, first: str, is_python: bool, names: Collection[str]) -> None:
        self._first = first
        self._is_python = is_python
        self._names = names
        self._buffer = ""
        self._span = _Span("\"'" if is_python else '"')
        self._is_text = False
        self._has_calls = False

    def push(self, text: str) -> ParsedText:
        if self._is_text:
            return ParsedText(text)
        self._buffer += text
        calls: list[ParsedCall] = []
        while True:
            start = self._start()
            if start is None:
                return ParsedText(calls=tuple(calls))
            end = self._span.end(self._buffer[start:]) if self._buffer[start] == self._first else 0
            if end is None:
                return ParsedText(calls=tuple(calls))
            found = self._read(self._buffer[start : start + end]) if end else []
            if not found or not all(call.name in self._names for call in found):
                self._is_text = True
                rest, self._buffer = self._buffer, ""
                return ParsedText(rest.lstrip("; \n\t") if self._has_calls else rest, tuple(calls))
            calls += found
            self._has_calls = True
            self._buffer = self._buffer[start + end :]
            self._span = _Span("\"'" if self._is_python else '"')

    def finish(self) -> ParsedText:
        rest, self._buffer = self._buffer, ""
        return ParsedText(rest.lstrip("; \n\t") if self._has_calls else rest)

    def _start(self) -> int | None:
        """Where the next value begins; None while that is open."""
        ignored = "; \n\t" if self._has_calls else " \n\t"
        text = self._buffer.lstrip(ignored)
        if LLAMA_BEGIN.startswith(text[: len(LLAMA_BEGIN)]) and not self._is_python:
            text = text[len(LLAMA_BEGIN) :].lstrip()
        return len(self._buffer) - len(text) if text else None

    def _read(self, value: str) -> list[ParsedCall]:
        if self._is_python:
            return _python_calls(value)
        call = _json_call(value, "parameters") or _json_call(value, "arguments")
        return [call] if call else []


def _beginning(text: str, marker: str) -> int:
    """Where an end of the text that begins the marker starts; the text's length if there is none."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)


def _json_call(text: str, key: str) -> ParsedCall | None:
    value = _loads(text)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get(key), dict):
        return None
    return ParsedCall(value["name"], _raw_member(text, key) or json.dumps(value[key], ensure_ascii=False))


def _raw_member(text: str, key: str) -> str | None:
    """The member as it is written, where it is the last of its object, as models write it."""
    place = text.find(f'"{key}"')
    brace = text.find("{", place)
    if place < 0 or brace < 0 or text[place + len(key) + 2 : brace].strip() != ":":
        return None
    end = _Span().end(text[brace:])
    return text[brace : brace + end] if end is not None and text[brace + end :].strip() == "}" else None


def _json_calls(text: str) -> list[ParsedCall]:
    values = _loads(text)
    if not isinstance(values, list):
        return []
    calls = [_json_call(json.dumps(value, ensure_ascii=False), "arguments") for value in values]
    return [call for call in calls if call] if all(calls) else []


def _is_object(text: str) -> bool:
    return isinstance(_loads(text), dict)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)  # NaN and the like are no JSON
    except (ValueError, RecursionError):
        return None


def _python_calls(text: str) -> list[ParsedCall]:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            return []
        return [_python_call(element) for element in tree.elts]
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return []


def _python_call(node: ast.expr) -> ParsedCall:
    """Raises ValueError if it is no call with literal keyword arguments."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call by keywords")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("no keyword")
        arguments[keyword.arg] = ast.literal_eval(_with_json_names(keyword.value))
    return ParsedCall(ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False))


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        names = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(names[node.id]), node) if node.id in names else node


def _with_json_names(node: ast.expr) -> ast.expr:
    """JSON's true, false and null, which models write there too, as Python's."""
    return _JsonNames().visit(node)
