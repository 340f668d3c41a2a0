"""Batches that are held until all of them is done, as engines without iteration-level scheduling do."""

from dataclasses import replace

from jaxserve.engine.sequence import SequenceStatus
from tests.engine.scheduler_harness import Harness, make_limits


def static_harness(**sizes: int) -> Harness:
    return Harness(replace(make_limits(**sizes), static_batching=True))


def test_nobody_joins_a_batch_that_runs() -> None:
    harness = static_harness(seqs=4)
    harness.add(3, max_tokens=20)
    short = harness.add(3, max_tokens=3)
    harness.step()
    late = harness.add(3, max_tokens=3)
    harness.step_until(lambda: short in harness.reasons)
    assert harness.sequences[late].status is SequenceStatus.WAITING  # though slots and pages are free
    harness.run()
    assert harness.outputs[late] == harness.solo(late)


def test_a_slot_that_falls_free_is_left_to_the_next_batch() -> None:
    harness = static_harness(seqs=2)
    keys = [harness.add(3, max_tokens=length) for length in (2, 20, 5, 5)]
    harness.step_until(lambda: keys[0] in harness.reasons)
    for _ in range(4):
        harness.step()
    assert harness.sequences[keys[2]].status is SequenceStatus.WAITING
    harness.step_until(lambda: keys[1] in harness.reasons)
    harness.step_until(lambda: harness.sequences[keys[3]].status is SequenceStatus.RUNNING, 3)
    harness.run()


def test_a_batch_fills_over_several_steps_where_its_prompts_are_long() -> None:
    harness = static_harness(seqs=3, tokens=8, pages=64)
    keys = [harness.add(12, max_tokens=30) for _ in range(3)]
    harness.step_until(lambda: all(harness.sequences[key].is_decoding for key in keys), 10)
    harness.run()
    assert all(harness.outputs[key] == harness.solo(key) for key in keys)


def test_a_static_batch_that_runs_out_of_pages_still_ends() -> None:
    harness = static_harness(seqs=3, pages=10)
    keys = [harness.add(6, max_tokens=20) for _ in range(5)]
    harness.run()
    assert harness.scheduler.num_preemptions
    assert all(harness.outputs[key] == harness.solo(key) for key in keys)
