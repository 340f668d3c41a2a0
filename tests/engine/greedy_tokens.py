"""What a model says by itself, to hold an engine against."""

from __future__ import annotations

from collections.abc import Sequence

from tests.models.paged_model import PagedModel


def greedy_tokens(model: PagedModel, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens after a prompt, which is taken in token by token: steps of one size are all that is compiled."""
    *before, last = prompt
    for token in before:
        model.decode(token)
    return model.greedy(last, count)[0][1:]
