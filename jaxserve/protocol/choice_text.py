"""One choice's text as it grows: tokens in, text out, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.engine.request import RequestOutput
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
    """

    index: int
    text: str
    finish_reason: TextFinishReason | None = None


class ChoiceText:
    """Detokenizer and stop strings of one choice. The deltas joined are its whole text, however tokens arrive."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stops: Sequence[str],
        skip_special_tokens: bool,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: TextFinishReason | None = None
        self._shows_stop_token = not skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stops = StopStrings(stops)

    def push(self, output: RequestOutput) -> TextDelta:
        """Takes the next tokens. Those after a stop string's end are neither shown nor counted.

        `output.finish_reason` must be None, "stop" or "length": the rest is no text's business.
        """
        shown: list[str] = []
        for position, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if (
                output.stop_token_id is not None
                and position == len(output.token_ids) - 1
                and not self._shows_stop_token
            ):
                break
            match = self._stops.push(self._detokenizer.push([token_id]))
            shown.append(match.text)
            if match.stop is not None:
                return self._finished("".join(shown), "stop")
        if output.finish_reason is None:
            return TextDelta(self.index, "".join(shown))
        match = self._stops.push(self._detokenizer.finish())
        shown.append(match.text)
        if match.stop is None:
            shown.append(self._stops.finish())
        stopped = self._stops.matched is not None or output.finish_reason == "stop"
        return self._finished("".join(shown), "stop" if stopped else "length")

    def _finished(self, text: str, reason: TextFinishReason) -> TextDelta:
        self.finish_reason = reason
        return TextDelta(self.index, text, reason)
