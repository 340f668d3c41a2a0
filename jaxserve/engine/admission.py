"""Whether a sequence that waits fits beside those that run. Host only."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.page_pool import PagePool
from jaxserve.engine.prefix_cache import PageNode
from jaxserve.engine.sequence import Sequence


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
