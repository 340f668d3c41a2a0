"""Which JSON Schemas can be enforced to the letter. Whatever else a schema says is refused, and named.

The compiler behind this enforces each keyword of `_ENFORCED`; it would pass over others in silence, so they are looked
for here. Some of what it does is narrower than JSON Schema: properties come in the order in which the schema lists them,
those that it does not list after them, characters stand for themselves and not as `\\u` escapes, and a fraction may be held
to fewer spellings than there are.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from jaxserve.structured.errors import GrammarError

_ENFORCED = frozenset(
    (
        *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"),
        *("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
        *("items", "prefixItems", "minItems", "maxItems"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format"),
    )
)
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$defs", "definitions", "discriminator", "externalDocs", "xml"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    )
)
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_PASSES = 32  # over all references: one for each time that they turn back in the order of what they refer to
_ESCAPES = "\b\f\n\r\t"  # control characters that have a short escape

Schema = dict[str, Any] | bool

# Between the tokens of JSON stands at most this, once: so that no output consists of it. Without \u: a name of a property
# could hide behind it.
JSON_OPTIONS: Any = {"whitespace_pattern": r" |\n {0,16}", "json_allowed_escapes": '"\\bfnrt'}


def check_schema(schema: Schema) -> None:
    """Raises:
    GrammarError: names the first part that cannot be enforced, or says that nothing finite satisfies the schema.
    """
    references: dict[str, str] = {}
    for part, path in _subschemas(schema, ""):
        _check_part(part, path, is_root=path == "")
        reference = part.get("$ref")
        if reference is not None:
            references.setdefault(reference, _at(path, "$ref"))
    by_target: dict[int, tuple[Any, list[str]]] = {}  # a part may be referred to in several spellings
    for reference, path in references.items():
        target = _resolve(schema, reference, path)
        by_target.setdefault(id(target), (target, []))[1].append(reference)
    finite = _finite([*by_target.values()])
    for reference, path in references.items():
        if reference not in finite:
            raise GrammarError(f"{reference!r} refers to itself without end: no finite value satisfies it", path)


def inline_schema(schema: Schema) -> str:
    """A schema as JSON, to stand behind Lark's `%json`; enforced just as it is alone.

    Raises:
        GrammarError: it cannot be enforced.
    """
    check_schema(schema)
    if schema is False:
        raise GrammarError("nothing satisfies the schema `false`")
    parts = {} if isinstance(schema, bool) else schema
    return json.dumps({**parts, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)


def _finite(unknown: list[tuple[Any, list[str]]]) -> set[str]:
    """Of the parts that are referred to, each with its references, the references of those that have finite values."""
    finite: set[str] = set()
    for _ in range(_MAX_PASSES):
        unknown = unknown[::-1]  # those that come first most often refer to later ones; else to earlier ones
        left: list[tuple[Any, list[str]]] = []
        for target, names in unknown:
            if _ends(target, finite):
                finite.update(names)
            else:
                left.append((target, names))
        if not left or len(left) == len(unknown):
            return finite
        unknown = left
    raise GrammarError("its references lead back and forth between its definitions too often: order these")


def _subschemas(schema: Any, path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Every object that is a schema, and where it is."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise GrammarError(f"a schema is an object or a boolean, not {type(schema).__name__}", path)
    yield schema, path
    for keyword in _MAPS:
        members = schema.get(keyword, {})
        if not isinstance(members, dict):
            raise GrammarError(f"`{keyword}` must be an object", _at(path, keyword))
        for name, member in members.items():
            yield from _subschemas(member, _at(path, keyword, name))
    for keyword in _LISTS:
        members = schema.get(keyword, [])
        if not isinstance(members, list):
            raise GrammarError(f"`{keyword}` must be a list of schemas", _at(path, keyword))
        for index, member in enumerate(members):
            yield from _subschemas(member, f"{_at(path, keyword)}[{index}]")
    for keyword in _SINGLE:
        if keyword in schema:
            yield from _subschemas(schema[keyword], _at(path, keyword))


def _check_part(schema: dict[str, Any], path: str, *, is_root: bool) -> None:
    for keyword, value in schema.items():
        known = keyword in _ENFORCED or keyword in _ANNOTATIONS or (keyword == "$id" and is_root)
        if not known and not (keyword.startswith("x-") and keyword != "x-guidance"):
            raise GrammarError(f"the keyword `{keyword[:100]}` cannot be enforced: leave it out", _at(path, keyword))
        if keyword in _NUMBERS and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise GrammarError(f"`{keyword}` must be a number", _at(path, keyword))
        if keyword == "$ref" and not isinstance(value, str):
            raise GrammarError("`$ref` must be a string", _at(path, keyword))
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise GrammarError("`required` must be a list of strings", _at(path, "required"))
    texts = [*schema.get("properties", {}), *required, schema.get("const"), *_list(schema.get("enum"))]
    for text in _strings(texts):
        if any((character < " " and character not in _ESCAPES) or character == "\x7f" for character in text):
            raise GrammarError(f"the control characters of {text[:100]!r} cannot be written", path)
    _check_format(schema, path)
    _check_bounds(schema, path)
    least = schema.get("minProperties", 0)
    is_open = schema.get("additionalProperties", True) is not False or bool(schema.get("patternProperties"))
    if is_open and isinstance(least, int) and least > max(1, len(required)):
        message = (
            "`minProperties` above 1 is enforced only where all properties are listed or required: a name may repeat"
        )
        raise GrammarError(message, _at(path, "minProperties"))


def _check_format(schema: dict[str, Any], path: str) -> None:
    name, kinds = schema.get("format"), schema.get("type", "string")
    if isinstance(name, str) and name not in _FORMATS and (kinds == "string" or "string" in _list(kinds)):
        raise GrammarError(f"the format {name[:100]!r} cannot be enforced: leave it out", _at(path, "format"))


def _check_bounds(schema: dict[str, Any], path: str) -> None:
    """Refuses what the library gets wrong: a whole number as exclusive bound, less than 1 from the other, is let in."""
    lows, highs = _bounds(schema, "inimum"), _bounds(schema, "aximum")
    for keyword, own, others in (("exclusiveMinimum", lows, highs), ("exclusiveMaximum", highs, lows)):
        values = sorted(value for value, _ in others)
        for value, is_excluded in own:
            if is_excluded and (isinstance(value, int) or value.is_integer()):
                whole = int(value)
                place = bisect_right(values, whole - 1)  # of the least that is larger
                if place < len(values) and values[place] < whole + 1:
                    raise GrammarError(
                        f"a whole number as `{keyword}` cannot be enforced less than 1 from the other bound", path
                    )


def _bounds(schema: dict[str, Any], name: str) -> list[tuple[float, bool]]:
    """The bounds on one side that hold together, each with whether it is exclusive."""
    found = [(schema[key], key[0] == "e") for key in (f"m{name}", f"exclusiveM{name}") if key in schema]
    for part in schema.get("allOf", ()):
        if isinstance(part, dict):
            found += _bounds(part, name)
    return [bound for bound in found if isinstance(bound[0], (int, float))]


def _resolve(root: Schema, reference: str, path: str) -> Any:
    """What a reference refers to; a JSON pointer (RFC 6901) into the schema itself."""
    if reference != "#" and not reference.startswith("#/"):
        raise GrammarError(
            f"{reference[:200]!r}: only references into the schema itself are followed, as '#/$defs/x'", path
        )
    part: Any = root
    for step in reference[2:].split("/") if reference != "#" else ():
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict) and step in part:
            part = part[step]
        elif isinstance(part, list) and step.isdecimal() and int(step) < len(part):
            part = part[int(step)]
        else:
            raise GrammarError(f"{reference[:200]!r} refers to nothing", path)
    if not isinstance(part, (dict, bool)):
        raise GrammarError(f"{reference[:200]!r} refers to something that is no schema", path)
    return part


def _ends(schema: Any, finite: set[str]) -> bool:
    """Whether a schema has finite values, if the references in `finite` have."""
    if not isinstance(schema, dict):
        return True
    if "$ref" in schema and schema["$ref"] not in finite:
        return False
    if not all(_ends(part, finite) for part in schema.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(_ends(part, finite) for part in schema[keyword]):
            return False
    if "enum" in schema or "const" in schema:
        return True
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if any(kind not in ("object", "array") for kind in kinds):
        return True
    properties, needed = schema.get("properties", {}), schema.get("required", ())
    objects = all(_ends(properties[name], finite) for name in needed if name in properties)
    least = schema.get("minItems", 0)
    items = [*schema.get("prefixItems", ()), schema.get("items", True)][: least if isinstance(least, int) else 1]
    arrays = all(_ends(item, finite) for item in items)
    ends = {"object": objects, "array": arrays}
    if kinds:
        return any(ends[kind] for kind in kinds)
    return not properties or objects  # without a type, most of what it allows is neither


def _strings(values: list[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from _strings(value)
        elif isinstance(value, dict):
            yield from _strings([*value, *value.values()])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _at(path: str, *names: str) -> str:
    return ".".join([*([path] if path else []), *(name[:100] for name in names)])
