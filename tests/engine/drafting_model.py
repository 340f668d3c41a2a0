"""A model of a device with a drafter that reads prompts: what its steps take, and what they keep of what is drafted."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.draft_lengths import DraftLengths
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.schedule import SampledTokens, ScheduledBatch
from jaxserve.engine.simulator import (
    SimulatedRequest,
    SimulationResult,
    Simulator,
    StepModel,
    simulated_tokens,
)

DRAFTS = 3


@dataclass(frozen=True)
class DraftTimes:
    """What a drafter takes, in seconds.

    Attributes:
        per_pass: one forward pass of it.
        per_verified_token: of each draft, in the model's own pass.
        showing_base, per_shown_token: to be shown a step.
    """

    per_pass: float = 0.7e-3
    per_verified_token: float = 6e-6
    showing_base: float = 1.0e-3
    per_shown_token: float = 4e-6

    def showing(self, num_decode: int, num_tokens: int) -> float:
        return self.showing_base + self.per_shown_token * (2 * num_decode + max(256, num_tokens))


class DraftingModel:
    """Drafts are right with some probability where the drafter has seen the whole sequence, and never elsewhere.

    Args:
        times: None: the engine does not speculate.
        noise: a step takes longer by up to this share now and then.

    Attributes:
        batches: every step that was simulated.
    """

    def __init__(self, plain: StepModel, times: DraftTimes | None, acceptance: float, noise: float = 0.0) -> None:
        self._plain = plain
        self._times = times
        self._rng = random.Random(3)
        self._noise = noise
        self.acceptance = acceptance
        self.batches: list[ScheduledBatch] = []

    def seconds(self, batch: ScheduledBatch) -> float:
        self.batches.append(batch)
        times, seconds = self._times or DraftTimes(0.0, 0.0, 0.0, 0.0), self._plain.seconds(batch)
        if batch.num_drafts:
            seconds += batch.num_drafts * (times.per_pass + times.per_verified_token * len(batch.decode))
        if batch.prefill and batch.is_shown:
            seconds += times.showing(len(batch.decode), sum(len(chunk.token_ids) for chunk in batch.prefill))
        for group in batch.catch_up:
            seconds += times.showing(0, sum(len(chunk.token_ids) for chunk in group))
        return seconds * (1 + self._noise * self._rng.random() ** 2)

    def sample(self, batch: ScheduledBatch) -> SampledTokens:
        plain = simulated_tokens(batch)
        if not batch.num_drafts:
            return plain
        tokens = np.zeros((len(batch.decode), batch.num_drafts + 1), np.int32)
        counts = []
        for index, row in enumerate(batch.decode):
            tokens[index] = self._rng.choices(range(10, 32_000), k=batch.num_drafts + 1)
            is_wrong = (i for i in range(row.num_drafts) if self._rng.random() >= self.acceptance)
            counts.append(next(is_wrong, row.num_drafts) + 1)
        drafted = np.array([row.num_drafts for row in batch.decode], np.int32)
        return SampledTokens(tokens, np.array(counts, np.int32), drafted)


def simulate_drafting(
    limits: SchedulerLimits,
    trace: list[SimulatedRequest],
    device: DraftingModel,
    times: DraftTimes | None,
    *,
    adaptive: bool = True,
    max_rows: int = 64,
) -> SimulationResult:
    """Args:
    times: of showing, as the engine has measured them; None: the engine does not speculate.
    """
    drafting = None if times is None else DraftLengths("test", (DRAFTS,), max_rows, adaptive=adaptive)

    def showing(num_decode: int, num_tokens: int) -> float:
        if times is None or num_tokens > limits.max_num_batched_tokens:
            raise ValueError(f"{num_tokens} tokens fit no program")
        return times.showing(num_decode, num_tokens)

    simulator = Simulator(
        limits,
        device,
        drafting=drafting,
        showing_seconds=None if times is None else showing,
        sample=device.sample,
    )
    return simulator.run(trace)


def prompts(count: int, num_prompt: int, num_output: int, seed: int = 0) -> list[SimulatedRequest]:
    """Requests that are all there from the start: as many run as there are slots, and the next one follows at once."""
    rng = np.random.default_rng(seed)
    lengths = zip(
        rng.integers(num_prompt // 2, num_prompt * 3 // 2, count),
        rng.integers(num_output // 2, num_output * 3 // 2, count),
        strict=True,
    )
    return [
        SimulatedRequest(0.0, tuple(rng.integers(0, 32_000, prompt).tolist()), int(output))
        for prompt, output in lengths
    ]
