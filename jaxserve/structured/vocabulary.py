"""A model's tokens as the grammar library wants them: bytes, and which of them are no text."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import lru_cache

import llguidance

from jaxserve.text.tokenizer import Tokenizer

_MAX_THREADS = 16
_MAX_KNOWN_TEXTS = 8192
_SHORT_TEXT = 200  # characters


def _make_executor() -> llguidance.LLExecutor:
    return llguidance.LLExecutor(max(1, min(_MAX_THREADS, (os.cpu_count() or 1) - 1)))


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens for grammars.

    Attributes:
        end_id: an id past all tokens, which the library takes for the end of text: which real tokens end an output
            differs from request to request, and is the engine's business.
        executor: threads that write many masks at once.
    """

    tokenizer: llguidance.LLTokenizer
    end_id: int
    executor: llguidance.LLExecutor = field(default_factory=_make_executor)

    @property
    def num_words(self) -> int:
        """32-bit words of a mask."""
        return -(-(self.end_id + 1) // 32)


class _LibraryTokenizer:
    """What `llguidance.TokenizerWrapper` looks for."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = tokenizer.vocab_size
        self.tokens = library_tokens(tokenizer)
        self.special_token_ids = library_special_ids(tokenizer)
        self._tokenizer = tokenizer
        # What a grammar forces is asked for again at each of its tokens, for each row, by threads that wait for Python.
        self._encode_short = lru_cache(_MAX_KNOWN_TEXTS)(tokenizer.encode_continuation)

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text only")
        return (self._encode_short if len(text) <= _SHORT_TEXT else self._tokenizer.encode_continuation)(text)


def library_tokens(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each token, by id, and an end of text."""
    return [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)] + [b"<end>"]


def library_special_ids(tokenizer: Tokenizer) -> list[int]:
    """Those of the `library_tokens` that are no text."""
    return [*sorted(tokenizer.special_token_ids), tokenizer.vocab_size]


def make_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Takes a second or so for a large vocabulary."""
    wrapped = llguidance.TokenizerWrapper(_LibraryTokenizer(tokenizer))
    slices = llguidance.LLTokenizer.json_slices()
    return Vocabulary(llguidance.LLTokenizer(wrapped, slices=slices), end_id=tokenizer.vocab_size)
