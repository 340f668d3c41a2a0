"""Whether a sequence that waits fits beside those that run. Host only."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.page_pool import PagePool
from jaxserve.engine.prefix_cache import PageNode
from jaxserve.engine.sequence import Sequence


class Admission:
    """Whether the first in line may join those who run."""

    def __init__(self, limits: SchedulerLimits, pages: PagePool) -> None:
        self._limits = limits
        self._pages = pages
        self._refused: tuple[Sequence, int] | None = None  # the first in line, and free pages too few for it
        self._batch_places = 0  # who may still join the batch that runs, under static batching

    def admit(self, sequence: Sequence, running: Sequences[Sequence], num_waiting: int) -> list[PageNode] | None:
        """The pages that hold its first tokens already, and it counts as one who runs; None: it must wait.

        Args:
            num_waiting: how many are in line, the sequence among them.
        """
        if self._limits.static_batching:
            if not running:
                self._batch_places = min(num_waiting, self._limits.max_num_seqs)  # the next batch
            if not self._batch_places:
                return None
        if running and self._refused is not None:
            # While those who run only grow there is no need to look again, at every step, for pages it could share.
            refused, num_free = self._refused
            if refused is sequence and self._pages.num_free <= num_free:
                return None
        matched = self._pages.match(sequence)
        if not has_room_for(sequence, matched, running, self._pages, self._limits):
            self._refused = sequence, self._pages.num_free
            return None
        self._refused = None
        self._batch_places -= 1
        return matched


def has_room_for(
    sequence: Sequence, matched: list[PageNode], running: Sequences[Sequence], pages: PagePool, limits: SchedulerLimits
) -> bool:
    """Whether all its known tokens fit, with one page to grow for each running sequence and itself.

    Args:
        matched: pages that hold its first tokens already.
    """
    needed = pages.num_missing(matched, len(sequence.token_ids) + 1)
    if not running:
        return needed <= pages.num_free
    reserve = sum(1 for other in running if not other.is_complete_when_fetched)
    promised = sum(
        max(0, limits.pages_for(len(other.token_ids)) - len(other.pages)) for other in running if not other.is_decoding
    )
    return needed + reserve + promised <= pages.num_free
