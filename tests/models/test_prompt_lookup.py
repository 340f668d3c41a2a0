"""Prompt lookup: the longest run that stood before wins, then the latest; a repetition goes on as long as is wanted."""

from __future__ import annotations

import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.prompt_lookup import look_up

LENGTH = 24


@partial(jax.jit, static_argnames=("longest", "shortest"))
def _look_up(history: jax.Array, lengths: jax.Array, longest: int, shortest: int) -> tuple[jax.Array, jax.Array]:
    return look_up(history, lengths, num_drafts=4, longest=longest, shortest=shortest)


def drafts(*rows: list[int], longest: int = 3, shortest: int = 2) -> list[list[int]]:
    history = np.full((8, LENGTH), 9, np.int32)  # what lies past the end is no part of the text
    lengths = np.ones(8, np.int32)
    for row, tokens in enumerate(rows):
        history[row, : len(tokens)] = tokens
        lengths[row] = len(tokens)
    found, counts = _look_up(jnp.asarray(history), jnp.asarray(lengths), longest, shortest)
    return [np.asarray(found)[row, : int(counts[row])].tolist() for row in range(len(rows))]


def by_hand(tokens: list[int], longest: int, shortest: int) -> list[int]:
    for size in range(min(longest, len(tokens)), shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):  # the latest first
            if tokens[end - size : end] == tokens[-size:]:
                extended = list(tokens)
                while len(extended) < len(tokens) + 4:
                    extended.append(extended[end + len(extended) - len(tokens)])
                return extended[len(tokens) :]
    return []


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 7, 8, 1, 2, 6, 5, 1, 2], [6, 5, 1, 2]),  # the latest place
        ([3, 1, 2, 7, 7, 1, 2, 6, 3, 1, 2], [7, 7, 1, 2]),  # a longer run comes before a later one
        ([5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3, 4, 5, 2], []),  # one token alike is too few
        ([1], []),
        ([1, 2], []),
    ],
)
def test_what_followed_before_is_drafted(tokens: list[int], wanted: list[int]) -> None:
    assert drafts(tokens) == [wanted]


@pytest.mark.parametrize(("longest", "shortest"), [(3, 2), (4, 1), (1, 1)])
def test_it_finds_what_a_search_by_hand_finds(longest: int, shortest: int) -> None:
    rng = random.Random(0)
    for _ in range(40):
        rows = [[rng.randrange(3) for _ in range(rng.randint(1, LENGTH))] for _ in range(8)]
        wanted = [by_hand(tokens, longest, shortest) for tokens in rows]
        assert drafts(*rows, longest=longest, shortest=shortest) == wanted
