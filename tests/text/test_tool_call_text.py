"""Calls in what models say: found whole, however the text is cut, and left as text where they are none."""

from __future__ import annotations

import json

import pytest

from jaxserve.config import ToolCallFormat
from jaxserve.text.tool_call_text import format_of_template, make_parser

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call> é"}}\n</tool_call>'
CASES: list[tuple[ToolCallFormat, str, str, list[tuple[str, dict]]]] = [
    ("hermes", f"Well.\n{HERMES}\n{HERMES}", "Well.", [("f", {"a": "</tool_call> é"})] * 2),
    ("hermes", f"{HERMES}\n{HERMES}", "", [("f", {"a": "</tool_call> é"})] * 2),
    ("hermes", "just <tool text ", "just <tool text ", []),
    ("hermes", 'x \n<tool_call>\n{"name"', 'x \n<tool_call>\n{"name"', []),
    ("hermes", "a \n<tool_call>nope</tool_call> b", "a \n<tool_call>nope</tool_call> b", []),
    ("hermes", HERMES.replace('"f"', '"unknown"'), HERMES.replace('"f"', '"unknown"'), []),
    ("hermes", f"{HERMES}  and then", "and then", [("f", {"a": "</tool_call> é"})]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": []}}', "",
     [("f", {}), ("g", {"b": []})]),
    ("llama3_json", '<|python_tag|>{"name":"g","parameters":{}}', "", [("g", {})]),
    ("llama3_json", '{"name": "Bob", "age": 3} it is', '{"name": "Bob", "age": 3} it is', []),
    ("llama3_json", '{"name": "f", "para', '{"name": "f", "para', []),
    ("llama3_json", '{"name": "f", "parameters": {"a": NaN}}', '{"name": "f", "parameters": {"a": NaN}}', []),
    ("llama3_json", "  hello {", "  hello {", []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name":"g","arguments":{}}]', "",
     [("f", {"a": 1}), ("g", {})]),
    ("mistral", 'Yes [TOOL_CALLS]f[ARGS]{"a": 2}', "Yes", [("f", {"a": 2})]),
    ("mistral", '[TOOL_CALLS]f{"a": 2}[TOOL_CALLS]g{}', "", [("f", {"a": 2}), ("g", {})]),
    ("mistral", '[TOOL_CALLS][{"name": "f"', '[TOOL_CALLS][{"name": "f"', []),
    ("mistral", "[TOOL", "[TOOL", []),
    ("pythonic", '[f(a=1, b="x]"), g(c=[1], d={"k": true}, e=None)]', "",
     [("f", {"a": 1, "b": "x]"}), ("g", {"c": [1], "d": {"k": True}, "e": None})]),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("pythonic", "[f(a=1", "[f(a=1", []),
    ("pythonic", '[f(a=__import__("os"))]', '[f(a=__import__("os"))]', []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_calls_and_text(
    kind: ToolCallFormat, text: str, content: str, calls: list[tuple[str, dict]], size: int
) -> None:
    parser = make_parser(kind, {"f", "g"})
    parts = [parser.push(text[start : start + size]) for start in range(0, len(text), size)]
    parts.append(parser.finish())
    assert "".join(part.content for part in parts) == content
    assert [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls] == calls


def test_arguments_stay_as_the_model_wrote_them() -> None:
    (call,) = make_parser("hermes", {"f"}).push('<tool_call>{"name":"f","arguments":{ "a":1.0 }}</tool_call>').calls
    assert call.arguments == '{ "a":1.0 }'


def test_text_is_not_held_back_for_nothing() -> None:
    assert make_parser("hermes", {"f"}).push("Hello there").content == "Hello there"
    assert make_parser("llama3_json", {"f"}).push("Hello").content == "Hello"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("{{ tools }}<tool_call>", "hermes"), ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"), ("should be [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ messages }}", None),
    ],
)  # fmt: skip
def test_the_template_tells_the_form(source: str, kind: str | None) -> None:
    assert format_of_template(source) == kind
