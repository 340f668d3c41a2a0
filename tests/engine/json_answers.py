"""JSON from the tiny model: a vocabulary that JSON is made of, schemas over it, and what must hold of answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from jaxserve.engine.client import EngineClient
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.grammar import CompiledGrammar, Grammar, compile_grammar
from tests.structured.grammars import vocabulary_of
from tests.tiny_engine import EOS, Answer

_TEXTS = ["", "", *'{}[]":,-. 0123456789abcdefghijklmnopqrstuvwxyz', '":', '", "', '"]', '"}', "true", "false", "null", "ab",
          "10", "one", "],", "[[", "{\"", ", ", "aa", "bc"]  # fmt: skip
MOST_TOKENS = 48
PROMPT = (20, 21, 22, 20, 21, 22, 20, 21)

SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {"abcabc": {"type": "boolean"}, "one": {"enum": ["abcdef", "abcfed"]}, "n": {"type": "integer"}},
        "required": ["abcabc", "one"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["aa", "ab", 10, True]}, "minItems": 6, "maxItems": 9},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 3}},
    {"type": "string", "pattern": "^(abc){2,8}-[0-9]{4}$"},
    {"type": "object", "additionalProperties": {"type": ["boolean", "null"]}, "minProperties": 1},
)


@cache
def json_grammar(schema: str) -> CompiledGrammar:
    return compile_grammar(Grammar("json", schema), vocabulary_of(_TEXTS))


def text_of(tokens: Sequence[int]) -> str:
    return "".join(_TEXTS[token] for token in tokens)


def json_requests(**options: Any) -> list[SamplingParams]:
    """One for each schema."""
    return [
        SamplingParams(
            max_tokens=MOST_TOKENS, constraint=json_grammar(json.dumps(schema)), **{"seed": number, **options}
        )
        for number, schema in enumerate(SCHEMAS)
    ]


def check_json_answers(plain: EngineClient, engine: EngineClient) -> None:
    """Greedy and seeded ones are those of an engine without speculation; others satisfy their schemas as well."""
    bound = [*json_requests(temperature=0.0), *json_requests(temperature=0.0, repetition_penalty=1.2)]
    bound += json_requests(temperature=1.0) + json_requests(temperature=1.5, top_p=0.9, presence_penalty=1.0)
    drawn = json_requests(temperature=1.5, seed=None) * 2
    answers = [Answer(engine, PROMPT, sampling) for sampling in [*bound, *drawn]]
    wanted = [Answer(plain, PROMPT, sampling) for sampling in bound]
    for answer in [*answers, *wanted]:
        answer.wait()
    num_whole = 0
    for number, answer in enumerate(answers):
        tokens, reason = answer.choices[0], answer.reasons[0]
        if number < len(bound):
            assert (tokens, reason) == (wanted[number].choices[0], wanted[number].reasons[0])
        if reason == "stop":
            text = text_of(tokens[:-1] if tokens[-1] == EOS else tokens)
            Draft202012Validator(SCHEMAS[number % len(SCHEMAS)]).validate(json.loads(text))
            num_whole += 1
        else:
            assert reason == "length" and len(tokens) == MOST_TOKENS
    assert num_whole > len(answers) / 2
