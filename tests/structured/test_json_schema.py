"""JSON Schema as masks: what is accepted, what is refused and where, and which schemas are no good."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve.structured import json_schema
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammar import Grammar
from jaxserve.structured.json_schema import check_schema
from tests.structured.grammars import accepts, allowed, compiled, refused_at

TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["v"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": -5}, ["-5", "-3", "0", "12345"], ["-6", "-", "01"]),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.1", "7"], ["0", "0.0", "-1"]),
        ({"type": "number", "minimum": 1, "maximum": 5}, ["1.5", "5"], ["5.7", "0.5"]),
        ({"type": "integer", "minimum": 2}, ["2", "10"], ["1", "-2"]),
        ({"type": "integer", "multipleOf": 3}, ["0", "3", "-3", "999"], ["1", "10"]),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, ['"a"', '"aaa"'], ['"aaaa"', '""', '"b"']),
        ({"type": "string", "pattern": "b"}, ['"abc"'], ['"aaa"']),
        ({"type": "string", "format": "date"}, ['"2024-02-03"'], ['"2024-2-3"', '"x"']),
        ({"type": ["string", "null"]}, ['"x"', "null"], ["1"]),
        ({"const": None}, ["null"], ["0"]),
        ({"anyOf": [{"type": "integer"}, {"type": "object", "required": ["a"]}]}, ["1", '{"a":2}'], ["{}", '"x"']),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ['"x"', "3"], ["null"]),
        ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, ["3", "5"], ["2", "6"]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, ["[1,2]"], ["[1]", "[1,2,3,4]"]),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, ["[1]"], ["[1,2]", '["x"]']),
        ({"type": "object", "properties": {}, "required": ["zz"]}, ['{"zz":1}'], ["{}", '{"a":1}']),
        ({"patternProperties": {"^a": {"type": "integer"}}, "type": "object"}, ['{"ab":1,"c":"x"}'], ['{"ab":"x"}']),
        ({"type": "object", "maxProperties": 1}, ['{"a":1}'], ['{"a":1,"b":2}']),
        (TREE, ['{"v":1,"children":[' * 10 + '{"v":2}' + "]}" * 10], ['{"v":1,"children":[1]}', '{"v":1,"x":2}']),
    ],
)  # fmt: skip
def test_what_a_keyword_allows(schema: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(schema, text)] == []
    assert [text for text in bad if accepts(schema, text)] == []


def test_a_text_is_refused_where_it_goes_wrong() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 50}}, "additionalProperties": False}
    grammar = compiled(Grammar.of_schema(schema))
    assert refused_at(grammar, '{"a":51}') == len('{"a":5')
    assert refused_at(grammar, '{"a":x}') == len('{"a":')
    assert refused_at(grammar, '{"b":1}') == len('{"')
    assert refused_at(grammar, '{"a":5}x') == len('{"a":5}')
    assert refused_at(grammar, '{"a":5') == len('{"a":5')  # may not end there


@pytest.mark.parametrize("value", ['a"b', "c\\d", "é", "http://e/x", "\n", "\U0001f600", 1, 1.5, None, {"q": [1]}])
def test_values_of_an_enum_come_out_as_they_are(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert accepts({"enum": [value, "other"]}, text)
    assert accepts(json.loads(json.dumps({"enum": [value, "other"]})), text)


def test_strings_are_well_formed() -> None:
    assert accepts({"type": "string"}, '"\U0001f600"')
    assert accepts({"type": "object", "properties": {'q"k': {}}, "required": ['q"k']}, r'{"q\"k":1}')
    for text in (b'"\n"', rb'"\q"', b'"\\u12"', b'"\x80"', b'"\xed\xa0\x80"', b'"\x01"'):
        assert not accepts({"type": "string"}, text), text


def test_a_declared_property_cannot_hide_behind_an_escape() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert not accepts(schema, r'{"\u0061":"x"}')
    assert not accepts(schema, '{"a":1,"a":"x"}')


def test_white_space_is_bounded() -> None:
    grammar = compiled(Grammar.of_schema({"type": "object", "properties": {"a": {"type": "integer"}}}))
    assert refused_at(grammar, '{\n  "a": 1\n}') is None
    assert refused_at(grammar, '{  "a":1}') == 2
    assert refused_at(grammar, "{\n" + " " * 17) == 18
    assert refused_at(grammar, ' {"a":1}') == 0


def test_nothing_follows_a_value() -> None:
    state = compiled(Grammar.of_schema({"type": "boolean"})).start()
    for byte in b"true":
        assert not state.is_complete
        state.accept(byte)
    assert state.is_complete and state.is_final
    number = compiled(Grammar.of_schema({"type": "integer"})).start()
    number.accept(ord("1"))
    assert number.is_complete and not number.is_final
    assert 259 not in allowed(number)  # no end is among what may follow: the engine knows them


@pytest.mark.parametrize(
    ("schema", "path", "words"),
    [
        ({"properties": {"a": {"not": {"type": "string"}}}}, "properties.a.not", "`not`"),
        ({"if": {}, "then": {}}, "if", "`if`"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains", "contains"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames", "propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired", "dependentRequired"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties", "unevaluatedProperties"),
        ({"anyOf": [{"maximun": 3}]}, "anyOf[0].maximun", "maximun"),
        ({"x-guidance": {"lenient": True}}, "x-guidance", "x-guidance"),
        ({"type": "object", "minProperties": 2}, "minProperties", "minProperties"),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "exclusiveMinimum", "must be a number"),
        ({"type": "array", "items": [{}]}, "items", "object or a boolean"),
        ({"$ref": "#"}, "$ref", "without end"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "$ref", "without end"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "properties.a.$ref", "without end"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "items.$ref", "without end"),
        ({"$ref": "http://example.com/schema"}, "$ref", "into the schema itself"),
        ({"$ref": "#/$defs/nothing"}, "$ref", "nothing"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.6}, "", "`exclusiveMinimum`"),
        ({"allOf": [{"type": "number", "exclusiveMaximum": 0}, {"minimum": -0.6}]}, "", "`exclusiveMaximum`"),
        ({"enum": ["\x01"]}, "", "control characters"),
        ({"enum": []}, "", "anyOf is empty"),
        (False, "", "false"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "", "minItems"),
        ({"type": "integer", "minimum": 10, "maximum": 9}, "", "minimum"),
        ({"items": {"type": ["null", "string"], "format": "foo"}}, "items.format", "'foo'"),
        ({"format": "unknown"}, "format", "'unknown'"),
        ({"type": "strin"}, "", "strin"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "", "oneOf"),
        ({"type": "object", "required": ["z"], "additionalProperties": False}, "", "required property 'z'"),
        ({"type": "string", "pattern": "^(?=a)b"}, "", "look-around"),
        ({"type": "string", "pattern": "^a{1,3}$", "minLength": 5}, "", "empty"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_named(schema: Any, path: str, words: str) -> None:
    with pytest.raises(GrammarError) as refused:
        compiled(Grammar.of_schema(schema))
    assert refused.value.path == path
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_only_describes_is_no_matter() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/x", "title": "t",
        "description": "d", "default": 3, "examples": [1], "$comment": "c", "deprecated": True, "x-order": 1,
        "type": "integer",
    }  # fmt: skip
    assert accepts(schema, "5")


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(GrammarError, match="limit"):
        compiled(Grammar.of_schema({"enum": [f"value {i}" for i in range(100_000)]}))


def test_deep_schemas_are_compiled_or_refused() -> None:
    schema: Any = {"type": "string"}
    for depth in range(200):
        choices = [
            {"type": "integer"},
            {"type": "object", "properties": {f"a{depth}": schema}, "required": [f"a{depth}"]},
        ]
        schema = {"oneOf": choices} if depth < 20 else {"type": "array", "items": schema}
        if depth == 10:
            assert accepts(schema, "3")
    with pytest.raises(GrammarError):
        compiled(Grammar.of_schema(schema))


def chain(order: list[int]) -> dict[str, Any]:
    """A schema whose definitions each refer to the next one; they stand there in that order."""
    count = len(order)
    definitions: dict[int, dict[str, Any]] = {place: {"$ref": f"#/$defs/d{place + 1}"} for place in range(count - 1)}
    definitions[count - 1] = {"type": "integer"}
    return {"$defs": {f"d{place}": definitions[place] for place in order}, "$ref": "#/$defs/d0"}


def test_the_order_of_definitions_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    ends = json_schema._ends
    monkeypatch.setattr(json_schema, "_ends", lambda schema, finite: looked_at.append(1) or ends(schema, finite))
    for order in (list(range(300)), list(reversed(range(300)))):
        check_schema(chain(order))
    assert len(looked_at) < 3000
    back_and_forth = [*range(0, 300, 2), *reversed(range(1, 300, 2))]
    with pytest.raises(GrammarError, match="back and forth"):
        check_schema(chain(back_and_forth))
    assert len(looked_at) < 30_000
    looked_at.clear()
    spellings = [f"#/$defs/{first}{second}" for first in ("%61", "a") for second in ("%62", "b")]
    large = {"allOf": [{"type": "integer"}] * 100}
    check_schema({"$defs": {"ab": large}, "anyOf": [{"$ref": spelling} for spelling in spellings]})
    assert len(looked_at) < 200


def test_numbers_that_no_float_holds_are_bounds_like_others() -> None:
    check_schema({"type": "integer", "exclusiveMinimum": 10**400, "maximum": 10**400 + 1})
    with pytest.raises(GrammarError, match="exclusiveMinimum"):
        check_schema({"type": "integer", "exclusiveMinimum": 10**400, "maximum": 10**400})
