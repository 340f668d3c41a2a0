"""What may be counted and timed while a request is served; the server's metrics implement it."""

from __future__ import annotations

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
        queued: arrival to the first step that computed something for it; None if there was none.
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
    """Is told of one prompt's course, on the event loop. Times are seconds, as the engine took them."""

    def first_token(self, since_arrival: float) -> None: ...
    def next_tokens(self, since_previous: float, count: int) -> None:
        """`count` tokens of one choice came together, `since_previous` after the choice's last ones."""
        ...

    def finished(self, course: RequestCourse) -> None:
        """The prompt is done, whichever way."""
        ...


class NoObserver:
    """Counts nothing."""

    def first_token(self, since_arrival: float) -> None:
        del since_arrival

    def next_tokens(self, since_previous: float, count: int) -> None:
        del since_previous, count

    def finished(self, course: RequestCourse) -> None:
        del course
