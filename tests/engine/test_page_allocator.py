from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.page_allocator import PageAllocator


def test_every_page_is_handed_out_once() -> None:
    allocator = PageAllocator(5)
    first, second = allocator.allocate(2), allocator.allocate(3)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert allocator.num_free == 0


def test_too_many_takes_nothing() -> None:
    allocator = PageAllocator(3)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 3
    assert allocator.allocate(0) == []


def test_pages_come_back() -> None:
    allocator = PageAllocator(2)
    pages = allocator.allocate(2)
    assert pages is not None
    assert allocator.allocate(1) is None
    allocator.free(pages[:1])
    assert allocator.num_free == 1
    assert allocator.allocate(1) == pages[:1]


@pytest.mark.parametrize("freed", [[0, 0], [1]])
def test_a_page_is_not_freed_twice(freed: list[int]) -> None:
    allocator = PageAllocator(2)
    assert allocator.allocate(1) == [0]
    with pytest.raises(ValueError, match=f"page {freed[-1]} is free already"):
        allocator.free(freed)


@pytest.mark.parametrize("page", [-1, 2])
def test_a_page_that_does_not_exist_is_not_freed(page: int) -> None:
    allocator = PageAllocator(2)
    allocator.allocate(2)
    with pytest.raises(ValueError, match=f"page {page}"):
        allocator.free([page])


def test_a_pool_has_a_page() -> None:
    with pytest.raises(ValueError, match="num_pages=0"):
        PageAllocator(0)


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60))
def test_no_page_is_lost_or_shared(num_pages: int, actions: list[tuple[bool, int]]) -> None:
    allocator = PageAllocator(num_pages)
    held: list[list[int]] = []
    for is_allocation, number in actions:
        if is_allocation:
            pages = allocator.allocate(number)
            assert (pages is None) == (number > num_pages - sum(map(len, held)))
            held += [pages] if pages else []
        elif held:
            allocator.free(held.pop(number % len(held)))
        owned = [page for pages in held for page in pages]
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(num_pages))
        assert allocator.num_free == num_pages - len(owned)
