"""Times of one prompt's course, from what the engine stamps on its outputs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from jaxserve.engine.request import RequestOutput
from jaxserve.protocol.observer import Outcome, RequestCourse, RequestObserver


class CourseTimer:
    """Takes the outputs of one prompt as they are read, and tells the observer when they were made.

    A clock that is read here would time a slow reader, whose outputs wait; the engine's stamps do not.
    """

    def __init__(self, observer: RequestObserver) -> None:
        self._observer = observer
        self._arrival = observer.arrival
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._last_token: dict[int, float] = {}

    def take(self, output: RequestOutput) -> None:
        """An output that the client gets."""
        if not output.token_ids:
            return
        if self._first_token is None:
            self._first_token = output.time
            self._scheduled = output.scheduled_time or None
            self._observer.first_token(output.time - self._arrival)
        previous = self._last_token.get(output.index)
        if previous is not None:
            self._observer.next_tokens(output.time - previous, len(output.token_ids))
        self._last_token[output.index] = output.time

    def finish(
        self, outcomes: Sequence[Outcome], *, prompt_tokens: int, completion_tokens: int, cached_tokens: int
    ) -> None:
        """The prompt is done. One whose choices all came to their end ended with the last token."""
        complete = all(outcome in ("stop", "length") for outcome in outcomes) and self._last_token
        last = max(self._last_token.values(), default=None)
        end = last if complete and last is not None else time.monotonic()
        self._observer.finished(
            RequestCourse(
                outcomes=tuple(outcomes),
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                cached_tokens=cached_tokens,
                total=end - self._arrival,
                queued=_between(self._arrival, self._scheduled),
                prefill=_between(self._scheduled, self._first_token),
                decode=_between(self._first_token, last),
            )
        )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(end - start, 0.0)
