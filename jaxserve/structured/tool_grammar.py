"""Grammars of answers with tool calls, in the form that the model writes them in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.config import ToolCallFormat
from jaxserve.structured.grammar_source import Grammar, json_text
from jaxserve.structured.json_schema import inline_schema
from jaxserve.text.tool_call_text import HERMES_BEGIN, HERMES_END, MISTRAL_BEGIN


@dataclass(frozen=True)
class CallShape:
    """A tool that may be called, and the schema that its arguments are held to, as `json_text` writes it."""

    name: str
    schema: str


def tool_call_grammar(
    kind: ToolCallFormat,
    tools: Sequence[CallShape],
    *,
    must_call: bool,
    several: bool,
    mistral_begin_id: int | None = None,
    answer: str | None = None,
) -> Grammar:
    """What an answer may be. The schemas are looked at where it is compiled.

    Args:
        must_call: it consists of calls; else it may be calls, or text with calls in it, as the form has it.
        several: there may be more than one call.
        kind: not "pythonic", whose arguments are no JSON.
        mistral_begin_id: of the control token that calls begin with, where the vocabulary has it.
        answer: JSON Schema that an answer without a call must satisfy, as text; None: it may be any text.
    """
    form = {"kind": kind, "must_call": must_call, "several": several, "mistral_begin_id": mistral_begin_id}
    # Of parts that are JSON already: others wait until it is written.
    shapes = ",".join(f"[{json_text(tool.name)},{tool.schema}]" for tool in tools)
    return Grammar("tools", f'{{"form":{json_text(form)},"answer":{answer or "null"},"tools":[{shapes}]}}')


def tool_call_lark(source: str) -> str:
    """What `tool_call_grammar` has made, in Lark's notation. It takes a tenth of a second for long ones.

    Raises:
        GrammarError: a schema cannot be enforced.
    """
    asked = json.loads(source)
    kind, several = asked["form"]["kind"], asked["form"]["several"]
    begin, separator, end = _frame(kind, asked["form"]["mistral_begin_id"])
    lines = ["%llguidance {}"]
    calls = []
    key = "parameters" if kind == "llama3_json" else "arguments"
    for place, (name, schema) in enumerate(asked["tools"]):
        lines.append(f"call_{place}: {_text(_opening(name, key))} arguments_{place} {_text('}')}")
        lines.append(f"arguments_{place}: %json {inline_schema(schema)}")
        calls.append(f"call_{place}")
    lines.append(f"call: {' | '.join(calls)}")
    if kind == "hermes":
        one = f"{_text(chr(10))} call {_text(chr(10) + HERMES_END)}"
        lines.append(f"calls: {begin} {one}" + (f" ({_text(chr(10) + HERMES_BEGIN)} {one})*" if several else ""))
    else:
        lines.append(f"calls: {begin} call" + (f" ({_text(separator)} call)*" if several else "") + f" {end}")
    if asked["form"]["must_call"]:
        lines.append("start: calls")
    elif asked["answer"] is not None:
        lines += ["start: calls | answer", f"answer: %json {inline_schema(asked['answer'])}"]
    elif kind == "llama3_json":
        lines += ["start: calls | TEXT |", r"TEXT: /[^{\s](.|\n)*/"]
    else:
        lines += _text_with_calls(kind, begin, several)
    return "\n".join(lines) + "\n"


def _frame(kind: ToolCallFormat, mistral_begin_id: int | None) -> tuple[str, str, str]:
    """What stands before the first call, between two, and behind the last, in Lark's notation (the second: as text)."""
    if kind == "hermes":
        return _text(HERMES_BEGIN), "", ""
    if kind == "mistral":
        begin = _text(MISTRAL_BEGIN) if mistral_begin_id is None else f"<[{mistral_begin_id}]>"
        return f"{begin} {_text('[')}", ", ", _text("]")
    return "", "; ", ""


def _text_with_calls(kind: str, begin: str, several: bool) -> list[str]:
    """Any text; where the marker of a call comes, a call follows."""
    marker = HERMES_BEGIN if kind == "hermes" else MISTRAL_BEGIN
    body = (
        f"{_text(chr(10))} call {_text(chr(10) + HERMES_END)}"
        if kind == "hermes"
        else (f"{_text('[')} call" + (f" ({_text(', ')} call)*" if several else "") + f" {_text(']')}")
    )
    lines = [f"start: marked{'*' if several and kind == 'hermes' else '?'} rest", "rest: TEXT", r"TEXT: /(.|\n)*/"]
    if begin.startswith("<["):
        return [*lines, f"marked: TEXT {begin.split()[0]} {body}"]
    return [*lines, f"marker[lazy]: /(.|\\n)*/ {_text(marker)}", f"marked: marker {body}"]


def _opening(name: str, key: str) -> str:
    return f'{{"name": {json.dumps(name)}, "{key}": '


def _text(text: str) -> str:
    return json.dumps(text)
