"""How many prompt tokens a step takes on beside those who decode."""

from __future__ import annotations

import pytest

from jaxserve.engine.prefill_sizes import PrefillSizes, balanced_tokens
from jaxserve.engine.request import Request
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence
from jaxserve.sampling_params import SamplingParams
from tests.engine.fake_device import FakeRunner
from tests.engine.scheduler_harness import make_limits

SIZES = PrefillSizes((64, 128, 256, 512), balanced_tokens=256)


@pytest.mark.parametrize(
    ("wanted", "num_decode", "chosen"),
    [
        (40, 4, 40),  # the smallest size is padded whatever it takes
        (128, 4, 128),
        (200, 4, 200),  # 56 of 256 are padding
        (150, 4, 128),  # 106 of 256 would be
        (300, 4, 256),
        (500, 4, 500),
        (2000, 4, 512),
        (500, 15, 500),
        (500, 16, 128),  # a quarter of the slots decodes: what rides along is cut
        (500, 60, 128),
        (30, 60, 30),
    ],
)
def test_padding_and_those_who_decode_bound_a_step(wanted: int, num_decode: int, chosen: int) -> None:
    assert SIZES.choose(wanted, num_decode, 64) == chosen


@pytest.mark.parametrize(
    ("device_kind", "chosen"), [("NVIDIA H100 80GB HBM3", 192), ("NVIDIA H200", 128), ("NVIDIA GH200 144G HBM3e", 128)]
)
def test_cards_that_read_faster_get_smaller_pieces_beside_64_sequences(device_kind: str, chosen: int) -> None:
    sizes = PrefillSizes((64, 96, 128, 192, 256, 512), balanced_tokens(device_kind))
    assert sizes.choose(500, 64, 64) == chosen


def test_without_a_balance_only_padding_decides() -> None:
    assert PrefillSizes((64, 256)).choose(256, 8, 8) == 256


def sequence(name: str, prompt: int) -> Sequence:
    request = Request(name, tuple(range(prompt)), SamplingParams(ignore_eos=True), arrival_time=0.0)
    return Sequence(
        request=request,
        index=0,
        seed=0,
        stop_token_ids=frozenset(),
        max_output_tokens=50,
        token_ids=list(request.prompt_token_ids),
    )


def test_the_scheduler_cuts_prompts_to_full_sizes_while_others_decode_and_finishes_them() -> None:
    limits = make_limits(seqs=4, tokens=64, max_len=200, pages=200)
    scheduler = Scheduler(limits, prefix_caching=False, prefill_sizes=PrefillSizes((8, 16, 32, 64)))
    runner = FakeRunner(limits)

    def step() -> list[int]:
        batch = scheduler.schedule()
        scheduler.update(batch, runner.fetch(runner.launch_sample(runner.launch_forward(batch))))
        return [len(chunk.token_ids) for chunk in batch.prefill]

    scheduler.add(sequence("first", 20))
    assert step() == [20]  # nobody decodes: all of it at once
    scheduler.add(sequence("second", 20))
    scheduler.add(sequence("third", 22))
    assert step() == [20, 12]  # 42 would be padded to 64
    assert step() == [8]  # and the 10 that are left to 16
    assert step() == [2]
    assert step() == []
