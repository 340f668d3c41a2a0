"""How long work (download, conversion, load, warm-up) tells how far it is; who shows it is the caller's choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """Shows tasks; `task` yields a function that is called with the amount done since its last call.

    Without a total and a unit (""), nothing is counted: it is shown that the work goes on.
    """

    def task(self, description: str, total: int | None, unit: str) -> AbstractContextManager[Callable[[int], None]]: ...


class NoProgress:
    """Shows nothing: for libraries and tests."""

    @contextmanager
    def task(self, description: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        del description, total, unit
        yield lambda amount: None
