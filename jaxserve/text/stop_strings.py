"""Stop strings in streamed text: cut at the earliest, and hold back only what may still become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """What one piece of text led to.

    Attributes:
        text: to show now. After a match: the rest of the answer, without the stop string.
        stop: the stop string that was found, or None.
    """

    text: str
    stop: str | None = None


class StopStrings:
    """Finds the first place where any stop string stands, however the text is cut into pieces.

    The cut is where the leftmost match begins. So a match waits while an earlier place may still become one: with
    stops "abcd" and "bc", the text "abc" is not decided before the next character. Of two that begin at one place, the
    shorter is found.

    Attributes:
        matched: the stop string that was found, by `push` or by `finish`, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError if a stop string is empty: it would match at once."""
        if any(not stop for stop in stops):
            raise ValueError(f"stop={list(stops)!r} must not have an empty string")
        self._stops = tuple(sorted(set(stops), key=len))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> StopMatch:
        """Take the next piece of text. After a match nothing more may be pushed.

        Raises:
            ValueError: if a stop string was found already.
        """
        if self.matched is not None:
            raise ValueError(f"text {text!r} pushed after the stop string {self.matched!r} was found")
        if not self._stops:
            return StopMatch(text)
        buffer = self._held + text
        match, stop = self._leftmost_match(buffer)
        undecided = self._leftmost_beginning(buffer)
        if stop is not None and match <= undecided:
            self._held, self.matched = "", stop
            return StopMatch(buffer[:match], stop)
        keep_from = min(match, undecided)
        self._held = buffer[keep_from:]
        return StopMatch(buffer[:keep_from])

    def finish(self) -> str:
        """What was held back, now that nothing follows; cut at a match that had waited (then `matched` says so)."""
        held, self._held = self._held, ""
        match, stop = self._leftmost_match(held)
        self.matched = self.matched or stop
        return held[:match]

    def _leftmost_match(self, text: str) -> tuple[int, str | None]:
        """Where the first whole stop string begins, and which; the text's length and None if there is none."""
        found = [(text.find(stop), rank) for rank, stop in enumerate(self._stops)]
        place, rank = min((hit for hit in found if hit[0] >= 0), default=(len(text), -1))
        return place, self._stops[rank] if rank >= 0 else None

    def _leftmost_beginning(self, text: str) -> int:
        """Where the longest end of the text that begins a stop string starts; the text's length if there is none."""
        for stop_length in range(min(len(self._stops[-1]) - 1, len(text)), 0, -1):
            ending = text[len(text) - stop_length :]
            if any(len(stop) > stop_length and stop.startswith(ending) for stop in self._stops):
                return len(text) - stop_length
        return len(text)
