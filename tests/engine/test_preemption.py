"""Sequences that give their slot and pages to others, and start over."""

from __future__ import annotations

from jaxserve.engine.sequence import SequenceStatus
from tests.engine.scheduler_harness import Harness, make_limits


def test_preemption_changes_no_token() -> None:
    harness = Harness(make_limits(pages=8))
    keys = [harness.add(4, max_tokens=24, seed=seed) for seed in range(4)]
    harness.run()
    assert harness.scheduler.num_preemptions >= 3
    assert harness.sequences[keys[0]].num_preemptions == 0  # the first in line is never disturbed
    harness.check_done()
    assert harness.scheduler.num_generation_tokens == 4 * 24
    assert harness.scheduler.num_prompt_tokens == 4 * 4  # recomputed prompts are not counted again


def test_the_token_in_flight_at_preemption_is_taken_in() -> None:
    harness = Harness(make_limits(pages=5, seqs=2))
    _, victim = harness.add(4, max_tokens=12), harness.add(4, max_tokens=12)
    sequence = harness.sequences[victim]
    harness.step_until(lambda: sequence.num_preemptions > 0)
    # `step` took in the one that was in flight after it had preempted the sequence.
    assert sequence.status is SequenceStatus.WAITING
    known = len(harness.outputs[victim])
    assert sequence.num_output_tokens == known
    assert sequence.pages == []
    assert sequence.slot == -1
    resumed = None
    while resumed is None:
        resumed = next((c for c in harness.step().prefill if c.sequence is sequence and c.samples), None)
    assert resumed.output_index == known
    assert resumed.start + len(resumed.token_ids) == 4 + known
    harness.run()
    harness.check_done()


def test_the_last_token_may_be_in_flight_at_preemption() -> None:
    """The victim's token ends it while it waits to start over: it never runs again."""
    harness = Harness(make_limits(pages=5, seqs=2))
    harness.add(4, max_tokens=12)
    victim = harness.add(4, max_tokens=12, seed=1)
    probe = Harness(harness.limits)
    probe.add(4, max_tokens=12)
    probed = probe.add(4, max_tokens=12, seed=1)
    probe.step_until(lambda: probe.sequences[probed].num_preemptions > 0)
    last = probe.outputs[probed][-1]  # came in after the preemption
    assert probe.outputs[probed].count(last) == 1

    sequence = harness.sequences[victim]
    sequence.stop_token_ids = frozenset([last])
    harness.step_until(lambda: sequence.num_preemptions > 0)
    assert harness.reasons[victim] == "stop"
    launched = len(harness.runner.launched)
    harness.run()
    harness.check_done()
    assert all(
        row.sequence is not sequence
        for batch in harness.runner.launched[launched:]
        for row in (*batch.decode, *batch.prefill)
    )


def test_preempted_requests_start_over_before_new_ones() -> None:
    harness = Harness(make_limits(pages=6, seqs=3))
    for _ in range(3):
        harness.add(4, max_tokens=16)
    new = harness.add(2, max_tokens=2)
    harness.step_until(lambda: harness.scheduler.num_preemptions >= 2)
    waiting = [sequence.request.request_id for sequence in harness.scheduler.waiting]
    assert waiting == sorted(waiting)
    assert waiting[-1] == new[0]
    harness.run()
    harness.check_done()


def test_abort_between_preemption_and_the_fetch_of_its_token() -> None:
    harness = Harness(make_limits(pages=5, seqs=2))
    other, key = harness.add(4, max_tokens=12), harness.add(4, max_tokens=12)
    sequence = harness.sequences[key]
    while True:  # the loop's round, with the abort in its middle
        batch = harness.scheduler.schedule()
        if sequence.status is SequenceStatus.WAITING and sequence.num_in_flight:
            break
        launched = (batch, harness.runner.launch_sample(harness.runner.launch_forward(batch)))
        if harness.pending is not None:
            harness.take(harness.scheduler.update(harness.pending[0], harness.runner.fetch(harness.pending[1])))
        harness.pending = launched
    before = list(harness.outputs[key])
    harness.abort(key[0])
    launched = (batch, harness.runner.launch_sample(harness.runner.launch_forward(batch)))
    harness.take(harness.scheduler.update(harness.pending[0], harness.runner.fetch(harness.pending[1])))
    harness.pending = launched
    harness.run()
    assert harness.outputs[key] == before
    assert (harness.reasons[key], harness.reasons[other]) == ("abort", "length")
    harness.check_done()
