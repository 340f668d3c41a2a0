"""What may be counted and timed while a request is served; the server's metrics implement it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, Protocol

Outcome = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class RequestCourse:
    """How one prompt was served. Times are seconds, taken where the engine had the tokens, not where a client read them.

    Attributes:
        outcomes: one for each choice.
        cached_tokens: of the prompt's tokens, those whose KV pages were there already.
        total: arrival to end.
        queued: arrival of the request to the first step that computed something for it; None if there was none.
        prefill: from there to the first token; None if none came.
        decode: first token to last; None if none came.
    """

    outcomes: tuple[Outcome, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    total: float
    queued: float | None
    prefill: float | None
    decode: float | None


class RequestObserver(Protocol):
    """Is told of the course of one request's prompts, on the event loop. Times are seconds, as the engine took them."""

    @property
    def arrival(self) -> float:
        """`time.monotonic()` seconds when the request had been received; validation and tokenizing come after it."""
        ...

    @property
    def request_id(self) -> str | None:
        """What its client calls the request, for whom logs must have it; None: nothing."""
        ...

    def first_token(self, since_arrival: float) -> None: ...
    def next_tokens(self, since_previous: float, count: int) -> None:
        """`count` tokens of one choice came together, `since_previous` after the choice's last ones."""
        ...

    def finished(self, course: RequestCourse) -> None:
        """The prompt is done, whichever way."""
        ...


class NoObserver:
    """Counts nothing. The request arrives when this is made."""

    def __init__(self) -> None:
        self.arrival = time.monotonic()
        self.request_id: str | None = None

    def first_token(self, since_arrival: float) -> None:
        del since_arrival

    def next_tokens(self, since_previous: float, count: int) -> None:
        del since_previous, count

    def finished(self, course: RequestCourse) -> None:
        del course
