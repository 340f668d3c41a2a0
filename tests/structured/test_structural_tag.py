"""Text with tagged parts: free outside of them, held to a schema inside."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammar_source import json_text
from jaxserve.structured.structural_tag import Tag, structural_tag_grammar
from tests.fakes import byte_tokenizer
from tests.structured.grammars import compiled, refused_at

NUMBER = json_text(
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
)
TAGS = [
    Tag("<function=f>", NUMBER, "</function>"),
    Tag("<function=g>", '{"type": "array", "items": {"enum": ["é"]}, "maxItems": 2}', "</function>"),
    Tag("😀[", "true", ""),
]
TRIGGERS = ["<function=", "😀"]


def stop_of(text: str | bytes, tags: Sequence[Tag] = TAGS, triggers: Sequence[str] = TRIGGERS) -> int | None:
    return refused_at(compiled(structural_tag_grammar(tags, triggers, {})), text)


@pytest.mark.parametrize(
    "text",
    [
        "", "Hello\n\n{there}", "a < b and <funct and function=", '<function=f>{"a": 1}</function>',
        'So: <function=f>{"a": 1}</function> and <function=g>["é","é"]</function>\n😀[null done', "😀[[1]",
    ],
)  # fmt: skip
def test_text_with_tags(text: str) -> None:
    assert stop_of(text) is None


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("So: <function=h>", len("So: <function=")),
        ('<function=f>{"b', len('<function=f>{"')),
        ('x <function=f>{"a": 1}</function> <function=g>["a', len('x <function=f>{"a": 1}</function> <function=g>["')),
        ('<function=f>{"a": 1}<', None),  # the end may go on
        ('<function=f>{"a": 1} ', len('<function=f>{"a": 1}')),
        ("😀 ", len("😀".encode())),
    ],
)
def test_what_follows_a_trigger_is_a_tag(text: str, stop: int | None) -> None:
    assert stop_of(text) == (len(text.encode()) if stop is None else stop)


def test_control_tokens_stand_for_themselves() -> None:
    ids = {"<|call|>": 257, "<|end|>": 258}
    grammar = compiled(structural_tag_grammar([Tag("<|call|>f:", NUMBER, "<|end|>")], ["<|call|>"], ids))
    state = grammar.start()
    for token in [*b"So: ", 257, *b'f:{"a":1}', 258, *b" and ", 257]:
        state.accept(token)
    assert not state.is_complete
    assert refused_at(grammar, "as text: <|call|> is nothing") is None


@pytest.mark.parametrize(
    ("tags", "triggers", "path"),
    [
        ([Tag("<f>", "true", "")], ["<g"], "triggers[0]"),
        ([Tag("<f>", "true", ""), Tag("[f", "true", "")], ["<"], "structures[1].begin"),
        ([Tag("<f>", "true", "")], ["<", "<f"], "triggers[0]"),
        ([Tag("<f>", "true", "")], ["<f", "<f"], "triggers[0]"),
        ([Tag("<f>", '{"properties": {"x": {"not": {}}}}', "")], ["<"], "structures[0].schema.properties.x.not"),
        ([Tag("<f>", "false", "")], ["<"], "structures[0].schema"),
        ([Tag("so <|im_end|>x", "true", "")], ["so <|im_end|>"], "triggers[0]"),
    ],
)
def test_what_cannot_be_enforced_is_named(tags: list[Tag], triggers: list[str], path: str) -> None:
    tokenizer = byte_tokenizer()
    control_ids = {"<|im_end|>": tokenizer.eos_token_ids[0]}
    with pytest.raises(GrammarError) as refused:
        compiled(structural_tag_grammar(tags, triggers, control_ids))
    assert refused.value.path == path
