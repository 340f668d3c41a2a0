"""Matrices of cases of which a few run always and the others with the long tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def few_of(quick: Collection[tuple[Any, ...]], every: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: all of `every`, marked long where they are not among `quick`."""
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.long) for case in every]


def named_cases(cases: Mapping[str, Any], long: Collection[str]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: each of `cases` under its name, marked long where that is among `long`."""
    unknown = set(long) - cases.keys()
    if unknown:
        raise ValueError(f"{unknown} are no cases")
    return [pytest.param(case, id=name, marks=pytest.mark.long if name in long else ()) for name, case in cases.items()]
