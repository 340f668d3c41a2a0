"""Pages that leave the device for host memory and come back: nobody's tokens change by it, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from jaxserve.engine.host_pages import PAGES_BACK_PER_STEP, HostPages
from jaxserve.engine.prefix_cache import PageNode
from jaxserve.engine.scheduler import Scheduler
from tests.engine.scheduler_harness import Harness, make_limits
from tests.engine.test_prefix_sharing import Trace, cached, computed, play, prompt, shared_traces

SMALL = make_limits(page_size=4, pages=8, tokens=64, max_len=32)  # holds one sequence


def crowd(harness: Harness, *names: int, length: int = 25) -> None:
    """Requests one after the other, each of which needs nearly every page."""
    for name in names:
        harness.add(prompt((name, length)), max_tokens=4)
        harness.run()


def host_of(harness: Harness) -> HostPages[PageNode]:
    assert harness.host is not None
    return harness.host


def test_what_was_evicted_comes_back() -> None:
    harness = Harness(SMALL, host_pages=16)
    crowd(harness, 1, 2)
    key = harness.add(prompt((1, 25), (3, 2)), max_tokens=4)
    harness.run()
    assert (cached(harness, key), computed(harness, key)) == (24, 3)
    stats = harness.scheduler.pages.offload_stats
    assert stats is not None
    assert (stats.num_restored, stats.hit_tokens, stats.num_dropped) == (5, 20, 0)  # one was on the device still
    assert stats.num_stored - stats.num_restored == stats.num_used <= stats.num_places == 16
    harness.check_done()


def test_the_least_recently_used_is_given_up_when_host_memory_is_full() -> None:
    harness = Harness(SMALL, host_pages=6)
    crowd(harness, 1, 2, 3)
    assert len(host_of(harness)) == 6
    for name, expected in ((2, 24), (1, 0)):
        key = harness.add(prompt((name, 25)), max_tokens=4)
        harness.run()
        assert cached(harness, key) == expected
    harness.check_done()


def test_salts_keep_requests_apart_in_host_memory() -> None:
    harness = Harness(SMALL, host_pages=64)
    for salt in ("x", None):
        harness.add(prompt((1, 25)), max_tokens=4, salt=salt)
        harness.run()
        crowd(harness, 2)
    for salt, expected in (("y", 0), (None, 24), ("x", 24)):
        key = harness.add(prompt((1, 25)), max_tokens=4, salt=salt)
        harness.run()
        assert cached(harness, key) == expected, salt
    harness.check_done()


def test_flushing_forgets_host_memory_too() -> None:
    harness = Harness(SMALL, host_pages=16)
    crowd(harness, 1, 2)
    assert len(host_of(harness)) > 0
    assert harness.scheduler.pages.flush() == 8
    assert len(host_of(harness)) == 0
    key = harness.add(prompt((1, 25)), max_tokens=4)
    harness.run()
    assert cached(harness, key) == 0
    harness.check_done()


def test_a_preempted_sequence_finds_its_pages_in_host_memory() -> None:
    harness = Harness(make_limits(page_size=2, pages=10, seqs=2, tokens=32), host_pages=32)
    harness.add(prompt((1, 4)), max_tokens=14)
    victim = harness.add(prompt((2, 4)), max_tokens=12)
    harness.run()
    sequence = harness.sequences[victim]
    assert sequence.num_preemptions > 0
    assert computed(harness, victim) - 4 <= 2 * sequence.num_preemptions, "all but the last tokens came back"
    harness.check_done()


def test_only_so_many_pages_come_back_beside_those_who_decode() -> None:
    harness = Harness(make_limits(page_size=2, pages=120, seqs=2, tokens=256, max_len=220), host_pages=200)
    crowd(harness, 1, 2, length=200)
    harness.add(prompt((3, 4)), max_tokens=30)
    harness.step()
    key = harness.add(prompt((1, 200)), max_tokens=2)
    before = len(harness.runner.launched)
    harness.run()
    back = [sum(not copy.to_host for copy in batch.copies) for batch in harness.runner.launched[before:]]
    assert max(back) == PAGES_BACK_PER_STEP
    assert sum(back) > 3 * PAGES_BACK_PER_STEP
    assert computed(harness, key) == 2
    harness.check_done()


def test_pages_are_dropped_where_copying_falls_behind() -> None:
    harness = Harness(SMALL)
    host: HostPages[PageNode] = HostPages(16, room=lambda: 2)
    harness.scheduler = Scheduler(SMALL, host_pages=host)
    crowd(harness, 1, 2)
    assert max(len(batch.copies) for batch in harness.runner.launched) == 2
    assert host.num_dropped > 0
    key = harness.add(prompt((1, 25)), max_tokens=4)
    harness.run()
    assert cached(harness, key) < 24
    harness.check_done()


def test_a_pinned_prompt_comes_back_pinned() -> None:
    harness = Harness(SMALL, host_pages=32)
    pinned = prompt((1, 11))
    harness.scheduler.pages.pin(pinned)
    harness.add(pinned, max_tokens=1)
    harness.run()
    crowd(harness, 2, length=30)  # needs every page there is
    harness.scheduler.pages.pin(pinned)
    for expected in (8, 8):
        key = harness.add([*pinned, 5], max_tokens=2)
        harness.run()
        assert cached(harness, key) == expected
        crowd(harness, 3, length=19)
    assert host_of(harness).num_restored == 2, "the second time it had stayed"
    harness.check_done()


@pytest.mark.parametrize("pinned_late", [False, True])
def test_a_pinned_prompt_is_given_up_last_in_host_memory_too(pinned_late: bool) -> None:
    """Room for 6 pages, of which the pinned prompt needs 2: others that come later and take turns push out each other."""
    harness = Harness(SMALL, host_pages=6)
    pinned = prompt((1, 11))
    if not pinned_late:
        harness.scheduler.pages.pin(pinned)
    harness.add(pinned, max_tokens=1)
    harness.run()
    crowd(harness, 2, length=30)  # needs every page there is: the pinned ones go to host memory
    if pinned_late:
        harness.scheduler.pages.pin(pinned)
    crowd(harness, 3, 4, 5, 6)
    assert len(host_of(harness)) == 6
    key = harness.add([*pinned, 5], max_tokens=2)
    harness.run()
    assert cached(harness, key) == 8
    harness.check_done()


def test_pinned_pages_make_room_for_pinned_pages_alone() -> None:
    """Host memory that they fill takes nobody else's."""
    harness = Harness(SMALL, host_pages=4)
    pinned = prompt((1, 27))
    harness.scheduler.pages.pin(pinned)
    harness.add(pinned, max_tokens=1)
    harness.run()
    crowd(harness, 2, length=28)
    crowd(harness, 3, length=28)
    key = harness.add([*pinned, 5], max_tokens=2)
    harness.run()
    assert cached(harness, key) > 0
    harness.scheduler.pages.flush()
    assert len(host_of(harness)) == 0
    harness.check_done()


@pytest.mark.parametrize("host_pages", [1, 3, 40])
@given(trace=shared_traces())
def test_wherever_pages_lie_every_request_gives_its_solo_tokens(host_pages: int, trace: Trace) -> None:
    play(*trace, host_pages=host_pages)


@pytest.mark.long
@pytest.mark.parametrize("host_pages", [1, 2, 5, 40])
@settings(max_examples=5000)
@given(trace=shared_traces())
def test_wherever_pages_lie_at_length(host_pages: int, trace: Trace) -> None:
    play(*trace, host_pages=host_pages)
