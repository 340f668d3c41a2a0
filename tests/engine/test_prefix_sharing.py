"""Requests that begin alike: what is computed once, for whom, and that nobody's tokens change by it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.page_pool import PagePool
from jaxserve.engine.sequence import Sequence
from tests.engine.scheduler_harness import Harness, Key, make_limits


def prompt(*parts: tuple[int, int]) -> list[int]:
    """Parts by (name, length): equal names begin alike."""
    return [1000 * name + position for name, length in parts for position in range(length)]


def computed(harness: Harness, key: Key) -> int:
    """Tokens of a request that went through prefill."""
    sequence = harness.sequences[key]
    chunks = [chunk for batch in harness.runner.launched for chunk in batch.prefill if chunk.sequence is sequence]
    return sum(len(chunk.token_ids) for chunk in chunks)


def cached(harness: Harness, key: Key) -> int:
    return harness.sequences[key].num_cached_tokens


def test_a_prompt_that_was_computed_is_not_computed_again() -> None:
    harness = Harness(make_limits(page_size=4, tokens=64))
    first = harness.add(prompt((1, 10), (2, 3)), max_tokens=3)
    harness.run()
    second = harness.add(prompt((1, 10), (3, 5)), max_tokens=3)
    harness.run()
    assert (computed(harness, first), cached(harness, first)) == (13, 0)
    assert (computed(harness, second), cached(harness, second)) == (7, 8)  # two full pages
    assert harness.scheduler.num_cached_tokens == 8
    assert harness.scheduler.num_prompt_tokens == 28
    harness.check_done()


def test_outputs_tell_how_much_was_there() -> None:
    harness = Harness(make_limits(page_size=4, tokens=64))
    harness.add(prompt((1, 10)), max_tokens=1)
    harness.run()
    harness.add(prompt((1, 10)), max_tokens=3)
    told = []
    for _ in range(6):
        batch = harness.scheduler.schedule()
        if batch:
            sampled = harness.runner.fetch(harness.runner.launch_sample(harness.runner.launch_forward(batch)))
            told += [output.num_cached_tokens for output in harness.scheduler.update(batch, sampled)]
    assert told == [8, 8, 8]


@pytest.mark.parametrize("aborts", [False, True])
def test_what_comes_after_a_prompt_that_was_computed_again_for_its_log_probabilities_is_there(aborts: bool) -> None:
    """The tree has the beginning from another request; the rest of the prompt, and the answer, only this one computed."""
    harness = Harness(make_limits(page_size=4, tokens=64))
    harness.add(prompt((1, 9)), max_tokens=1)
    harness.run()
    scored = harness.add(prompt((1, 9), (2, 8)), max_tokens=100 if aborts else 9, prompt_logprobs=1)
    harness.step_until(lambda: len(harness.outputs[scored]) >= 9)
    harness.abort(scored[0])
    harness.run()
    assert (computed(harness, scored), cached(harness, scored)) == (17, 0)
    conversation = [*prompt((1, 9), (2, 8)), *harness.outputs[scored][:9]]
    following = harness.add([*conversation, 5], max_tokens=2)
    harness.run()
    assert cached(harness, following) == 24  # of 26: all full pages whose last token was computed
    assert harness.outputs[following] == harness.solo(following)
    harness.check_done()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 12])
def test_a_prompt_that_is_all_there_still_computes_its_last_token(length: int) -> None:
    harness = Harness(make_limits(page_size=4, tokens=64))
    for _ in range(2):
        key = harness.add(prompt((1, length)), max_tokens=5)
        harness.run()
    assert computed(harness, key) == length - cached(harness, key) >= 1
    assert cached(harness, key) == (length - 1) // 4 * 4
    harness.check_done()


def test_choices_share_their_prompt_in_one_step() -> None:
    harness = Harness(make_limits(page_size=4, tokens=64))
    keys = [harness.add(prompt((1, 13)), 8, request_id="n", index=index, seed=index) for index in range(4)]
    batch = harness.step()
    assert [len(chunk.token_ids) for chunk in batch.prefill] == [13, 1, 1, 1]
    pages = [harness.sequences[key].pages for key in keys]
    assert all(of_choice[:3] == pages[0][:3] for of_choice in pages)
    harness.run()
    harness.check_done()
    assert len({tuple(harness.outputs[key]) for key in keys}) == 4


def test_a_request_waits_for_what_another_is_computing() -> None:
    """The same long prompt twice at once: its chunks are computed once."""
    harness = Harness(make_limits(page_size=4, tokens=8, max_len=128))
    first, second = harness.add(prompt((1, 41)), 4), harness.add(prompt((1, 41)), 4, seed=3)
    harness.run()
    assert (computed(harness, first), computed(harness, second)) == (41, 1)
    harness.check_done()


def test_what_an_aborted_request_computed_is_there_for_others() -> None:
    harness = Harness(make_limits(page_size=4, tokens=8, seqs=2, max_len=64))
    first = harness.add(prompt((1, 8), (2, 20)), 2)
    harness.step()
    harness.abort(first[0])
    harness.run()
    assert computed(harness, first) == 8
    second, third = harness.add(prompt((1, 8), (2, 20)), 2), harness.add(prompt((1, 8), (2, 20), (3, 4)), 2)
    harness.run()
    assert computed(harness, second) == 20
    assert computed(harness, third) == 4
    harness.check_done()


def test_an_answer_can_be_gone_on_with() -> None:
    """The next turn of a conversation finds the pages that decoding filled."""
    harness = Harness(make_limits(page_size=4, tokens=64))
    first = harness.add(prompt((1, 6)), max_tokens=15)
    harness.run()
    conversation = prompt((1, 6)) + harness.outputs[first]
    second = harness.add([*conversation, 5, 6, 7], max_tokens=4)
    harness.run()
    assert cached(harness, second) == 20  # of 21 tokens; the last of them was never computed
    harness.check_done()


def test_a_prompt_that_is_computed_anew_holds_no_second_copy() -> None:
    """Its log probabilities are wanted, which only computing it gives; pages for it twice there are none."""
    harness = Harness(make_limits(page_size=4, pages=8, tokens=8, max_len=32))
    for prompt_logprobs in (None, 0, 0):
        key = harness.add(prompt((1, 25)), max_tokens=6, prompt_logprobs=prompt_logprobs)
        harness.run()
        assert computed(harness, key) == 25
        assert len(harness.sequences[key].prompt_logprobs) == (0 if prompt_logprobs is None else 25)
    harness.check_done()


def test_salts_keep_requests_apart() -> None:
    harness = Harness(make_limits(page_size=4, tokens=64))
    salts = [None, "x", "y", "None", "adapter"]
    for expected in (0, 8):
        keys = [harness.add(prompt((1, 9)), max_tokens=3, salt=salt) for salt in salts]
        harness.run()
        assert [cached(harness, key) for key in keys] == [expected] * len(salts)
    harness.check_done()


def test_with_the_cache_off_nothing_is_shared() -> None:
    harness = Harness(make_limits(page_size=4, tokens=64), caching=False)
    keys = [harness.add(prompt((1, 13)), 8, request_id="n", index=index, seed=index) for index in range(3)]
    harness.run()
    key = harness.add(prompt((1, 13)), 8)
    harness.run()
    assert [computed(harness, key) for key in (*keys, key)] == [13] * 4
    assert harness.scheduler.pages.num_cached == 0
    harness.check_done()


def test_kept_pages_are_free_for_whoever_needs_them() -> None:
    harness = Harness(make_limits(page_size=4, pages=8, tokens=64, max_len=32))
    for name in range(1, 6):
        harness.add(prompt((name, 25)), max_tokens=4)
        harness.run()
    assert harness.scheduler.num_preemptions == 0
    harness.check_done()
    key = harness.add(prompt((5, 25)), max_tokens=4)
    old = harness.add(prompt((1, 25)), max_tokens=4)
    harness.run()
    assert cached(harness, key) == 24
    assert cached(harness, old) == 0  # was evicted
    harness.check_done()


def test_a_preempted_sequence_finds_its_pages_again() -> None:
    harness = Harness(make_limits(page_size=2, pages=10, seqs=2, tokens=32))
    harness.add(prompt((1, 4)), max_tokens=8)
    victim = harness.add(prompt((2, 4)), max_tokens=12)
    harness.run()
    sequence = harness.sequences[victim]
    assert sequence.num_preemptions > 0
    recomputed = computed(harness, victim) - 4
    assert 0 < recomputed < 4 + sequence.num_output_tokens - 1, "some of its pages were there"
    assert sequence.num_cached_tokens == 0  # what its own past gives is no cached prompt
    harness.check_done()


def test_flushing_forgets_what_nobody_uses() -> None:
    harness = Harness(make_limits(page_size=4, tokens=64))
    harness.add(prompt((1, 17)), max_tokens=2)
    harness.run()
    running = harness.add(prompt((2, 8)), max_tokens=30)
    harness.step_until(lambda: len(harness.outputs[running]) == 3)
    assert harness.scheduler.pages.flush() == 4
    harness.check()
    forgotten, shared = harness.add(prompt((1, 17)), max_tokens=2), harness.add(prompt((2, 8), (3, 2)), max_tokens=2)
    harness.run()
    assert (cached(harness, forgotten), cached(harness, shared)) == (0, 8)
    harness.check_done()


def test_a_pinned_prompt_outlives_the_others() -> None:
    harness = Harness(make_limits(page_size=4, pages=8, tokens=64, max_len=32))
    pinned = prompt((1, 11))
    harness.scheduler.pages.pin(pinned)
    harness.add(pinned, max_tokens=1)
    harness.run()
    for name in range(2, 6):
        harness.add(prompt((name, 19)), max_tokens=4)
        harness.run()
    key = harness.add([*pinned, 5], max_tokens=2)
    harness.run()
    assert cached(harness, key) == 8
    harness.add(prompt((9, 30)), max_tokens=2)  # needs every page there is
    harness.run()
    again = harness.add([*pinned, 5], max_tokens=2)
    harness.run()
    assert cached(harness, again) == 0
    harness.check_done()


class WeakKey(bytes):
    """A key whose hash keeps one bit."""

    def __hash__(self) -> int:
        return super().__hash__() & 1


@pytest.mark.parametrize("weak", [False, True])
def test_hashes_that_collide_mix_nothing_up(weak: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PagePool._key

    def key(pool: PagePool, sequence: Sequence, index: int) -> bytes:
        return WeakKey(plain(pool, sequence, index)) if weak else plain(pool, sequence, index)

    monkeypatch.setattr(PagePool, "_key", key)
    rng = random.Random(5)
    harness = Harness(make_limits(page_size=2, pages=40, tokens=32, max_len=32))
    for number in range(50):
        shared, own = rng.randrange(0, 8), rng.randrange(1, 8)
        ids = [31 * position for position in range(shared)] + [rng.randrange(3) for _ in range(own)]
        if number % 3 == 0 and len(ids) > 1:  # neighbours that a sum of ids takes for one another
            ids[0] += 31
            ids[1] -= 1
        harness.add([abs(token) for token in ids], max_tokens=rng.randrange(1, 6), seed=number)
        for _ in range(rng.randrange(4)):
            harness.step()
    harness.run()
    harness.check_done()


Trace = tuple[dict[str, int], list[tuple[int, ...]]]


@st.composite
def shared_traces(draw: st.DrawFn) -> Trace:
    seqs = draw(st.integers(1, 4))
    limits = {
        "seqs": seqs,
        "tokens": draw(st.integers(seqs, 12)),
        "prefill_rows": draw(st.integers(1, seqs)),
        "max_len": 24,
        "page_size": draw(st.integers(1, 4)),
        "pages": draw(st.integers(6, 24)),
    }
    # Kind of event; which of few prefixes, its length, own tokens, output, choices, 1: a salt, 2: the prompt's log
    # probabilities are wanted; steps, or whom to abort.
    event = st.tuples(
        st.sampled_from(["add", "add", "step", "step", "abort", "flush", "again"]).map(
            ["add", "step", "abort", "flush", "again"].index
        ),
        st.integers(0, 2),
        st.integers(0, 12),
        st.integers(0, 3),
        st.integers(1, 10),
        st.integers(1, 3),
        st.integers(0, 2),
    )
    return limits, draw(st.lists(event, min_size=1, max_size=40))


def play(limits: dict[str, int], events: list[tuple[int, ...]], host_pages: int = 0) -> None:
    harness = Harness(make_limits(**limits), host_pages=host_pages)
    longest = harness.limits.longest_sequence
    requests: list[list[int]] = []
    for kind, name, length, own, output, choices, extra in events:
        if kind in (0, 4):
            ids = prompt((name, length), (100 + len(requests), own)) or [3]
            if kind == 4 and requests:  # a prompt that was there before, or one with its answer
                ids = requests[length % len(requests)] if own % 2 else conversation(harness, length)
            if len(ids) >= longest:
                continue
            request_id = f"request-{len(requests)}"
            requests.append(ids)
            for index in range(choices):
                harness.add(
                    ids, output, request_id=request_id, index=index, seed=index, stop=[own],
                    salt="s" if extra == 1 else None, prompt_logprobs=0 if extra == 2 else None,
                )  # fmt: skip
        elif kind == 1:
            for _ in range(choices):
                harness.step()
        elif kind == 2 and requests:
            harness.abort(f"request-{length % len(requests)}", None if own else choices - 1)
        elif kind == 3:
            harness.scheduler.pages.flush()
            harness.check()
    harness.run(max_steps=len(harness.sequences) * (2 * longest + 4) + 2)
    harness.check_done()
    harness.scheduler.pages.flush()
    assert harness.scheduler.pages.num_cached == 0
    if harness.host is not None:
        assert len(harness.host) == 0, "places in host memory were lost"
        assert sorted(harness.host._free) == list(range(host_pages))


def conversation(harness: Harness, number: int) -> list[int]:
    """Prompt and answer so far of some request."""
    sequences = list(harness.sequences.values())
    return list(sequences[number % len(sequences)].token_ids)


@given(shared_traces())
def test_whatever_is_shared_every_request_gives_its_solo_tokens(
    trace: Trace,
) -> None:
    play(*trace)


@pytest.mark.long
@settings(max_examples=5000)
@given(shared_traces())
def test_whatever_is_shared_at_length(trace: Trace) -> None:
    play(*trace)
