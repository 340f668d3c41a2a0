"""Matrices of cases of which a few run always and the others with the long tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few_of(quick: Collection[tuple[Any, ...]], every: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: all of `every`, marked long where they are not among `quick`."""
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.long) for case in every]
