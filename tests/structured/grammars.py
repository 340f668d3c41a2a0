"""What the tests of structured output share: a byte vocabulary, and walking a text through a grammar's masks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import llguidance
import numpy as np

from jaxserve.constraint import Constraint, TokenConstraint
from jaxserve.engine.token_masks import num_words
from jaxserve.structured.grammar import CompiledGrammar, Grammar, compile_grammar
from jaxserve.structured.vocabulary import Vocabulary, make_vocabulary
from tests.fakes import MODEL_CONFIG, byte_tokenizer


@cache
def byte_vocabulary() -> Vocabulary:
    return make_vocabulary(byte_tokenizer())


class _Texts:
    """What `llguidance.TokenizerWrapper` looks for."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.bos_token_id, self.eos_token_id = None, len(texts)
        self.tokens = [*(text.encode() or b"?" for text in texts), b"<end>"]
        self.special_token_ids = [*(token for token, text in enumerate(texts) if not text), len(texts)]
        self._texts = texts

    def __call__(self, text: str | bytes) -> list[int]:
        rest, ids = text if isinstance(text, str) else text.decode(), []
        while rest:
            longest = max((text for text in self._texts if rest.startswith(text)), key=len)
            ids.append(self._texts.index(longest))
            rest = rest[len(longest) :]
        return ids


def vocabulary_of(texts: Sequence[str]) -> Vocabulary:
    """A small vocabulary; control tokens have no text. Text must consist of its tokens."""
    return Vocabulary(llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Texts(texts))), end_id=len(texts))


def compiled(grammar: Grammar) -> CompiledGrammar:
    return compile_grammar(grammar, byte_vocabulary())


def allowed(state: TokenConstraint, vocab_size: int = MODEL_CONFIG.vocab_size) -> list[int]:
    """Tokens that may follow, ends not among them."""
    mask = np.zeros(num_words(vocab_size), np.int32)
    state.write_mask(mask)
    return tokens_of(mask)


def tokens_of(mask: np.ndarray) -> list[int]:
    """Those whose bits are set."""
    return np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist()


def looked_ahead(state: TokenConstraint, drafts: Sequence[int]) -> list[tuple[list[int], bool]]:
    """What may follow each draft, and whether the output may end there."""
    masks = np.zeros((len(drafts), num_words(MODEL_CONFIG.vocab_size)), np.int32)
    can_end = state.look_ahead(drafts, masks)
    return [(tokens_of(mask), end) for mask, end in zip(masks, can_end, strict=False)]


def check_look_ahead(grammar: Constraint, text: bytes) -> None:
    """All of a text that satisfies a grammar as drafts: the masks are those that come byte by byte."""
    ahead, state = grammar.start(), grammar.start()
    told = looked_ahead(ahead, text)
    expected = []
    for byte in text:
        state.accept(byte)
        if state.is_final:
            break
        expected.append((allowed(state), state.is_complete))
    assert told == expected
    assert refused_at_from(ahead, text) is None  # none of it was taken in


def refused_at(grammar: Constraint, text: str | bytes) -> int | None:
    """The byte at which the masks stop a text; its length where it may not end there; None if it is accepted."""
    return refused_at_from(grammar.start(), text.encode() if isinstance(text, str) else text)


def refused_at_from(state: TokenConstraint, data: bytes) -> int | None:
    """As `refused_at`, on the way."""
    for position, byte in enumerate(data):
        if byte not in allowed(state):
            return position
        state.accept(byte)
    return None if state.is_complete else len(data)


def accepts(schema: Any, text: str | bytes) -> bool:
    return refused_at(compiled(Grammar.of_schema(schema)), text) is None
