"""Three hundred JSON Schemas of growing difficulty, each with values that satisfy it and some that do not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

NAMES = ("a", "b", "c", "d", "e")
TEXTS = (
    "",
    "x",
    'say "hi"',
    "back\\slash",
    "a/b",
    "line\nbreak",
    "tab\t",
    "é",
    "日本語",
    "\U0001f600",
    "null",
    "{}",
    " ",
)


@dataclass(frozen=True)
class SchemaCase:
    """`good` satisfy the schema, with their properties in its order; `bad` do not."""

    schema: Any
    good: tuple[Any, ...]
    bad: tuple[Any, ...]


def all_schemas() -> list[SchemaCase]:
    parts = (_integers, _numbers, _strings, _formats, _enums, _arrays, _objects, _nested, _references, _combined, _open)
    return [case for part in parts for case in part()]


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


def _integers() -> Iterator[SchemaCase]:
    for low, high in ((0, 0), (0, 9), (-5, 5), (-100, -7), (3, 1200), (99, 101), (-1, 0), (7, 70), (1000, 1001)):
        yield SchemaCase(
            {"type": "integer", "minimum": low, "maximum": high}, (low, high), (low - 1, high + 1, low + 0.5)
        )
        yield SchemaCase(
            {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1},
            (low, high),
            (low - 1, high + 1),
        )
    for low in (-12, 0, 5):
        yield SchemaCase({"type": "integer", "minimum": low}, (low, 12345), (low - 1, "1"))
        yield SchemaCase({"type": "integer", "maximum": low}, (low, -9999), (low + 1, None))
    for factor in (2, 3, 5, 7, 10, 25):
        schema = {"type": "integer", "multipleOf": factor, "minimum": 0, "maximum": 1000}
        yield SchemaCase(schema, (0, factor, 20 * factor), (1, factor + 1, -factor))


def _numbers() -> Iterator[SchemaCase]:
    for low, high in ((0, 1), (-1, 1), (0.5, 2.25), (-10.5, -3), (10, 1000), (-7.5, 42)):
        yield SchemaCase({"type": "number", "minimum": low, "maximum": high}, (low, high), (low - 1, high + 1, "x"))
        middle = (low + high) / 2
        schema = {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
        yield SchemaCase(schema, (middle,), (low, high, high + 1))
    for factor, good in ((0.5, (1.5, 2)), (0.25, (0.75, 1)), (0.125, (0.375, 1))):
        yield SchemaCase({"type": "number", "multipleOf": factor, "minimum": 0, "maximum": 50}, good, (0.33, -1, 51))
    yield SchemaCase({"type": "number"}, (0, -1.5, 12), ("1", None, True))
    yield SchemaCase({"type": ["number", "null"]}, (1.5, None), ("", False))


def _strings() -> Iterator[SchemaCase]:
    for low, high in ((0, 0), (0, 3), (1, 1), (2, 5), (3, 8), (10, 12)):
        yield SchemaCase(
            {"type": "string", "minLength": low, "maxLength": high}, ("é" * low, "x" * high), ("x" * (high + 1), 5)
        )
    patterns = {
        "^a+$": ("aaa", "b"), "^[a-z]{2,4}$": ("abc", "a"), "^[0-9]{3}-[0-9]{4}$": ("555-1234", "5551234"),
        "^(red|green|blue)$": ("green", "reds"), "^[A-Z][a-z]*$": ("Bern", "bern"), "^\\d{4}$": ("2024", "24"),
        "^[é-ü]{1,3}$": ("éü", "ab"), "^x?y?z?$": ("xz", "zx"), "^(ab){1,3}$": ("abab", "aba"),
        "^[^\"]{1,4}$": ("ab", "abcde"),
        "^-?[1-9][0-9]{0,3}$": ("-12", "012"), "^[\\w.]{1,6}@[a-z]{1,4}\\.ch$": ("me@x.ch", "me.ch"),
        "^\\{[a-c]\\}$": ("{a}", "a"), "^[\\\\/]{1,2}$": ("\\/", "|"), "^(a|b)(c|d)?$": ("ac", "ca"),
        "^ {1,2}x$": (" x", "x"),
    }  # fmt: skip
    for pattern, (good, bad) in patterns.items():
        yield SchemaCase({"type": "string", "pattern": pattern, "maxLength": 20}, (good,), (bad, 3))
    for word in ("x", "ab", "9"):
        yield SchemaCase(
            {"type": "string", "pattern": word, "minLength": 3, "maxLength": 6}, (f"..{word}",), ("...", word)
        )


def _formats() -> Iterator[SchemaCase]:
    examples = {
        "date": ("2024-02-29", "2024-2-9"), "time": ("10:20:30Z", "10"), "date-time": ("2024-02-03T10:20:30Z", "2024-02-03"),
        "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123"), "ipv4": ("10.0.0.255", "10.0.0.256"),
        "duration": ("P3D", "3"),
        "email": ("a@b.ch", "a"), "hostname": ("a.example", "-"),
    }  # fmt: skip
    for name, (good, bad) in examples.items():
        yield SchemaCase({"type": "string", "format": name}, (good,), (bad, 1))


def _enums() -> Iterator[SchemaCase]:
    for text in TEXTS:
        yield SchemaCase({"enum": [text, "other"]}, (text, "other"), (text + "z", None))
        yield SchemaCase({"const": text}, (text,), (text + "z", 0))
    yield SchemaCase({"enum": [1, 2.5, True, None, "1"]}, (1, 2.5, True, None, "1"), (2, False, "2"))
    yield SchemaCase({"const": {"a": [1, {"b": None}]}}, ({"a": [1, {"b": None}]},), ({"a": [1]}, {}))
    yield SchemaCase(
        {"enum": [f"option {i}" for i in range(200)]}, ("option 0", "option 199"), ("option 200", "option")
    )
    yield SchemaCase({"type": "string", "enum": ["a", "b", 3]}, ("a", "b"), (3, "c"))


def _arrays() -> Iterator[SchemaCase]:
    items: list[tuple[Any, Any, Any]] = [
        ({"type": "boolean"}, True, 1), ({"type": "integer", "minimum": 0, "maximum": 99}, 42, -1),
        ({"enum": ["x", "y"]}, "y", "z"),
        ({"type": "string", "maxLength": 3}, "é", "long"), ({"type": "null"}, None, 0),
    ]  # fmt: skip
    for (item, good, bad), (low, high) in itertools.product(items, ((0, 0), (0, 2), (1, 1), (2, 4), (3, 3))):
        schema = {"type": "array", "items": item, "minItems": low, "maxItems": high}
        wrong = ([good] * (high + 1), {}) if high == 0 else ([good] * (high + 1), [bad] * high)
        yield SchemaCase(schema, ([good] * low, [good] * high), wrong)
    for (item, good, bad), (other, second, _) in itertools.pairwise(items):
        pair = {"type": "array", "prefixItems": [item, other], "items": False, "minItems": 2}
        yield SchemaCase(pair, ([good, second],), ([good], [bad, second], [good, second, second]))


def _objects() -> Iterator[SchemaCase]:
    number = {"type": "integer", "minimum": 0, "maximum": 50}
    for size in range(1, 6):
        names = NAMES[:size]
        for mask in range(2**size):
            required = [name for place, name in enumerate(names) if mask >> place & 1]
            whole, least = dict.fromkeys(names, 7), dict.fromkeys(required, 7)
            bad: list[Any] = [{**whole, "zz": 1}, {**whole, names[0]: "x"}]
            if required:
                bad.append({name: 7 for name in names if name != required[-1]})
            yield SchemaCase(closed(dict.fromkeys(names, number), required), (whole, least), tuple(bad))
    for name in TEXTS[1:]:
        yield SchemaCase(closed({name: {"type": "boolean"}}), ({name: True},), ({}, {name: 1}, {name + "z": True}))


def _nested() -> Iterator[SchemaCase]:
    leaves: list[tuple[Any, Any, Any]] = [
        ({"type": "boolean"}, False, 0),
        ({"enum": ["p", "q"]}, "q", "r"),
        ({"const": "é\n"}, "é\n", "é"),
    ]
    for leaf, good, bad in leaves:
        for kinds in (
            "o",
            "a",
            "oo",
            "oa",
            "ao",
            "aa",
            "ooo",
            "oao",
            "aoa",
            "oaoa",
            "ooooo",
            "aaaaa",
            "oaoaoaoa",
            "oooooooooo",
        ):
            schema: Any = leaf
            right, wrong = good, bad
            for depth, form in enumerate(kinds):
                name = f"level{depth}"
                if form == "o":
                    schema, right, wrong = closed({name: schema}), {name: right}, {name: wrong}
                else:
                    schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 2}
                    right, wrong = [right], [right, wrong]
            yield SchemaCase(schema, (right,), (wrong, None))


def _references() -> Iterator[SchemaCase]:
    number = {"type": "integer", "minimum": 1, "maximum": 9}
    for depth in range(1, 7):
        tree = closed({"v": number, f"next{depth}": {"$ref": "#"}}, ["v"])
        chain: Any = {"v": 1}
        for _ in range(depth):
            chain = {"v": 2, f"next{depth}": chain}
        yield SchemaCase(tree, (chain,), ({"v": 0}, {"v": 1, f"next{depth}": {}}))
        branches = closed(
            {"v": number, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": depth}}, ["v"]
        )
        yield SchemaCase(
            branches, ({"v": 1, "children": [{"v": 2}] * depth},), ({"v": 1, "children": [{"v": 2}] * (depth + 1)},)
        )
        definitions = {f"t{i}": {"$ref": f"#/$defs/t{i + 1}"} for i in range(depth)} | {f"t{depth}": number}
        yield SchemaCase({"$ref": "#/$defs/t0", "$defs": definitions}, (5,), (10, "x"))
    lists = {"anyOf": [{"type": "null"}, closed({"head": number, "tail": {"$ref": "#"}})]}
    yield SchemaCase(
        lists, (None, {"head": 1, "tail": {"head": 2, "tail": None}}), ({"head": 1}, {"head": 1, "tail": 2})
    )
    mutual = {
        "$ref": "#/definitions/even",
        "definitions": {
            "even": closed({"odd": {"$ref": "#/definitions/odd"}}, []),
            "odd": closed({"even": {"$ref": "#/definitions/even"}}, []),
        },
    }
    yield SchemaCase(mutual, ({}, {"odd": {"even": {}}}), ({"even": {}}, {"odd": {"odd": {}}}))
    shared = closed({"x": {"$ref": "#/$defs/p~1q"}, "y": {"$ref": "#/$defs/p~1q"}}, **{"$defs": {"p/q": number}})
    yield SchemaCase(shared, ({"x": 1, "y": 2},), ({"x": 1}, {"x": 1, "y": 0}))


def _combined() -> Iterator[SchemaCase]:
    small, text = {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 2}
    yield SchemaCase({"anyOf": [small, text]}, (3, "é"), (10, "abc", None))
    yield SchemaCase({"oneOf": [small, text]}, (3, "é"), (10, "abc", None))
    yield SchemaCase({"anyOf": [small, {"type": "null"}]}, (3, None), ("x",))
    yield SchemaCase({"type": ["boolean", "null"]}, (True, None), (0,))
    yield SchemaCase({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, (3, 5), (2, 6))
    yield SchemaCase({"allOf": [{"$ref": "#/$defs/n"}, {"maximum": 5}], "$defs": {"n": small}}, (0, 5), (6, -1))
    yield SchemaCase(
        {"type": "integer", "anyOf": [{"maximum": 3, "minimum": 0}, {"minimum": 90, "maximum": 99}]}, (3, 95), (50,)
    )
    yield SchemaCase({"allOf": [{"type": "string", "maxLength": 4}, {"pattern": "^a"}]}, ("abc",), ("b", "abcde"))
    for kinds in (("a", "b"), ("cat", "dog", "fox"), ("é", "日")):
        branches = [closed({"kind": {"const": kind}, f"{kind}_size": small}) for kind in kinds]
        good = tuple({"kind": kind, f"{kind}_size": 1} for kind in kinds)
        wrong = ({"kind": kinds[0], f"{kinds[1]}_size": 1}, {"kind": "zz"})
        yield SchemaCase({"anyOf": branches}, good, wrong)
        yield SchemaCase({"oneOf": branches}, good, wrong)
    base = {"type": "object", "properties": {"a": small}, "required": ["a"]}
    extra = {"type": "object", "properties": {"b": text}, "required": ["b"]}
    yield SchemaCase({"allOf": [base, extra], "maxProperties": 2}, ({"a": 1, "b": "x"},), ({"a": 1}, {"b": "x"}))


def _open() -> Iterator[SchemaCase]:
    small = {"type": "integer", "minimum": 0, "maximum": 9}
    for most in (0, 1, 2, 3):
        schema = {"type": "object", "additionalProperties": small, "maxProperties": most}
        yield SchemaCase(schema, (dict.fromkeys(NAMES[:most], 1),), (dict.fromkeys(NAMES[: most + 1], 1), []))
    yield SchemaCase(
        {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": small}, ({"x": 1},), ({},)
    )
    for prefix in ("a", "x_", "é"):
        only = {
            "type": "object",
            "patternProperties": {f"^{prefix}": small},
            "additionalProperties": False,
            "maxProperties": 2,
        }
        yield SchemaCase(only, ({}, {f"{prefix}1": 2}), ({"other": 1}, {f"{prefix}1": "x"}))
        mixed = {"type": "object", "properties": {"p": {"type": "null"}}, "required": ["p"], "maxProperties": 2}
        mixed["patternProperties"] = {f"^{prefix}": small}
        yield SchemaCase(mixed, ({"p": None}, {"p": None, f"{prefix}1": 3}), ({}, {"p": None, f"{prefix}1": "x"}))
    yield SchemaCase(
        {"type": "object", "properties": {"p": small}, "required": ["p", "q"], "maxProperties": 2},
        ({"p": 1, "q": "x"},),
        ({"p": 1},),
    )
