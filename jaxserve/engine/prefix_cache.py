"""Which KV pages hold what: a tree of full pages, so that prompts which begin alike share what is computed. Host only."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.engine.host_pages import HostPages

NOWHERE = -1


class CacheDomain(NamedTuple):
    """Requests share pages only inside one domain.

    A tree belongs to one engine, hence to one model, element type and quantization. What else changes keys and values, or
    who may learn of them, is a field of its own, so that a salt never passes for an adapter.

    Attributes:
        adapter: name of the adapter that the request uses; None: the model as it is.
        salt: what the client sent as `cache_salt`; None: nothing.
    """

    adapter: str | None = None
    salt: str | None = None


@dataclass(eq=False, slots=True)
class PageNode:
    """One page whose content is known: the tokens `key` after those of all its ancestors.

    Attributes:
        page: where it lies on the device; `NOWHERE`: it lies in host memory alone, as does all that comes after it.
        place: where it lies in host memory, or `NOWHERE`.
        key: the page's token ids, int32, as bytes. The ids themselves and no hash: pages cannot be taken for one another.
        parent: the page before it; None for the first of a domain.
        holders: sequences that use it; whoever holds a page holds every one before it.
        is_pinned: evicted only when nothing else is left, and given up in host memory only for another pinned one.
    """

    page: int
    key: bytes
    parent: PageNode | None
    domain: CacheDomain
    is_pinned: bool
    holders: int = 1
    children: dict[bytes, PageNode] = field(default_factory=dict)
    place: int = NOWHERE

    @property
    def is_on_device(self) -> bool:
        return self.page != NOWHERE


class PrefixCache:
    """The tree. Nodes that nobody holds are idle: they wait to be found again, or evicted, least recently used leaf first.

    A node is found by the bytes of its tokens under its parent. Python's hash of bytes is keyed anew in every process, and
    equal hashes are told apart by the bytes, so that no prompt finds another one's pages.

    Args:
        host: where the content of evicted pages is kept for as long as there is room; None: nowhere. A node whose page went
            there stays in the tree until its place is needed.
    """

    def __init__(self, host: HostPages[PageNode] | None = None) -> None:
        self._host = host
        self._roots: dict[CacheDomain, dict[bytes, PageNode]] = {}
        # In the order in which they became idle. A sequence lets go of its last page first, and whoever holds a page holds
        # its ancestors: so children stand before their parents, and the first of all is a leaf.
        self._idle: OrderedDict[PageNode, None] = OrderedDict()
        self._idle_pinned: OrderedDict[PageNode, None] = OrderedDict()
        self._pinned_keys: tuple[bytes, ...] = ()
        self._num_nodes = 0

    @property
    def num_pages(self) -> int:
        """Pages of the device in the tree."""
        return self._num_nodes

    @property
    def num_idle(self) -> int:
        """Those of them that nobody holds."""
        return len(self._idle) + len(self._idle_pinned)

    def find(self, domain: CacheDomain, parent: PageNode | None, key: bytes) -> PageNode | None:
        """The page with these tokens after `parent`, wherever it lies; it may be evicted unless it is held."""
        children = self._roots.get(domain) if parent is None else parent.children
        return None if children is None else children.get(key)

    def hold(self, node: PageNode) -> None:
        """One more holder. The ancestors must be held first."""
        if not node.holders:
            del self._idle_of(node)[node]
        node.holders += 1

    def release(self, node: PageNode) -> None:
        """One holder less. The descendants that the holder has must be released first.

        Raises:
            ValueError: nobody holds it.
        """
        if node.holders < 1:
            raise ValueError(f"page {node.page} is released, but nobody holds it")
        node.holders -= 1
        if not node.holders:
            self._idle_of(node)[node] = None

    def insert(self, domain: CacheDomain, parent: PageNode | None, key: bytes, page: int, depth: int) -> PageNode:
        """The node of these tokens after `parent`, held once more: a new one for `page`, or one that is there already.

        Args:
            parent: held by the caller; None: the page is the first of its sequence.
            depth: how many pages come before it.
        """
        siblings = self._roots.setdefault(domain, {}) if parent is None else parent.children
        node = siblings.get(key)
        if node is not None:
            if node.is_on_device:
                self.hold(node)
            else:  # it was computed anew
                self._leave_host(node)
                self._arrive(node, page)
            return node
        node = PageNode(page, key, parent, domain, is_pinned=self._is_pinned(domain, parent, key, depth))
        siblings[key] = node
        self._num_nodes += 1
        return node

    def restore(self, node: PageNode, page: int) -> None:
        """Has the content of a node in host memory copied to `page` of the device, and holds it once.

        Args:
            node: its parent is on the device, and held by the caller.
        """
        if self._host is None or node.place == NOWHERE:
            raise ValueError(f"page {node.page} is not in host memory")
        self._host.restore(node.place, page)
        node.place = NOWHERE
        self._arrive(node, page)

    def evict(self, *, keep: bool = True) -> int:
        """Takes from the device the least recently used page that nobody holds and that none there follows; returns it.

        Args:
            keep: whether its content may go to host memory.

        Raises:
            KeyError: every page is held.
            RuntimeError: pages were released in another order than `release` asks for.
        """
        node, _ = (self._idle or self._idle_pinned).popitem(last=False)
        following = sum(child.is_on_device for child in node.children.values())
        if following:
            raise RuntimeError(f"page {node.page} is to be evicted before {following} that come after it")
        page, node.page = node.page, NOWHERE
        self._num_nodes -= 1
        if self._host is None or not keep:
            self._forget(node)
        elif not self._send_to_host(self._host, node, page):
            self._host.num_dropped += self._forget(node)
        return page

    def flush_host(self) -> None:
        """Forgets every page that is in host memory alone."""
        while self._host is not None and (node := self._host.oldest()) is not None:
            self._forget(node)

    def pin(self, keys: tuple[bytes, ...]) -> None:
        """From now on, evicts the pages with these tokens, from the first of a prompt without a salt on, after all others.

        Those that are evicted all the same, because requests need every page, are pinned again when they are computed again.
        """
        self._pinned_keys = keys
        path: list[PageNode] = []
        siblings = self._roots.get(CacheDomain(), {})
        for key in keys:
            node = siblings.get(key)
            if node is None:
                break
            path.append(node)
            siblings = node.children
        for node in reversed(path):  # children before their parents, as they lie among the idle
            if self._host is not None and node.place != NOWHERE:
                self._host.pin(node.place)
            if node.holders or not node.is_on_device:
                node.is_pinned = True
                continue
            del self._idle_of(node)[node]
            node.is_pinned = True
            self._idle_pinned[node] = None

    def _arrive(self, node: PageNode, page: int) -> None:
        node.page, node.holders = page, 1
        self._num_nodes += 1

    def _send_to_host(self, host: HostPages[PageNode], node: PageNode, page: int) -> bool:
        """Gives a page that leaves the device a place in host memory, if it may have one."""
        if not host.may_store:
            return False
        if host.is_full:
            # As on the device, a page was used no later than the one before it, and what comes before a pinned one is
            # pinned: nothing that should stay longer comes after the oldest.
            oldest = host.oldest(pinned=node.is_pinned)
            if oldest is None:
                return False
            host.num_dropped += self._forget(oldest)
        node.place = host.store(node, page, is_pinned=node.is_pinned)
        return True

    def _leave_host(self, node: PageNode) -> None:
        if self._host is not None and node.place != NOWHERE:
            self._host.free(node.place)
            node.place = NOWHERE

    def _forget(self, node: PageNode) -> int:
        """Takes a node that is not on the device out of the tree, with all after it, which is in host memory at most.

        Returns:
            How many nodes that were.
        """
        siblings = self._roots[node.domain] if node.parent is None else node.parent.children
        del siblings[node.key]
        if not siblings and node.parent is None:
            del self._roots[node.domain]
        lost, count = [node], 0
        while lost:
            last = lost.pop()
            self._leave_host(last)
            lost += last.children.values()
            last.children = {}
            count += 1
        return count

    def _is_pinned(self, domain: CacheDomain, parent: PageNode | None, key: bytes, depth: int) -> bool:
        if depth >= len(self._pinned_keys) or domain != CacheDomain():
            return False
        return key == self._pinned_keys[depth] and (parent is None or parent.is_pinned)

    def _idle_of(self, node: PageNode) -> OrderedDict[PageNode, None]:
        return self._idle_pinned if node.is_pinned else self._idle
