"""What the tests of structured output share: a byte vocabulary, and walking a text through a grammar's masks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from jaxserve.constraint import Constraint, TokenConstraint
from jaxserve.engine.token_masks import num_words
from jaxserve.structured.grammar import CompiledGrammar, Grammar, compile_grammar
from jaxserve.structured.vocabulary import Vocabulary, make_vocabulary
from tests.fakes import MODEL_CONFIG, byte_tokenizer


@cache
def byte_vocabulary() -> Vocabulary:
    return make_vocabulary(byte_tokenizer())


def compiled(grammar: Grammar) -> CompiledGrammar:
    return compile_grammar(grammar, byte_vocabulary())


def allowed(state: TokenConstraint, vocab_size: int = MODEL_CONFIG.vocab_size) -> list[int]:
    """Tokens that may follow, ends not among them."""
    mask = np.zeros(num_words(vocab_size), np.int32)
    state.write_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return np.nonzero(bits)[0].tolist()


def refused_at(grammar: Constraint, text: str | bytes) -> int | None:
    """The byte at which the masks stop a text; its length where it may not end there; None if it is accepted."""
    state = grammar.start()
    data = text.encode() if isinstance(text, str) else text
    for position, byte in enumerate(data):
        if byte not in allowed(state):
            return position
        state.accept(byte)
    return None if state.is_complete else len(data)


def accepts(schema: Any, text: str | bytes) -> bool:
    return refused_at(compiled(Grammar.of_schema(schema)), text) is None
