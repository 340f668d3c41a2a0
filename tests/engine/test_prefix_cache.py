"""The tree of pages by itself: what is found, what goes first, and that nothing is found which was not put there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.prefix_cache import CacheDomain, PageNode, PrefixCache
from jaxserve.engine.request import token_bytes

DOMAIN = CacheDomain()


def insert(cache: PrefixCache, keys: list[bytes], first_page: int, domain: CacheDomain = DOMAIN) -> list[PageNode]:
    """A path, held."""
    nodes: list[PageNode] = []
    for depth, key in enumerate(keys):
        nodes.append(cache.insert(domain, nodes[-1] if nodes else None, key, first_page + depth, depth))
    return nodes


def release(cache: PrefixCache, nodes: list[PageNode]) -> None:
    for node in reversed(nodes):
        cache.release(node)


def find(cache: PrefixCache, keys: list[bytes], domain: CacheDomain = DOMAIN) -> list[int]:
    """Pages of the longest path with these keys."""
    pages: list[int] = []
    node = None
    for key in keys:
        node = cache.find(domain, node, key)
        if node is None:
            break
        pages.append(node.page)
    return pages


def test_the_same_content_after_another_prefix_is_another_page() -> None:
    cache = PrefixCache()
    insert(cache, [b"a", b"x"], 0)
    insert(cache, [b"b", b"x"], 10)
    assert find(cache, [b"a", b"x"]) == [0, 1]
    assert find(cache, [b"b", b"x"]) == [10, 11]
    assert find(cache, [b"x"]) == []


def test_domains_share_nothing_and_leave_nothing_behind() -> None:
    cache = PrefixCache()
    domains = [CacheDomain(), CacheDomain(salt="x"), CacheDomain(salt="y"), CacheDomain(adapter="x")]
    for number, domain in enumerate(domains):
        release(cache, insert(cache, [b"a"], number, domain))
    assert [find(cache, [b"a"], domain) for domain in domains] == [[0], [1], [2], [3]]
    assert find(cache, [b"a"], CacheDomain(adapter="x", salt="x")) == []
    assert [cache.evict() for _ in domains] == [0, 1, 2, 3]
    assert cache._roots == {}  # a server that sees a new salt with every request must not grow


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = PrefixCache()
    first, second = insert(cache, [b"a", b"b", b"c"], 0), insert(cache, [b"d"], 3)
    release(cache, first)
    release(cache, second)
    again = first[:1]
    cache.hold(again[0])
    release(cache, again)
    assert [cache.evict() for _ in range(cache.num_idle)] == [2, 1, 3, 0]


def test_what_is_held_is_not_evicted() -> None:
    cache = PrefixCache()
    held = insert(cache, [b"a"], 0)
    longer = insert(cache, [b"a", b"b"], 0)
    release(cache, longer)
    assert (cache.num_pages, cache.num_idle) == (2, 1)
    assert cache.evict() == 1
    with pytest.raises(KeyError):
        cache.evict()
    assert find(cache, [b"a", b"b"]) == [0]
    release(cache, held)
    with pytest.raises(ValueError, match="page 0 is released, but nobody holds it"):
        cache.release(held[0])


def test_an_evicted_page_is_not_found_under_its_old_tokens() -> None:
    cache = PrefixCache()
    release(cache, insert(cache, [b"a"], 7))
    assert cache.evict() == 7
    insert(cache, [b"b"], 7)
    assert find(cache, [b"a"]) == []
    assert find(cache, [b"b"]) == [7]


def test_a_second_page_with_the_same_tokens_stays_out() -> None:
    cache = PrefixCache()
    (first,) = insert(cache, [b"a"], 0)
    (second,) = insert(cache, [b"a"], 5)
    assert second is first
    assert (first.page, first.holders, cache.num_pages) == (0, 2, 1)


@pytest.mark.parametrize("held_while_pinned", [True, False])
def test_pinned_pages_go_last_and_are_pinned_again(held_while_pinned: bool) -> None:
    cache = PrefixCache()
    path = insert(cache, [b"a", b"b", b"c"], 0)
    if not held_while_pinned:
        release(cache, path)
    cache.pin((b"a", b"b"))
    if held_while_pinned:
        release(cache, path)
    other = insert(cache, [b"d"], 3)
    salted = insert(cache, [b"a"], 4, CacheDomain(salt="x"))
    release(cache, other)
    release(cache, salted)
    assert [cache.evict() for _ in range(5)] == [2, 3, 4, 1, 0]
    release(cache, insert(cache, [b"a", b"b"], 8))
    release(cache, insert(cache, [b"d"], 3))
    assert [cache.evict() for _ in range(3)] == [3, 9, 8]


def test_keys_are_the_token_ids() -> None:
    assert token_bytes([1, 2]) != token_bytes([32, 1])  # neighbours that weak hashes take for one another
    assert token_bytes([1, 2]) != token_bytes([2, 1])
    assert token_bytes([256]) != token_bytes([1, 0])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(1, 5)), max_size=60))
def test_a_leaf_is_always_to_be_had(events: list[tuple[bool, int, int]]) -> None:
    """Paths through a tree of two branches a page are taken and let go of; whatever is evicted has no children."""
    cache = PrefixCache()
    taken: list[list[PageNode]] = []
    for takes, path, length in events:
        if takes or not taken:
            taken.append(insert(cache, [bytes([path >> depth & 1]) for depth in range(length)], 100 * len(taken)))
        else:
            release(cache, taken.pop(path % len(taken)))
            if path & 1 and cache.num_idle:
                node = next(iter(cache._idle))
                page = node.page
                assert not node.children
                assert cache.evict() == page
    for nodes in taken:
        release(cache, nodes)
    assert cache.num_idle == cache.num_pages
    for _ in range(cache.num_pages):
        cache.evict()
    assert (cache.num_pages, cache._roots) == (0, {})
