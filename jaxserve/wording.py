"""Words in texts for people."""

from __future__ import annotations


def plural(noun: str, count: float) -> str:
    """The noun as it stands behind a count: "request" behind 1, "requests" behind any other."""
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"
