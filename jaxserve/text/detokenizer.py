"""Text of a growing token sequence, piece by piece: the pieces joined are what decoding the whole sequence gives."""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence
from typing import Protocol

from jaxserve.text.token_bytes import DecodingScheme
from jaxserve.text.tokenizer import Tokenizer

_LONGEST_UTF8 = 4


class Detokenizer:
    """Turns new tokens into new text at a constant cost per token.

    No piece ends inside a character: bytes that may still become one are held back until they do, or until they cannot.
    Joined, the pieces equal `decode(prompt + output)` without `decode(prompt)`; a character that the output completes
    belongs to the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Starts at the prompt's end; `shown_ids` are shown even where other control tokens are not."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids - shown_ids if skip_special_tokens else frozenset()
        scheme = tokenizer.scheme
        self._stream: _Stream = _ByteLevelStream() if scheme.kind == "byte_level" else _ByteFallbackStream(scheme)
        self._replay(prompt_token_ids)

    def copy(self) -> Detokenizer:
        """Another one that goes on from here: the choices of one prompt need not all read it."""
        twin = copy.copy(self)
        twin._stream = self._stream.copy()
        return twin

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add, as far as it is certain."""
        push = self._stream.push
        return "".join([push(token) for token in self._shown(token_ids)])

    def finish(self) -> str:
        """What was held back, now that nothing follows: U+FFFD where bytes never became a character."""
        return self._stream.finish()

    def _shown(self, token_ids: Sequence[int]) -> list[bytes | int]:
        """Each token's bytes, or its value where it is a byte-fallback token."""
        skipped, piece = self._skipped, self._tokenizer.piece
        pieces = [piece(token_id) for token_id in token_ids if token_id not in skipped]
        return [shown for shown in pieces if shown is not None]

    def _replay(self, prompt: Sequence[int]) -> None:
        """Bring the stream to the state at the prompt's end, reading only its first and last tokens.

        That is all of them where nothing but control tokens or byte tokens stands there.
        """
        start = 0
        while start < len(prompt) and self._stream.may_strip:
            self._stream.push_all(self._shown(prompt[start : start + 1]))
            start += 1
        tail: list[bytes | int] = []  # the last one first
        for token_id in reversed(prompt[start:]):
            if token_id in self._skipped:
                continue
            if self._stream.is_settled(tail):
                break
            tail += self._shown([token_id])
        self._stream.push_all(tail[::-1])
        self._stream.forget_output()


class _Stream(Protocol):
    """The state between two tokens."""

    @property
    def may_strip(self) -> bool:
        """Whether leading spaces of what comes next may be dropped, since the text so far is empty."""
        ...

    def copy(self) -> _Stream: ...
    def push(self, token: bytes | int) -> str: ...
    def push_all(self, tokens: list[bytes | int]) -> None: ...
    def finish(self) -> str: ...

    def is_settled(self, tail: list[bytes | int]) -> bool:
        """Whether the state after these last tokens, the last one first, is independent of what came before them."""
        ...

    def forget_output(self) -> None:
        """What came so far is the prompt's."""
        ...


class _ByteLevelStream:
    """All bytes are one UTF-8 text; each maximal invalid part of it is one U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def may_strip(self) -> bool:
        return False

    def copy(self) -> _ByteLevelStream:
        twin = _ByteLevelStream()
        twin._decoder.setstate(self._decoder.getstate())
        return twin

    def push(self, token: bytes | int) -> str:
        return self._decoder.decode(token if isinstance(token, bytes) else bytes([token]))

    def push_all(self, tokens: list[bytes | int]) -> None:
        for token in tokens:
            self.push(token)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def is_settled(self, tail: list[bytes | int]) -> bool:
        return sum(1 if isinstance(token, int) else len(token) for token in tail) >= _LONGEST_UTF8

    def forget_output(self) -> None:
        pass


class _ByteFallbackStream:
    """Tokens are text; a run of byte tokens is UTF-8 as a whole, or one U+FFFD for each of its bytes.

    So a run can only be told when it has ended: it is held back till then, as the decoder of the whole sequence has it.
    """

    def __init__(self, scheme: DecodingScheme) -> None:
        self._run = bytearray()
        self._prompt_bytes = 0  # of the run: their text is the prompt's
        self._strippable = scheme.stripped_spaces

    @property
    def may_strip(self) -> bool:
        return self._strippable > 0

    def copy(self) -> _ByteFallbackStream:
        twin = copy.copy(self)
        twin._run = bytearray(self._run)
        return twin

    def push(self, token: bytes | int) -> str:
        if isinstance(token, int):
            self._run.append(token)
            return ""
        return self.finish() + self._emit(token.decode("utf-8"))

    def push_all(self, tokens: list[bytes | int]) -> None:
        for token in tokens:
            self.push(token)

    def finish(self) -> str:
        if not self._run:
            return ""
        run, known = bytes(self._run), self._prompt_bytes
        self._run.clear()
        self._prompt_bytes = 0
        try:
            text = run.decode("utf-8")
            shown_before = len(run[:known].decode("utf-8", "ignore"))
        except UnicodeDecodeError:
            text, shown_before = "\ufffd" * len(run), known
        shown = self._emit(text)
        num_stripped = len(text) - len(shown)
        return shown[max(0, shown_before - num_stripped) :]

    def _emit(self, text: str) -> str:
        while self._strippable and text.startswith(" "):
            text = text[1:]
            self._strippable -= 1
        if text:
            self._strippable = 0
        return text

    def is_settled(self, tail: list[bytes | int]) -> bool:
        return bool(tail) and isinstance(tail[-1], bytes)

    def forget_output(self) -> None:
        self._prompt_bytes = len(self._run)
