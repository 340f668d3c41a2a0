"""What may be counted and timed while a request is served; the server's metrics implement it."""

from __future__ import annotations

from typing import Literal, Protocol

Outcome = Literal["stop", "length", "abort", "error"]


class RequestObserver(Protocol):
    """Is told of one prompt's course, on the event loop. Times are seconds."""

    def first_token(self, since_arrival: float) -> None: ...
    def next_tokens(self, since_previous: float, count: int) -> None:
        """`count` tokens of one choice came together, `since_previous` after the choice's last ones."""
        ...

    def finished(
        self, outcomes: list[Outcome], since_arrival: float, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """The prompt is done; one outcome for each choice."""
        ...


class NoObserver:
    """Counts nothing."""

    def first_token(self, since_arrival: float) -> None:
        del since_arrival

    def next_tokens(self, since_previous: float, count: int) -> None:
        del since_previous, count

    def finished(
        self, outcomes: list[Outcome], since_arrival: float, prompt_tokens: int, completion_tokens: int
    ) -> None:
        del outcomes, since_arrival, prompt_tokens, completion_tokens
