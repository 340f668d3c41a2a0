"""Which KV pages are free. Host only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PageAllocator:
    """Hands out pages 0 .. num_pages - 1, least recently freed first."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages} must be at least 1")
        self.num_pages = num_pages
        self._free: deque[int] = deque(range(num_pages))
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) if fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back.

        Raises:
            ValueError: if a page is free already (two sequences would come to share it) or does not exist.
        """
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} does not exist: there are {self.num_pages}")
            if self._is_free[page]:
                raise ValueError(f"page {page} is free already")
            self._is_free[page] = 1
            self._free.append(page)
