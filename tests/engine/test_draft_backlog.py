"""What a drafter has not been shown: whoever drafts has been shown all, and nothing is shown twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Rows

import pytest

from jaxserve.engine.draft_backlog import DraftBacklog
from jaxserve.engine.draft_lengths import DraftLengths, Trial
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence
from tests.engine.scheduler_harness import Harness, make_limits
from tests.engine.seeing_device import SeeingRunner
from tests.engine.test_draft_lengths import make_sequences


class Whims(DraftLengths):
    """Finds that drafts pay, or that they do not, as it likes."""

    def __init__(self, length: int, max_rows: int, rng: random.Random) -> None:
        super().__init__("whims", (length,), max_rows)
        self.length = length
        self.rng = rng

    def choose(self, ready: Rows[Sequence], others: int = 0, trial: Trial | None = None) -> int:
        can = ready or (trial is not None and trial.sequences)
        return self.length if can and self.rng.random() < 0.5 else 0

    def saving(self, num_rows: int) -> float | None:
        return self.rng.choice([None, -1.0, 1.0, 1.0])


class Told(DraftLengths):
    """Drafts where it is told to, and finds that worth showing prompts where it is told so."""

    def __init__(self, length: int = 3, *, drafts: bool = True, pays: bool = True) -> None:
        super().__init__("told", (length,), 4)
        self.length = length
        self.drafts = drafts
        self.pays = pays

    def choose(self, ready: Rows[Sequence], others: int = 0, trial: Trial | None = None) -> int:
        return self.length if ready and self.drafts else 0

    def saving(self, num_rows: int) -> float | None:
        return 1.0 if self.pays else -1.0


def showing_harness(
    lengths: DraftLengths,
    limits: SchedulerLimits | None = None,
    *,
    accuracy: float = 1.0,
    host_pages: int = 0,
    takes: float = 0.0,
) -> Harness:
    harness = Harness(limits or make_limits(), host_pages=host_pages)

    def seconds(num_decode: int, num_tokens: int) -> float:
        if num_tokens > harness.limits.max_num_batched_tokens:
            raise ValueError(f"{num_tokens} tokens fit no program")
        return takes

    harness.scheduler = Scheduler(harness.limits, host_pages=harness.host, drafting=lengths, showing_seconds=seconds)
    harness.runner = SeeingRunner(harness.limits, accuracy, 0)
    return harness


def runner_of(harness: Harness) -> SeeingRunner:
    assert isinstance(harness.runner, SeeingRunner)
    return harness.runner


def force(harness: Harness, rng: random.Random) -> None:
    """Lets a constraint find that the next tokens of a sequence are forced, which are those that it would give anyway."""
    for key, sequence in harness.sequences.items():
        sequence.forced_tokens = ()
        if sequence.is_decoding and sequence.num_in_flight == 1 and rng.random() < 0.1:
            known = sequence.num_output_tokens
            sequence.forced_tokens = tuple(harness.solo(key)[known : known + rng.randint(3, 6)])


def run_random_traffic(seed: int, seen: Counter[str], *, host_pages: int = 0) -> None:
    rng = random.Random(seed)
    limits = make_limits(max_len=40, pages=rng.choice([12, 18, 40]), prefill_rows=rng.choice([2, 4]))
    harness = showing_harness(Whims(3, 4, rng), limits, accuracy=rng.choice([0.0, 0.7, 1.0]), host_pages=host_pages)
    for number in range(16):
        prompt = [7] * rng.randint(1, 12) + [rng.randrange(30) for _ in range(rng.randint(1, 12))]
        for index in range(rng.choice([1, 1, 3])):  # choices share their prompt
            harness.add(prompt, rng.randint(1, 40), request_id=f"r{number}", index=index, seed=rng.getrandbits(64))
        for _ in range(rng.choice([0, 1, 5, 20])):
            force(harness, rng)
            harness.step()
        if rng.random() < 0.2:
            harness.abort(f"r{rng.randrange(number + 1)}")
    while harness.scheduler.has_work or harness.pending is not None:
        force(harness, rng)
        harness.step()
    harness.check_done()
    runner = runner_of(harness)
    assert not runner.num_lost
    launched = runner.launched
    seen["checked"] += runner.num_checked
    seen["unshown"] += sum(bool(batch.prefill) and not batch.is_shown for batch in launched)
    seen["shown"] += sum(bool(batch.prefill) and batch.is_shown for batch in launched)
    seen["caught up"] += sum(bool(batch.catch_up) for batch in launched)
    seen["forced"] += harness.scheduler.num_forced_tokens
    seen["preempted"] += harness.scheduler.num_preemptions
    seen["cached"] += harness.scheduler.num_cached_tokens
    seen["back"] += sum(not copy.to_host for batch in launched for copy in batch.copies)


@pytest.mark.parametrize("host_pages", [0, 12])
def test_whoever_drafts_was_shown_everything_whatever_happens(host_pages: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        run_random_traffic(seed, seen, host_pages=host_pages)
    assert all(
        seen[what] > 50 for what in ("checked", "unshown", "shown", "caught up", "forced", "preempted", "cached")
    )
    assert seen["back"] > 20 or not host_pages


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_nobody_falls_behind_where_every_step_is_shown(accuracy: float) -> None:
    rng = random.Random(5)
    harness = showing_harness(Told(), accuracy=accuracy)
    for number in range(30):
        prompt = [7] * 9 + [rng.randrange(30) for _ in range(rng.randint(1, 8))]
        harness.add(prompt, rng.randint(8, 30), seed=number)
        for _ in range(rng.randint(0, 4)):
            harness.step()
    harness.run()
    harness.check_done()
    runner = runner_of(harness)
    assert harness.scheduler.num_cached_tokens > 40
    assert runner.num_checked > 50
    assert runner.num_lost == 0
    assert all(batch.is_shown and not batch.catch_up for batch in runner.launched)


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_pages_of_an_answer_that_was_drafted_are_no_backlog_to_what_goes_on_with_it(accuracy: float) -> None:
    harness = showing_harness(Told(), accuracy=accuracy)
    for number in range(10):
        key = harness.add([number] * 6, 12)
        harness.run()
        harness.add([*[number] * 6, *harness.outputs[key], 3, 4, 5], 6)
        harness.run()
    assert harness.scheduler.num_cached_tokens == 10 * 16
    assert shown_chunks(harness) == []
    assert runner_of(harness).num_lost == 0


def test_pages_that_fill_beside_prompts_are_no_backlog_to_what_goes_on_with_them() -> None:
    harness = showing_harness(Told())
    key = harness.add([5] * 6, 14)
    number = 0
    while len(harness.outputs[key]) < 14:  # there is a prompt in every step
        harness.add([100 + number], 1)
        number += 1
        harness.step()
    harness.run()
    assert not any(batch.num_drafts for batch in harness.runner.launched)
    harness.add([*[5] * 6, *harness.outputs[key], 3, 4, 5], 6)
    harness.run()
    assert harness.scheduler.num_cached_tokens == 16
    assert shown_chunks(harness) == []
    assert runner_of(harness).num_lost == 0


def test_forced_tokens_that_are_shown_are_no_backlog() -> None:
    rng = random.Random(4)
    harness = showing_harness(Told(), accuracy=0.6)
    for number in range(8):
        harness.add([number] * 6, 30)
    while harness.scheduler.has_work or harness.pending is not None:
        force(harness, rng)
        harness.step()
    harness.check_done()
    assert harness.scheduler.num_forced_tokens > 20
    assert shown_chunks(harness) == []
    assert runner_of(harness).num_lost == 0


def unshown_prompts(lengths: Told, harness: Harness, *prompts: Rows[int], max_tokens: int = 20) -> None:
    """Prompts that were computed and not shown, each after the one before; then drafts pay."""
    lengths.drafts = lengths.pays = False
    for prompt in prompts:
        key = harness.add(prompt, max_tokens)
        harness.step_until(lambda key=key: len(harness.outputs[key]) > 0)
    lengths.drafts = lengths.pays = True


def shown_chunks(harness: Harness) -> list[tuple[int, int]]:
    """Start and end of what was caught up on."""
    chunks = [chunk for batch in harness.runner.launched for group in batch.catch_up for chunk in group]
    return [(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks]


def test_a_prompt_that_was_not_shown_is_caught_up_on_once() -> None:
    lengths = Told()
    harness = showing_harness(lengths)
    unshown_prompts(lengths, harness, range(10))
    harness.run()
    harness.check_done()
    assert shown_chunks(harness)[0][0] == 0
    assert 10 < shown_chunks(harness)[0][1] <= 13  # the tokens of the steps before drafts paid as well
    assert len(shown_chunks(harness)) == 1
    assert runner_of(harness).num_checked > 3


def test_steps_without_drafts_are_caught_up_on_alone() -> None:
    lengths = Told()
    harness = showing_harness(lengths)
    key = harness.add(range(10), 30)
    harness.step_until(lambda: len(harness.outputs[key]) > 4)
    lengths.drafts = False
    known = len(harness.outputs[key])
    for _ in range(6):
        harness.step()
    lengths.drafts = True
    harness.run()
    harness.check_done()
    ((start, end),) = shown_chunks(harness)
    assert start >= 10 + known
    assert end - start <= 7


def test_a_single_step_without_drafts_needs_no_catching_up() -> None:
    lengths = Told()
    harness = showing_harness(lengths, accuracy=0.0)  # the last draft is never part of a sequence
    key = harness.add(range(10), 30)
    for step in range(20):
        lengths.drafts = step % 2 == 0
        harness.step()
    assert len(harness.outputs[key]) > 10
    assert shown_chunks(harness) == []


def test_prompts_that_begin_alike_are_caught_up_on_once() -> None:
    lengths = Told()
    harness = showing_harness(lengths)
    shared = [9] * 12  # three pages
    unshown_prompts(lengths, harness, [*shared, 1, 2], [*shared, 3, 4])
    harness.run()
    harness.check_done()
    first, second = sorted(shown_chunks(harness))
    assert (first[0], second[0]) == (0, 12)
    # Nor has a prompt a backlog that comes later.
    harness.add([*shared, 5, 6], 20)
    harness.run()
    assert len(shown_chunks(harness)) == 2


def test_a_page_that_was_not_shown_is_a_backlog_to_whoever_finds_it() -> None:
    lengths = Told()
    harness = showing_harness(lengths)
    shared = [9] * 12
    unshown_prompts(lengths, harness, [*shared, 1, 2], max_tokens=1)
    harness.run()
    harness.add([*shared, 3, 4], 20)
    harness.run()
    harness.check_done()
    assert harness.scheduler.num_cached_tokens == 12
    (chunk,) = shown_chunks(harness)
    assert chunk[0] == 0
    assert runner_of(harness).num_lost == 0


def test_who_was_preempted_begins_anew_with_what_is_shown() -> None:
    lengths = Told()
    harness = showing_harness(lengths, make_limits(seqs=2, pages=9, max_len=32, tokens=32))
    unshown_prompts(lengths, harness, range(10), range(50, 60), max_tokens=12)
    lengths.drafts = False
    harness.step_until(lambda: harness.scheduler.num_preemptions > 0)
    lengths.drafts = True
    harness.run()
    harness.check_done()
    assert runner_of(harness).num_lost == 0


def test_who_is_far_behind_brings_no_drafts_until_it_was_shown_all_and_the_others_do() -> None:
    lengths = Told()
    harness = showing_harness(lengths, make_limits(max_len=96, tokens=16))
    unshown_prompts(lengths, harness, range(60), max_tokens=30)
    long = harness.sequences["request-0", 0]
    harness.add(range(100, 104), 30)
    harness.run()
    harness.check_done()
    chunks = [end - start for start, end in shown_chunks(harness)]
    assert len(chunks) >= 4
    assert max(chunks) == 16
    catching = [batch for batch in harness.runner.launched if batch.catch_up][:-1]
    assert any(row.num_drafts for batch in catching for row in batch.decode)
    assert not any(row.num_drafts for batch in catching for row in batch.decode if row.sequence is long)


def test_nothing_is_caught_up_on_where_it_does_not_pay() -> None:
    lengths = Told()
    harness = showing_harness(lengths)
    unshown_prompts(lengths, harness, range(10))
    lengths.pays = False
    harness.run()
    assert shown_chunks(harness) == []
    assert runner_of(harness).num_checked == 0


@pytest.mark.parametrize(
    ("tokens", "least", "most"), [(16, 15, 18), (64, 10, 14)]
)  # it catches up in parts, and at once
def test_a_row_waits_before_it_catches_up_for_as_long_as_that_takes(tokens: int, least: int, most: int) -> None:
    lengths = Told()  # a second is saved with each token
    first = []
    for takes in (1.0, 5.0):
        harness = showing_harness(lengths, make_limits(tokens=tokens), takes=takes)
        unshown_prompts(lengths, harness, range(10), max_tokens=40)
        harness.run()
        harness.check_done()
        steps = [batch for batch in harness.runner.launched if not batch.prefill]
        first.append(next(place for place, batch in enumerate(steps) if batch.catch_up))
    # What showing the prompt would have taken must be saved first, and what it takes to catch up: once or twice as much.
    assert first[0] <= 4
    assert least <= first[1] <= most


def after_steps(*, takes: float, drafting: float) -> DraftLengths:
    """What is learned from steps of 12 seconds, and from steps with drafts that take `drafting`, in each of which a row
    catches up, which is thought to take `takes`.
    """
    told = Told()
    harness = showing_harness(told)
    unshown_prompts(told, harness, range(10))
    harness.step()
    harness.run()
    with_drafts = next(batch for batch in harness.runner.launched if batch.catch_up)
    plain = next(batch for batch in harness.runner.launched if not batch.prefill and not batch.num_drafts)
    lengths = DraftLengths("test", (3,), 4)
    scheduler = showing_harness(lengths, takes=takes).scheduler
    for _ in range(4):  # from the fourth on outliers are held to what was usual
        scheduler.observe_step(plain, 12.0)
        scheduler.observe_step(with_drafts, drafting)
    return lengths


def test_what_catching_up_takes_is_no_part_of_what_drafts_take() -> None:
    lengths = after_steps(takes=3.0, drafting=13.0)
    tokens = lengths.expected_tokens(make_sequences(1), 3, 1)
    assert lengths.saving(1) == pytest.approx(12.0 / 1.02 - 10.0 / tokens)


def test_a_step_takes_time_however_much_catching_up_was_thought_to_take() -> None:
    lengths = after_steps(takes=100.0, drafting=12.0)
    tokens = lengths.expected_tokens(make_sequences(1), 3, 1)
    assert lengths.saving(1) == pytest.approx(12.0 / 1.02 - 3.0 / tokens)
    assert lengths.choose(make_sequences(1)) == 3


@pytest.mark.parametrize("most", [0.0, 30.0, 31.0, 75.0, 1000.0])
def test_as_many_catch_up_at_once_as_may_be_waited_for(most: float) -> None:
    """Three rows at most, and 64 tokens, are shown together."""
    limits = make_limits(tokens=64, prefill_rows=3)
    backlog = DraftBacklog(limits, Harness(limits).scheduler.pages)

    def seconds(rows: int, tokens: int) -> float:
        return 10.0 + tokens

    counts = [10, 10, 10, 30, 30, 40]
    taken = [backlog.seconds(counts[:rows], seconds) for rows in range(len(counts) + 1)]
    wanted = max(rows for rows, each in enumerate(taken) if each <= most)
    assert backlog.affordable(counts, seconds, most) == (wanted, taken[wanted])
