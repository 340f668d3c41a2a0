"""Who computes what in which step, against a fake device whose tokens depend on every page, slot and counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.request import RequestError
from tests.engine.fake_device import VOCAB_SIZE
from tests.engine.scheduler_harness import Harness, Key, make_limits


def test_a_request_alone() -> None:
    harness = Harness()
    key = harness.add(5, max_tokens=9)
    steps = harness.run()
    harness.check_done()
    assert len(harness.outputs[key]) == 9
    assert steps == 10  # one prefill and eight decode steps, then the round that takes in the last


def test_the_fake_device_notices_a_wrong_page() -> None:
    harness = Harness()
    key = harness.add(9, max_tokens=6)
    harness.step_until(lambda: len(harness.outputs[key]) == 2)
    harness.runner._pages[harness.sequences[key].pages[0]][0] += 1
    harness.run()
    assert harness.outputs[key] != harness.solo(key)


def test_requests_join_and_leave_at_every_step() -> None:
    harness = Harness(make_limits(seqs=2))
    first, second, third = harness.add(3, 4), harness.add(3, 30), harness.add(3, 4)
    harness.step_until(lambda: first in harness.reasons)
    assert not harness.outputs[third]
    harness.step_until(lambda: bool(harness.outputs[third]), max_steps=3)
    harness.step_until(lambda: third in harness.reasons)
    assert second not in harness.reasons
    harness.run()
    harness.check_done()


def test_a_late_request_starts_in_the_next_step() -> None:
    harness = Harness()
    harness.add(3, max_tokens=40)
    for _ in range(5):
        harness.step()
    late = harness.add(3, max_tokens=3)
    batch = harness.step()
    assert [chunk.sequence.request.request_id for chunk in batch.prefill] == [late[0]]
    assert len(batch.decode) == 1


def test_a_long_prompt_does_not_stall_those_who_decode() -> None:
    harness = Harness(make_limits(tokens=8, pages=32))
    decoding = harness.add(3, max_tokens=30)
    harness.step_until(lambda: bool(harness.outputs[decoding]))
    long = harness.add(60, max_tokens=4)
    chunk_steps = 0
    while not harness.outputs[long]:
        before = len(harness.outputs[decoding])
        batch = harness.step()
        chunk_steps += len(batch.prefill)
        assert len(batch.decode) >= 1
        assert len(harness.outputs[decoding]) == before + 1
    assert chunk_steps == 9  # 60 tokens, 7 beside each decode row
    harness.run()
    harness.check_done()


def test_short_prompts_share_a_step() -> None:
    harness = Harness(make_limits(tokens=16, prefill_rows=3))
    for _ in range(4):
        harness.add(3, max_tokens=2)
    batch = harness.step()
    assert [len(chunk.token_ids) for chunk in batch.prefill] == [3, 3, 3]  # prefill_rows bounds it
    assert all(chunk.samples for chunk in batch.prefill)
    harness.run()
    harness.check_done()


def test_the_token_budget_cuts_the_last_chunk() -> None:
    harness = Harness(make_limits(tokens=10))
    harness.add(6, max_tokens=2)
    harness.add(6, max_tokens=2)
    batch = harness.step()
    assert [(len(chunk.token_ids), chunk.samples) for chunk in batch.prefill] == [(6, True), (4, False)]
    batch = harness.step()
    assert [(chunk.start, len(chunk.token_ids), chunk.samples) for chunk in batch.prefill] == [(4, 2, True)]


def test_no_step_is_launched_past_max_tokens() -> None:
    harness = Harness()
    harness.add(5, max_tokens=1)
    harness.add(5, max_tokens=6)
    harness.run()
    harness.check_done()
    assert sum(len(batch.decode) for batch in harness.runner.launched) == 5


def find_stop(harness_prompt: int, position: int) -> int:
    """A token that the request "stops" gives first at this place of its output."""
    probe = Harness()
    key = probe.add(harness_prompt, max_tokens=position + 1, request_id="stops")
    probe.run()
    token = probe.outputs[key][position]
    assert probe.outputs[key].index(token) == position
    return token


def test_the_token_after_the_end_is_discarded_and_its_page_is_kept_until_then() -> None:
    stop = find_stop(5, 6)
    harness = Harness(make_limits(page_size=1))
    key = harness.add(5, max_tokens=30, request_id="stops", stop=[stop])
    harness.step_until(lambda: key in harness.reasons)
    assert harness.reasons[key] == "stop"
    assert harness.stop_tokens[key] == stop
    held = len(harness.sequences[key].pages)
    assert held == 5 + 7  # the step that was launched past the end writes its seventh output token
    assert harness.scheduler.pages.num_free == harness.limits.num_pages - held
    harness.run()
    assert harness.outputs[key][-1] == stop
    assert len(harness.outputs[key]) == 7
    harness.check_done()


def test_a_stop_token_at_max_tokens_counts_as_stop() -> None:
    stop = find_stop(5, 3)
    harness = Harness()
    key = harness.add(5, max_tokens=4, request_id="stops", stop=[stop])
    harness.run()
    assert harness.reasons[key] == "stop"
    harness.check_done()


def test_the_context_bounds_the_answer() -> None:
    harness = Harness(make_limits(max_len=10))
    fits = harness.add(9, max_tokens=100)
    longer = harness.add(4, max_tokens=100)
    harness.run()
    assert len(harness.outputs[fits]) == 1
    assert len(harness.outputs[longer]) == 6
    harness.check_done()


@pytest.mark.parametrize(("limits", "longest"), [({"max_len": 10}, 10), ({"pages": 3, "page_size": 4}, 12)])
def test_what_can_never_fit_is_refused(limits: dict[str, int], longest: int) -> None:
    harness = Harness(make_limits(**limits))
    with pytest.raises(RequestError, match=f"{longest} tokens.*context of {longest} tokens") as refusal:
        harness.add(longest, max_tokens=1)
    assert refusal.value.code == "context_length_exceeded"
    assert not harness.scheduler.has_work
    assert harness.scheduler.num_live_requests == 0
    harness.add(longest - 1, max_tokens=5)
    harness.run()
    harness.check_done()


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        Harness().add(0, max_tokens=1)


def test_waiting_requests_start_in_the_order_of_arrival() -> None:
    """A short request does not overtake a long one that waits for pages, else the long one might wait for ever."""
    harness = Harness(make_limits(pages=12))
    harness.add(30, max_tokens=10)
    long, short = harness.add(30, max_tokens=2), harness.add(2, max_tokens=2)
    harness.step_until(lambda: bool(harness.outputs[long] or harness.outputs[short]))
    assert harness.outputs[long]
    harness.run()
    harness.check_done()


def test_a_prompt_that_fills_the_pool_waits_for_it() -> None:
    harness = Harness(make_limits(pages=8, tokens=8, max_len=32))
    harness.add(4, max_tokens=12)
    harness.step()
    whole_pool = harness.add(31, max_tokens=5)
    harness.run()
    assert len(harness.outputs[whole_pool]) == 1
    harness.check_done()


def test_admission_leaves_those_who_run_a_page_to_grow() -> None:
    harness = Harness(make_limits(pages=4, page_size=4))
    harness.add(12, max_tokens=3)
    harness.add(3, max_tokens=1)
    harness.run()
    harness.check_done()
    assert harness.scheduler.num_preemptions == 0


def test_prompts_wait_for_pages_that_decoders_grew_into() -> None:
    """They are not preempted for it: the pages come back when the decoder ends."""
    harness = Harness(make_limits(seqs=2, tokens=3, pages=9))
    decoding = harness.add(2, max_tokens=13)
    harness.step()
    prompt = harness.add(24, max_tokens=4)
    stalled = 0
    while decoding not in harness.reasons:
        batch = harness.step()
        stalled += not batch.prefill
    assert stalled > 0
    harness.run()
    harness.check_done()
    assert harness.sequences[prompt].num_preemptions == 0


def test_choices_of_one_request_are_sequences_of_their_own() -> None:
    harness = Harness(make_limits(seqs=2))
    keys = [harness.add(5, max_tokens=8, request_id="n", index=index, seed=index) for index in range(3)]
    assert harness.scheduler.num_live_requests == 1
    harness.run()
    harness.check_done()
    assert len({tuple(harness.outputs[key]) for key in keys}) == 3


def test_one_choice_is_aborted_alone() -> None:
    harness = Harness()
    keys = [harness.add(5, max_tokens=8, request_id="n", index=index, seed=index) for index in range(3)]
    harness.step_until(lambda: len(harness.outputs[keys[1]]) == 2)
    harness.abort("n", 1)
    harness.run()
    assert [harness.reasons[key] for key in keys] == ["length", "abort", "length"]
    harness.check_done()


def in_flight(harness: Harness, key: Key) -> bool:
    return harness.sequences[key].num_in_flight > 0


MOMENTS: dict[str, Callable[[Harness, Key], bool]] = {
    "waiting": lambda harness, key: True,
    "prefilling": lambda harness, key: 0 < harness.sequences[key].num_computed < 8,
    "first token in flight": lambda harness, key: in_flight(harness, key) and not harness.outputs[key],
    "decoding": lambda harness, key: len(harness.outputs[key]) == 3 and in_flight(harness, key),
    "preempted": lambda harness, key: harness.sequences[key].num_preemptions > 0,
    "finished": lambda harness, key: key in harness.reasons,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_abort_at_every_point_of_life(moment: str) -> None:
    harness = Harness(make_limits(pages=10, tokens=6, seqs=2))
    other = harness.add(4, max_tokens=24, seed=1)
    if moment != "waiting":
        harness.step()
    key = harness.add(10, max_tokens=20)
    harness.step_until(lambda: MOMENTS[moment](harness, key))
    before = list(harness.outputs[key])
    harness.abort(key[0])
    harness.abort(key[0])  # once more: nothing to end
    harness.abort("unknown")
    follower = harness.add(5, max_tokens=9, seed=2)  # may get the slot and pages at once
    harness.run()
    assert harness.outputs[key] == before, "tokens after the abort"
    assert harness.reasons[key] == ("length" if moment == "finished" else "abort")
    assert harness.reasons[other] == harness.reasons[follower] == "length"
    harness.check_done()


def test_slots_come_back_after_waves_of_aborts() -> None:
    harness = Harness(make_limits(seqs=3, pages=40))
    for wave in range(4):
        keys = [harness.add(4, max_tokens=30) for _ in range(3)]
        for _ in range(wave):
            harness.step()
        for key in keys:
            harness.abort(key[0])
        harness.run()
    keys = [harness.add(4, max_tokens=30) for _ in range(3)]
    harness.step_until(lambda: all(harness.outputs[key] for key in keys))
    assert len(harness.scheduler.running) == 3
    harness.run()
    harness.check_done()


def test_finished_counts_by_reason() -> None:
    harness = Harness()
    stop = find_stop(5, 2)
    harness.add(5, max_tokens=9, request_id="stops", stop=[stop])
    harness.add(5, max_tokens=2)
    aborted = harness.add(5, max_tokens=9)
    harness.abort(aborted[0])
    harness.run()
    assert dict(harness.scheduler.finished) == {"stop": 1, "length": 1, "abort": 1}


@st.composite
def traces(draw: st.DrawFn) -> tuple[dict[str, int], list[tuple[str, tuple[int, ...]]]]:
    seqs = draw(st.integers(1, 5))
    limits = {
        "seqs": seqs,
        "tokens": draw(st.integers(seqs, 12)),
        "prefill_rows": draw(st.integers(1, seqs)),
        "max_len": draw(st.integers(2, 32)),
        "page_size": draw(st.integers(1, 4)),
        "pages": draw(st.integers(1, 24)),
    }
    longest = min(limits["max_len"], limits["page_size"] * limits["pages"])
    add = st.tuples(
        st.just("add"),
        st.tuples(st.integers(1, max(1, longest - 1)), st.integers(1, 24), st.integers(1, 3), st.integers(0, 8)),
    )
    abort = st.tuples(st.just("abort"), st.tuples(st.integers(0, 30), st.integers(0, 3)))
    step = st.tuples(st.just("step"), st.tuples(st.integers(1, 4)))
    return limits, draw(st.lists(st.one_of(add, step, step, abort), min_size=1, max_size=40))


def play(limits: dict[str, int], events: list[tuple[str, tuple[int, ...]]]) -> Harness:
    harness = Harness(make_limits(**limits))
    longest = harness.limits.longest_sequence
    requests: list[str] = []
    for kind, values in events:
        if kind == "add" and longest > 1:
            prompt, max_tokens, choices, num_stops = values
            requests.append(f"request-{len(requests)}")
            for index in range(choices):
                stops = range(num_stops % VOCAB_SIZE)
                harness.add(prompt, max_tokens, request_id=requests[-1], index=index, seed=index << 40, stop=stops)
        elif kind == "abort" and requests:
            request, index = values
            harness.abort(requests[request % len(requests)], index - 1 if index else None)
        elif kind == "step":
            for _ in range(values[0]):
                harness.step()
    # Whoever is first in line waits at most for one answer of those behind it, and then needs a step a token.
    harness.run(max_steps=len(harness.sequences) * (2 * longest + 4) + 2)
    harness.check_done()
    return harness


@given(traces())
def test_whatever_comes_every_request_gives_its_solo_tokens(
    trace: tuple[dict[str, int], list[tuple[str, tuple[int, ...]]]],
) -> None:
    play(*trace)


@pytest.mark.long
@settings(max_examples=5000)
@given(traces())
def test_whatever_comes_at_length(trace: tuple[dict[str, int], list[tuple[str, tuple[int, ...]]]]) -> None:
    play(*trace)
