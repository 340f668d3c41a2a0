"""Words in texts for people."""

from __future__ import annotations

import pytest

from jaxserve.wording import plural


@pytest.mark.parametrize(
    ("noun", "count", "text"),
    [("request", 1, "request"), ("request", 1.0, "request"), ("request", 0, "requests"), ("request", 0.5, "requests"),
     ("process", 1, "process"), ("process", 4, "processes")],
)  # fmt: skip
def test_a_noun_agrees_with_its_count(noun: str, count: float, text: str) -> None:
    assert plural(noun, count) == text
