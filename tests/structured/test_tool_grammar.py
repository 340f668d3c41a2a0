"""Grammars of calls: what a model must write when it is to call, and may when it need not."""

from __future__ import annotations

import pytest

from jaxserve.config import ToolCallFormat
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammar_source import json_text
from jaxserve.structured.tool_grammar import CallShape, tool_call_grammar
from tests.structured.grammars import compiled, refused_at

SHAPES = [
    CallShape(
        "f",
        json_text(
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/number"}},
                "required": ["a"],
                "additionalProperties": False,
                "$defs": {"number": {"type": "integer"}},
            }
        ),
    ),
    CallShape("g", '{"type": "object"}'),
]
CALLS = {
    "hermes": ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "\n"),
    "llama3_json": ('{"name": "f", "parameters": {"a": 1}}', "; "),
}
ANSWER = '{"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]}'


def stop_of(kind: ToolCallFormat, text: str, **options: object) -> int | None:
    fields = {"must_call": True, "several": True, **options}
    return refused_at(compiled(tool_call_grammar(kind, SHAPES, **fields)), text)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["hermes", "llama3_json"])
def test_calls_that_must_be(kind: ToolCallFormat) -> None:
    call, between = CALLS[kind]
    assert stop_of(kind, call) is None
    assert stop_of(kind, call + between + call.replace('"f"', '"g"')) is None
    assert stop_of(kind, call + between + call, several=False) == len(call)
    assert stop_of(kind, call.replace("1", '"')) == call.index("1")
    assert stop_of(kind, call.replace('"f"', '"h"')) == call.index('f"')
    assert stop_of(kind, "Hello") == 0


def test_mistral() -> None:
    call = '{"name": "f", "arguments": {"a": 1}}'
    assert stop_of("mistral", f"[TOOL_CALLS][{call}, {call}]") is None
    assert stop_of("mistral", f"[TOOL_CALLS][{call}, {call}]", several=False) is not None
    assert stop_of("mistral", f"So: [TOOL_CALLS][{call}]", must_call=False) is None
    assert stop_of("mistral", "So: [TOOL_CALLS][1", must_call=False) == len("So: [TOOL_CALLS][")


@pytest.mark.parametrize("kind", ["hermes", "llama3_json"])
def test_calls_that_may_be(kind: ToolCallFormat) -> None:
    call, _ = CALLS[kind]
    assert stop_of(kind, "Hello [there] <b", must_call=False) is None
    assert stop_of(kind, call, must_call=False) is None
    assert stop_of(kind, call.replace("1", '"'), must_call=False) == call.index("1")


def test_schemas_are_looked_at_where_they_are_compiled() -> None:
    """And not on the way there, where others wait for it."""
    shape = CallShape("f", '{"not": {}}')
    grammar = tool_call_grammar("hermes", [shape], must_call=True, several=True)
    with pytest.raises(GrammarError, match="`not`"):
        compiled(grammar)
    assert len(grammar.source) < 200


def test_text_around_calls() -> None:
    call, _ = CALLS["hermes"]
    assert stop_of("hermes", f"Well: {call} and {call} done", must_call=False) is None
    assert stop_of("hermes", "Well: <tool_call>x", must_call=False) == len("Well: <tool_call>")


def test_an_answer_in_a_form_of_its_own() -> None:
    call, _ = CALLS["hermes"]
    assert stop_of("hermes", '{"x": null}', must_call=False, answer=ANSWER) is None
    assert stop_of("hermes", call, must_call=False, answer=ANSWER) is None
    assert stop_of("hermes", "Hello", must_call=False, answer=ANSWER) == 0
