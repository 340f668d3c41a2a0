"""Log probabilities as clients read them: in the words of the text, beside the tokens' bytes and places."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jaxserve.engine.request import TokenLogprobs
from jaxserve.protocol.long_answers import LazyList
from jaxserve.protocol.responses import ChatLogprobs, CompletionLogprobs, PromptLogprob, TokenLogprob, TopLogprob
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import Tokenizer

ItemT = TypeVar("ItemT")
WrittenT = TypeVar("WrittenT")

EAGER_TOKENS = 512  # of more, a lazy writer writes each when it is needed
LEAST_LOGPROB = -9999.0  # what OpenAI's API writes for very unlikely tokens; JSON has no minus infinity


@dataclass(frozen=True, slots=True)
class PlacedLogprobs:
    """A token's log probabilities, and where in the choice's text it starts.

    Attributes:
        values: None for a first prompt token, before which nothing stands.
        offset: characters. A token that continues a character has that character's; one that no text shows (a stop
            token, or what a stop string cut off) has the place where it would stand.
    """

    token_id: int
    values: TokenLogprobs | None
    offset: int


def token_offset(position: int, piece: str, token: bytes) -> int:
    """Where a token starts in the text.

    Args:
        position: characters that were certain before it.
        piece: what became certain with it: its own text, after that of bytes which waited for it.
        token: its bytes.
    """
    own = codecs.getincrementaldecoder("utf-8")("replace").decode(token)  # no shorter than what it adds to a character
    return position + max(0, len(piece) - len(own))


def place_prompt(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], text: str
) -> list[PlacedLogprobs]:
    """A prompt's log probabilities with their places in its text. Slow for a long prompt.

    Args:
        token_ids, logprobs: one for each token.
        text: the prompt as it is echoed; control tokens that it does not spell take up no place.
    """
    detokenizer = Detokenizer(tokenizer)
    position = 0
    placed: list[PlacedLogprobs] = []
    for token_id, values in zip(token_ids, logprobs, strict=True):
        token = tokenizer.token_bytes(token_id)
        if token_id in tokenizer.special_token_ids:
            spelling = token.decode("utf-8", "replace")
            piece = spelling if text.startswith(spelling, position) else ""
            placed.append(PlacedLogprobs(token_id, values, position))
        else:
            piece = detokenizer.push([token_id])
            placed.append(PlacedLogprobs(token_id, values, token_offset(position, piece, token)))
        position += len(piece)
    return placed


class LogprobWriter:
    """Writes log probabilities for one request, with as many alternatives as it asked for.

    Args:
        is_lazy: those of many tokens are lists that only `json_pieces` can write, and that take no memory of their own.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, is_lazy: bool = False) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._is_lazy = is_lazy

    def chat(self, tokens: Sequence[PlacedLogprobs]) -> ChatLogprobs:
        """For messages: each token with its bytes and alternatives."""
        return ChatLogprobs(content=self.content(tokens), refusal=None)

    def content(self, tokens: Sequence[PlacedLogprobs]) -> Sequence[TokenLogprob]:
        return self._each(tokens, self._token)

    def completion(self, tokens: Sequence[PlacedLogprobs]) -> CompletionLogprobs:
        """For completions: parallel lists. A first prompt token has null."""
        return CompletionLogprobs(
            text_offset=self._each(tokens, lambda token: token.offset),
            token_logprobs=self._each(tokens, lambda token: None if token.values is None else _logprob_of(token)),
            tokens=self._each(tokens, lambda token: self._text(token.token_id, "bytes:")),
            top_logprobs=self._each(tokens, lambda token: None if token.values is None else self._by_text(token)),
        )

    def place_prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], text: str
    ) -> list[PlacedLogprobs]:
        """For completions that start with their prompt. Slow for a long one."""
        return place_prompt(self._tokenizer, token_ids, logprobs, text)

    def prompt(self, logprobs: Sequence[TokenLogprobs | None]) -> Sequence[dict[str, PromptLogprob] | None]:
        """For `prompt_logprobs`: by token id, the prompt's own token first. A rank is known of alternatives only."""
        return self._each(logprobs, lambda values: None if values is None else self._by_id(values))

    def _each(self, items: Sequence[ItemT], write: Callable[[ItemT], WrittenT]) -> Sequence[WrittenT]:
        if self._is_lazy and len(items) > EAGER_TOKENS:
            return LazyList(items, write)
        return [write(item) for item in items]

    def _token(self, placed: PlacedLogprobs) -> TokenLogprob:
        top = () if placed.values is None else placed.values.top
        return TokenLogprob(
            token=self._text(placed.token_id),
            logprob=_logprob_of(placed),
            bytes=list(self._tokenizer.token_bytes(placed.token_id)),
            top_logprobs=[
                TopLogprob(token=self._text(token), logprob=logprob, bytes=list(self._tokenizer.token_bytes(token)))
                for token, logprob in top[: self._num_top]
                if _is_told(logprob)
            ],
        )

    def _by_text(self, placed: PlacedLogprobs) -> dict[str, float]:
        """The alternatives and the token itself; of tokens with one text, the most likely."""
        by_text: dict[str, float] = {}
        for token, logprob in () if placed.values is None else placed.values.top[: self._num_top]:
            if _is_told(logprob):
                by_text.setdefault(self._text(token, "bytes:"), logprob)
        by_text.setdefault(self._text(placed.token_id, "bytes:"), _logprob_of(placed))
        return by_text

    def _by_id(self, values: TokenLogprobs) -> dict[str, PromptLogprob]:
        ranks = {token: rank for rank, (token, _) in enumerate(values.top, start=1)}
        told = {values.token_id: _finite(values.logprob)}
        for token, logprob in values.top[: self._num_top]:
            if _is_told(logprob):
                told.setdefault(token, logprob)
        return {
            str(token): PromptLogprob(logprob=logprob, rank=ranks.get(token), decoded_token=self._text(token))
            for token, logprob in told.items()
        }

    def _text(self, token_id: int, prefix: str = "") -> str:
        """The token as text; bytes that are none alone as OpenAI's API escapes them, such as `\\xe2\\x80`."""
        token = self._tokenizer.token_bytes(token_id)
        try:
            return token.decode("utf-8")
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in token)


def _logprob_of(placed: PlacedLogprobs) -> float:
    return LEAST_LOGPROB if placed.values is None else _finite(placed.values.logprob)


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # NaN too: it compares as false


def _is_told(logprob: float) -> bool:
    """Impossible alternatives are left out: fewer than asked for may be told."""
    return math.isfinite(logprob)
