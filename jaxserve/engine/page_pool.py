"""The KV pages of the scheduler: which sequence has which, which are free, and which are kept for prompts to come."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Tokens

from jaxserve.engine.host_pages import HostPages, OffloadStats, PageCopy
from jaxserve.engine.page_allocator import PageAllocator
from jaxserve.engine.prefix_cache import NOWHERE, CacheDomain, PageNode, PrefixCache
from jaxserve.engine.request import token_bytes
from jaxserve.engine.sequence import Sequence

_TOKEN_BYTES = array("i").itemsize
_NEVER = 1 << 62


class PagePool:
    """Gives sequences pages, and keeps full ones in a prefix tree after their sequence has gone, while nobody needs them.

    A page joins the tree as soon as the step that fills it is decided. That is early enough to share it in the same step:
    steps run in the order of their launch, and in every layer all tokens of a step are written before any is attended to.

    Args:
        caching: False: pages are never shared nor kept.
        host: where the content of pages goes that are evicted from the tree, to come back when a prompt matches them.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, caching: bool = True, host: HostPages[PageNode] | None = None
    ) -> None:
        self.num_pages = num_pages
        self._page_size = page_size
        self._allocator = PageAllocator(num_pages)
        self._host = host
        self._tree = PrefixCache(host)
        self._caching = caching
        self._shown = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that can be had: free ones, and those of the tree that no sequence has."""
        return self._allocator.num_free + self._tree.num_idle

    @property
    def num_cached(self) -> int:
        """Pages in the tree, in use or not."""
        return self._tree.num_pages

    @property
    def offload_stats(self) -> OffloadStats | None:
        """What became of pages that were evicted; None: they are not kept in host memory."""
        return None if self._host is None else self._host.stats(self._page_size)

    def begin_step(self, *, others_decode: bool) -> None:
        """From now on, prompts of the next step are looked at.

        Args:
            others_decode: they wait for what the step has copied from host memory, so that it is only so much.
        """
        if self._host is not None:
            self._host.begin_step(others_decode=others_decode)

    def take_copies(self) -> tuple[PageCopy, ...]:
        """What must be copied between device and host memory before the step that was decided; the caller sees to it."""
        return () if self._host is None else self._host.take_copies()

    def match(self, sequence: Sequence) -> list[PageNode]:
        """Pages of the tree that go on where a sequence's own end, all but its last known token at most: that is computed.

        They are not held yet, and the last ones may be in host memory. None for a sequence whose prompt's log probabilities
        are wanted: those come of computing it.
        """
        if not self._caching or sequence.wants_prompt_logprobs:
            return []
        domain, nodes = sequence.request.cache_domain, sequence.nodes
        parent = nodes[-1] if nodes else None
        found: list[PageNode] = []
        for index in range(len(nodes), (len(sequence.token_ids) - 1) // self._page_size):
            parent = self._tree.find(domain, parent, self._key(sequence, index))
            if parent is None:
                break
            found.append(parent)
        return found

    def num_cached_tokens(self, domain: CacheDomain, prompt_bytes: bytes) -> int:
        """Tokens from the start of a prompt whose pages are in the tree. From any thread, since it only looks: a hint.

        Args:
            prompt_bytes: `token_bytes` of the prompt.
        """
        width = self._page_size * _TOKEN_BYTES
        parent: PageNode | None = None
        for start in range(0, len(prompt_bytes) - width + 1, width):
            node = self._tree.find(domain, parent, prompt_bytes[start : start + width])
            if node is None:
                return start // _TOKEN_BYTES
            parent = node
        return len(prompt_bytes) // width * self._page_size

    def num_missing(self, matched: list[PageNode], num_tokens: int) -> int:
        """By how many `num_free` would fall if a new sequence took `matched` and grew to `num_tokens`."""
        held = sum(1 for node in matched if node.holders)
        return -(-num_tokens // self._page_size) - held

    def take(self, sequence: Sequence, matched: list[PageNode]) -> bool:
        """Gives a sequence pages that `match` found for it: their tokens need not be computed.

        Returns:
            Whether it had better wait: more of them are in host memory, and come back with the next steps.
        """
        taken = [node for node in matched if node.is_on_device]
        for node in taken:
            self._tree.hold(node)
        in_host = matched[len(taken) :]
        taken += self._bring_back(in_host) if in_host else []
        sequence.nodes += taken
        sequence.pages += (node.page for node in taken)
        sequence.num_computed += len(taken) * self._page_size
        self._expect_full_page(sequence)
        return len(taken) < len(matched) and self._host is not None and self._host.num_back_now == 0

    def _bring_back(self, nodes: list[PageNode]) -> list[PageNode]:
        """Has pages copied from host memory, held once: as many as the step allows and as there are pages for."""
        if self._host is None:
            return []
        self._host.touch(node.place for node in reversed(nodes))
        back: list[PageNode] = []
        for node in nodes[: self._host.num_back_now]:
            pages = self.allocate(1)
            if pages is None:
                break
            if node.place == NOWHERE:  # what was evicted just now needed its place
                self._allocator.free(pages)
                break
            self._tree.restore(node, pages[0])
            back.append(node)
        return back

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) if fewer can be had."""
        missing = count - self._allocator.num_free
        if missing > self._tree.num_idle:
            return None
        if missing > 0:
            self._allocator.free(self._tree.evict() for _ in range(missing))
        pages = self._allocator.allocate(count)
        for page in pages or ():
            self._shown[page] = 0  # whatever comes to lie there: computed, or copied back from the host
        return pages

    def is_shown(self, page: int) -> bool:
        """Whether a drafter with a KV cache of its own has seen all tokens of a full page, and all before them."""
        return bool(self._shown[page])

    def mark_shown(self, pages: Iterable[int]) -> None:
        """Counts full pages as seen by such a drafter, until they are given to somebody else."""
        for page in pages:
            self._shown[page] = 1

    def keep_full_pages(self, sequence: Sequence) -> None:
        """Puts the pages of a running sequence into the tree that are full by now, with tokens that the host knows."""
        if not self._caching:
            return
        domain, nodes = sequence.request.cache_domain, sequence.nodes
        for index in range(len(nodes), self._num_full_pages(sequence)):
            # If the tokens are in the tree already, the sequence goes on with its own page, and holds that one beside it.
            # Not so where it computes on purpose what is there: it would hold all of its prompt twice, for which there may
            # be no room. What it adds to the tree waits for its end then.
            parent = nodes[-1] if nodes else None
            if sequence.wants_prompt_logprobs and self._is_on_device(
                self._tree.find(domain, parent, self._key(sequence, index))
            ):
                sequence.next_full_page = _NEVER
                return
            self._keep_page(sequence, index)
        self._expect_full_page(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Takes all pages of a sequence; full ones stay in the tree until they are needed."""
        nodes, pages = sequence.nodes, sequence.pages
        if self._caching:
            for index in range(len(nodes), self._num_full_pages(sequence)):
                self._keep_page(sequence, index)
        for node in reversed(nodes):
            self._tree.release(node)
        self._allocator.free(pages[len(nodes) :])
        self._allocator.free(page for node, page in zip(nodes, pages, strict=False) if node.page != page)
        sequence.nodes, sequence.pages, sequence.next_full_page = [], [], _NEVER

    def flush(self) -> int:
        """Forgets every page of the tree that no sequence has; returns how many."""
        count = self._tree.num_idle
        self._tree.flush_host()
        self._allocator.free(self._tree.evict(keep=False) for _ in range(count))
        return count

    def pin(self, prompt_token_ids: Tokens[int]) -> None:
        """Keeps the full pages of a prompt (without a salt) for as long as anything else can be evicted."""
        size = self._page_size
        self._tree.pin(
            tuple(
                token_bytes(prompt_token_ids[start : start + size])
                for start in range(0, len(prompt_token_ids) - size + 1, size)
            )
        )

    def _num_full_pages(self, sequence: Sequence) -> int:
        """Pages that are full once every launched step has run, with tokens that the host knows."""
        return min(sequence.num_computed, len(sequence.token_ids)) // self._page_size

    def _keep_page(self, sequence: Sequence, index: int) -> None:
        """Puts a full page into the tree, all before which are there."""
        nodes = sequence.nodes
        parent, key = nodes[-1] if nodes else None, self._key(sequence, index)
        nodes.append(self._tree.insert(sequence.request.cache_domain, parent, key, sequence.pages[index], depth=index))

    @staticmethod
    def _is_on_device(node: PageNode | None) -> bool:
        return node is not None and node.is_on_device

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """The token ids of a full page."""
        end = (index + 1) * self._page_size
        if end <= sequence.num_prompt_tokens:
            width = self._page_size * _TOKEN_BYTES
            return sequence.request.prompt_bytes[index * width : (index + 1) * width]
        return token_bytes(sequence.token_ids[end - self._page_size : end])

    def _expect_full_page(self, sequence: Sequence) -> None:
        sequence.next_full_page = (len(sequence.nodes) + 1) * self._page_size if self._caching else _NEVER
