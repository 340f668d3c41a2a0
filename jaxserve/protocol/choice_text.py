"""One choice's text as it grows: tokens in, text out, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.engine.request import RequestOutput, TokenLogprobs
from jaxserve.protocol.logprobs import PlacedLogprobs, token_offset
from jaxserve.protocol.responses import TextFinishReason
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.stop_strings import StopStrings
from jaxserve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextDelta:
    """What one output of the engine adds to a choice.

    Attributes:
        index: of the choice, among all that the response has.
        text: may be empty, while text is held back.
        finish_reason: set on the last delta of the choice.
        logprobs: one for each token counted, if the engine sent them. They come with their tokens, and so before text
            that is held back.
    """

    index: int
    text: str
    finish_reason: TextFinishReason | None = None
    logprobs: tuple[PlacedLogprobs, ...] = ()


class ChoiceText:
    """Detokenizer and stop strings of one choice. The deltas joined are its whole text, however tokens arrive.

    Attributes:
        num_tokens: counted so far: up to the token that ended the choice.
        total_logprob: the sum of their log probabilities, if the engine sends them.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str],
        skip_special_tokens: bool,
        min_tokens: int = 0,
        max_tokens: int | None = None,
        text_length: int = 0,
    ) -> None:
        """Starts at the prompt's end.

        Args:
            detokenizer: at the prompt's end, and the choice's own from now on.
            skip_special_tokens: the token that ended the choice is not shown.
            min_tokens: a stop string is looked for in the text after that many tokens.
            max_tokens: 0: what the engine generates is not the choice's, which ends at once. None: the engine counts.
            text_length: characters that stand before the choice's text, such as an echoed prompt's.
        """
        self.index = index
        self.num_tokens = 0
        self.total_logprob = 0.0
        self.finish_reason: TextFinishReason | None = None
        self._tokenizer = tokenizer
        self._shows_stop_token = not skip_special_tokens
        self._min_tokens = min_tokens
        self._is_empty = max_tokens == 0
        self._length = text_length
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)

    def push(self, output: RequestOutput) -> TextDelta:
        """Takes the next tokens. Those after a stop string's end are neither shown nor counted.

        `output.finish_reason` must be None, "stop" or "length": the rest is no text's business.
        """
        if self._is_empty:
            return self._finished("", "length", [])
        shown: list[str] = []
        placed: list[PlacedLogprobs] = []
        for position, token_id in enumerate(output.token_ids):
            is_stop_token = output.stop_token_id is not None and position == len(output.token_ids) - 1
            hidden = is_stop_token and not self._shows_stop_token
            piece = "" if hidden else self._detokenizer.push([token_id])
            if output.logprobs is not None:
                placed.append(self._place(output.logprobs[position], piece))
            self.num_tokens += 1
            self._length += len(piece)
            if self.num_tokens <= self._min_tokens:
                shown.append(piece)
                continue
            match = self._stops.push(piece)
            shown.append(match.text)
            if match.stop is not None:
                return self._finished("".join(shown), "stop", placed)
        if output.finish_reason is None:
            return TextDelta(self.index, "".join(shown), logprobs=tuple(placed))
        match = self._stops.push(self._detokenizer.finish())
        shown.append(match.text)
        if match.stop is None:
            shown.append(self._stops.finish())
        stopped = self._stops.matched is not None or output.finish_reason == "stop"
        return self._finished("".join(shown), "stop" if stopped else "length", placed)

    def _place(self, values: TokenLogprobs, piece: str) -> PlacedLogprobs:
        self.total_logprob += values.logprob
        offset = token_offset(self._length, piece, self._tokenizer.token_bytes(values.token_id))
        return PlacedLogprobs(values.token_id, values, offset)

    def _finished(self, text: str, reason: TextFinishReason, placed: list[PlacedLogprobs]) -> TextDelta:
        self.finish_reason = reason
        return TextDelta(self.index, text, reason, tuple(placed))
