"""Reads the event stream of an OpenAI endpoint: when its tokens came, and how many there were."""

from __future__ import annotations

import json
from typing import Any


class AnswerReader:
    """Takes in the bytes of one streamed answer.

    A chunk may hold several tokens, or none that is visible. How many there were tells the usage at the end of the stream;
    where the endpoint lists the tokens of each chunk (`token_ids`, or log probabilities), it is known all along.

    Attributes:
        first_time, last_time: seconds at which the first and the last chunk came; None before.
        first_count: tokens of the first chunk that held some; 1 where that is not told.
        events: chunks that held something.
        gaps_ms: milliseconds between one of them that shows or lists a token and the one before it.
        error: what the endpoint said went wrong.
        complete: whether the stream ended as it should, with `[DONE]`.
    """

    def __init__(self) -> None:
        self.first_time: float | None = None
        self.last_time: float | None = None
        self.first_count = 1
        self.events = 0
        self.gaps_ms: list[float] = []
        self.error: str | None = None
        self.complete = False
        self._listed = 0  # tokens that chunks listed
        self._usage: dict[str, Any] | None = None
        self._rest = b""

    @property
    def prompt_tokens(self) -> int | None:
        """As the endpoint counted them, if it did."""
        return self._usage.get("prompt_tokens") if self._usage else None

    @property
    def output_tokens(self) -> int | None:
        """None where the endpoint told neither usage nor tokens."""
        if self._usage is not None and isinstance(self._usage.get("completion_tokens"), int):
            return self._usage["completion_tokens"]
        return self._listed or None

    def feed(self, now: float, data: bytes) -> None:
        """Takes bytes that were read `now` seconds."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            self._event(now, event)

    def _event(self, now: float, event: bytes) -> None:
        payload = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if not payload:
            return  # a comment, sent to keep the connection open
        if payload == b"[DONE]":
            self.complete = True
            return
        try:
            chunk = json.loads(payload)
        except json.JSONDecodeError as error:
            self.error = f"an event is no JSON: {payload[:100]!r} ({error})"
            return
        if not isinstance(chunk, dict) or chunk.get("error") is not None:
            self.error = error_message(chunk)
            return
        if chunk.get("usage"):
            self.count(chunk["usage"])
        for choice in chunk.get("choices") or ():
            self._choice(now, choice)

    def _choice(self, now: float, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls")
        self.note(now, shows=bool(text), listed=_listed_tokens(choice), ends=bool(choice.get("finish_reason")))

    def note(self, now: float, *, shows: bool, listed: int, ends: bool) -> None:
        """Takes in one chunk.

        Args:
            shows: whether it holds text; one that does not, and ends nothing, only opens the answer.
            listed: tokens that it lists, 0 if it lists none.
            ends: whether it says why the answer ended.
        """
        if not (shows or listed or ends):
            return
        self._listed += listed
        if self.first_time is None and (shows or listed):
            self.first_time, self.first_count = now, max(1, listed)
        elif self.last_time is not None and (shows or listed):
            self.gaps_ms.append(round(1e3 * (now - self.last_time), 3))
        if self.first_time is not None:
            self.last_time = now
            self.events += 1

    def count(self, usage: dict[str, Any]) -> None:
        """Takes in what the endpoint counted."""
        self._usage = usage


def error_message(data: Any) -> str:
    """What an error in OpenAI's form says; of anything else, all of it."""
    error = data.get("error", data) if isinstance(data, dict) else data
    message = error.get("message") if isinstance(error, dict) else None
    return message if message and isinstance(message, str) else str(error)


def _listed_tokens(choice: dict[str, Any]) -> int:
    """Tokens that a chunk lists, 0 if it lists none."""
    if choice.get("token_ids"):
        return len(choice["token_ids"])
    logprobs = choice.get("logprobs") or {}
    return len(logprobs.get("tokens") or logprobs.get("content") or ())
