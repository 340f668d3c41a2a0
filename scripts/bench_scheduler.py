"""What the scheduler itself costs in a decode step: microseconds of the host, with no device behind it.

    python scripts/bench_scheduler.py --sequences 64

`schedule` decides the next step, `update` takes in the tokens of the one before. Prompts of 300 tokens, no two alike.
"""

from __future__ import annotations

import argparse
import platform
import time

import numpy as np

from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.request import Request
from jaxserve.engine.schedule import SampledTokens, ScheduledBatch
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence
from jaxserve.sampling_params import SamplingParams

PROMPT_TOKENS = 300


def filled_scheduler(num_sequences: int, rng: np.random.Generator) -> Scheduler:
    """With that many requests, which go on for longer than anything is measured."""
    scheduler = Scheduler(
        SchedulerLimits(
            max_num_seqs=num_sequences,
            max_num_batched_tokens=2048,
            max_prefill_rows=16,
            max_model_len=8192,
            page_size=16,
            num_pages=512 * num_sequences,
        )
    )
    for number in range(num_sequences):
        prompt = tuple(rng.integers(0, 1000, PROMPT_TOKENS).tolist())
        scheduler.add(
            Sequence(
                request=Request(f"request-{number}", prompt, SamplingParams(temperature=0.0), arrival_time=0.0),
                index=0,
                seed=0,
                stop_token_ids=frozenset([5000]),
                max_output_tokens=7000,
                token_ids=list(prompt),
            )
        )
    return scheduler


def drawn_tokens(batch: ScheduledBatch, rng: np.random.Generator) -> SampledTokens:
    counts = [1] * len(batch.decode) + [int(chunk.samples) for chunk in batch.prefill]
    return SampledTokens(rng.integers(0, 1000, (len(counts), 1)).astype(np.int32), np.array(counts, np.int32))


def measure(num_sequences: int, num_steps: int) -> np.ndarray:
    """Microseconds of schedule and update [steps, 2], in steps that only decode."""
    rng = np.random.default_rng(0)
    scheduler = filled_scheduler(num_sequences, rng)
    pending = scheduler.schedule()
    times: list[tuple[float, float]] = []
    while len(times) < num_steps:
        started = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        tokens = drawn_tokens(pending, rng)
        taking = time.perf_counter()
        scheduler.update(pending, tokens)
        ended = time.perf_counter()
        pending = batch
        if len(batch.decode) == num_sequences:
            times.append((scheduled - started, ended - taking))
    return np.array(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    times = measure(options.sequences, options.steps)
    schedule, update = np.median(times, axis=0)
    print(
        f"Python {platform.python_version()}, {options.sequences} sequences, median of {options.steps} steps: "
        f"schedule {schedule:.0f} us, update {update:.0f} us"
    )


if __name__ == "__main__":
    main()
