"""Bodies that would cost too much to parse are refused before they are, and long texts are not taken for them."""

from __future__ import annotations

import json

import pytest

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.json_cost import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES
from jaxserve.protocol.parsing import parse_json
from jaxserve.protocol.requests import MAX_PROMPT_TOKEN_IDS

MANY = 2_000_000


@pytest.mark.parametrize(
    "body",
    [
        b"[" * MANY,
        b'{"a":' * MANY,
        b'{"a":[' + b"[1]," * MANY + b"1]}",
        b'{"a":[' + b"1," * MANY + b"1]}",
        b'{"a":[' + b'"",' * MANY + b"1]}",
        b'{"a":[' + b'"\\\\",' * MANY + b"1]}",
        b'{"a":{' + b'"":"",' * MANY + b'"":1}}',
        b'"' * MANY,
        b'{"a":"' + b"\\\\" * MANY + b'",' + b"[" * MANY,
    ],
    ids=range(9),
)
def test_too_many_values_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError) as refused:
        parse_json(body)
    assert refused.value.code == "too_many_values"


@pytest.mark.parametrize("piece", ["[{,", '"', '",', "\\", '\\"', "\\\\[", "\n{", "x"])
def test_texts_may_say_anything(piece: str) -> None:
    text = piece * 1_300_000
    assert parse_json(json.dumps({"prompt": text, "n": [1]}).encode()) == {"prompt": text, "n": [1]}


@pytest.mark.parametrize(
    "value",
    [
        [1] * MAX_PROMPT_TOKEN_IDS,
        [1] * (MAX_VALUES - 1),
        [""] * (MAX_STRINGS - 1),
        [[]] * (MAX_CONTAINERS - 2),
    ],
    ids=["prompt", "values", "strings", "containers"],
)
def test_as_many_as_allowed_are_parsed(value: list[object]) -> None:
    assert parse_json(json.dumps({"a": value}).encode()) == {"a": value}


@pytest.mark.parametrize("body", [b'{"a', b'"\\', b"\\", b'{"a": "\\"}', b""])
def test_broken_bodies_are_left_to_the_parser(body: bytes) -> None:
    with pytest.raises(BadRequestError) as refused:
        parse_json(body)
    assert refused.value.code == "invalid_json"
