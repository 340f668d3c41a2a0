"""KV pages in host memory: which places are taken, by whom, and what is to be copied. Host only; moves no bytes itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Generic, NamedTuple, TypeVar

OwnerT = TypeVar("OwnerT")

# Pages that come back with one step while others decode, whose next token waits for it.
PAGES_BACK_PER_STEP = 16
_ANY_NUMBER = 1 << 62


class PageCopy(NamedTuple):
    """One page's way to host memory or back. Copies are made in the order in which they were decided, before their step."""

    to_host: bool
    page: int
    place: int


@dataclass(frozen=True)
class OffloadStats:
    """Counters of pages in host memory.

    Attributes:
        num_places: pages that it has room for.
        num_used: those that are there now.
        num_stored, num_restored: pages that were copied there, and back.
        num_dropped: pages that were evicted from the device and not kept, or from host memory.
        hit_tokens: tokens that were not computed anew, since their pages came back.
    """

    num_places: int
    num_used: int
    num_stored: int
    num_restored: int
    num_dropped: int
    hit_tokens: int

    @staticmethod
    def sum(parts: Sequence[OffloadStats]) -> OffloadStats | None:
        """Of several engines; None: none of them keeps pages in host memory."""
        if not parts:
            return None
        return OffloadStats(*(sum(values) for values in zip(*(astuple(part) for part in parts), strict=True)))


class HostPages(Generic[OwnerT]):
    """Places for pages that the device had no room for, the least recently used given up first, pinned ones last of all.

    Args:
        num_places: pages that host memory holds.
        room: how many pages the next step may send there: copying must not fall behind.
    """

    def __init__(self, num_places: int, room: Callable[[], int] = lambda: _ANY_NUMBER) -> None:
        self.num_places = num_places
        self.num_stored = self.num_restored = self.num_dropped = 0
        self.num_back_now = _ANY_NUMBER  # pages that may come back with the next step yet
        self._room = room
        self._free = list(range(num_places - 1, -1, -1))
        self._owners: OrderedDict[int, OwnerT] = OrderedDict()  # by place, in the order of their last use
        self._pinned: OrderedDict[int, OwnerT] = OrderedDict()  # likewise; no place is in both
        self._copies: list[PageCopy] = []
        self._num_storing = 0  # of them, those to host memory

    def __len__(self) -> int:
        return len(self._owners) + len(self._pinned)

    @property
    def may_store(self) -> bool:
        """Whether one more page may be sent here with the next step."""
        return self._num_storing < self._room()

    @property
    def is_full(self) -> bool:
        return not self._free

    def store(self, owner: OwnerT, page: int, *, is_pinned: bool = False) -> int:
        """The place that the content of `page` gets; there must be a free one."""
        place = self._free.pop()
        (self._pinned if is_pinned else self._owners)[place] = owner
        self._copies.append(PageCopy(True, page, place))
        self._num_storing += 1
        self.num_stored += 1
        return place

    def restore(self, place: int, page: int) -> None:
        """Has a page's content copied back to `page`; its place is free from then on."""
        self._copies.append(PageCopy(False, page, place))
        self.num_restored += 1
        self.num_back_now -= 1
        self.free(place)

    def free(self, place: int) -> None:
        """Gives a place up, whose content is not needed here any more."""
        del self._order_of(place)[place]
        self._free.append(place)

    def pin(self, place: int) -> None:
        """From now on, what lies there is given up after all that is not pinned."""
        if place in self._owners:
            self._pinned[place] = self._owners.pop(place)

    def oldest(self, *, pinned: bool = True) -> OwnerT | None:
        """Whose page is to be given up first; None: nobody's.

        Args:
            pinned: whether a pinned one may be, if there is no other.
        """
        for order in (self._owners, self._pinned) if pinned else (self._owners,):
            for owner in order.values():
                return owner
        return None

    def touch(self, places: Iterable[int]) -> None:
        """Counts places as used just now, the last one latest."""
        for place in places:
            self._order_of(place).move_to_end(place)

    def _order_of(self, place: int) -> OrderedDict[int, OwnerT]:
        return self._owners if place in self._owners else self._pinned

    def begin_step(self, *, others_decode: bool) -> None:
        """From now on the next step is decided."""
        self.num_back_now = PAGES_BACK_PER_STEP if others_decode else _ANY_NUMBER

    def take_copies(self) -> tuple[PageCopy, ...]:
        """What is to be copied before the step that was decided, in this order."""
        copies, self._copies, self._num_storing = tuple(self._copies), [], 0
        return copies

    def stats(self, page_size: int) -> OffloadStats:
        return OffloadStats(
            self.num_places, len(self), self.num_stored, self.num_restored, self.num_dropped,
            hit_tokens=self.num_restored * page_size,
        )  # fmt: skip
