"""The real scheduler over a trace of requests, in a time of its own: steps take what a model of the device says. Host only.

Hours of traffic run in seconds, so that policies can be compared, and what must always hold can be tested on thousands of
requests.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from jaxserve.engine.draft_lengths import DraftLengths
from jaxserve.engine.draft_showing import ShowingSeconds
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.prefill_sizes import PrefillSizes
from jaxserve.engine.request import FinishReason, Request, RequestOutput
from jaxserve.engine.schedule import SampledTokens, ScheduledBatch
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.step_pace import StepPace
from jaxserve.engine.waiting_queue import SchedulingOrder
from jaxserve.sampling_params import SamplingParams

_VOCABULARY = 32_000


class StepTimes(Protocol):
    """What a step takes, in seconds."""

    def seconds(self, batch: ScheduledBatch) -> float: ...


@dataclass(frozen=True)
class StepModel:
    """What a step takes, in seconds: what its tokens take, by reading the weights or by computing, whichever is longer, and
    attention.

    Attributes:
        base: of every step: the weights are read.
        per_row: of each sequence that decodes.
        per_cached_token: of each token of context that a decoding sequence reads.
        per_prompt_token: of each prompt token, padding included, while reading the weights takes longer than computing.
        per_pair: of each pair of a prompt token and one that it attends to.
        prompt_sizes: numbers of prompt tokens that steps are padded to, ascending; none: they are not.
        computing_base, per_computed_token: of a step with so many tokens that computing takes longer.
        per_context_token: of each token of the longest context that a chunk attends to, however short the chunk is: a kernel
            goes through it in one place. Attention takes this or what its pairs take, whichever is longer.
    """

    base: float
    per_row: float
    per_cached_token: float
    per_prompt_token: float
    per_pair: float
    prompt_sizes: tuple[int, ...] = ()
    computing_base: float = 0.0
    per_computed_token: float = 0.0
    per_context_token: float = 0.0

    def seconds(self, batch: ScheduledBatch) -> float:
        tokens = pairs = longest = 0
        for chunk in batch.prefill:
            length = len(chunk.token_ids)
            tokens += length
            pairs += length * chunk.start + length * length // 2
            longest = max(longest, chunk.start + length)
        if tokens and self.prompt_sizes:
            tokens = self.prompt_sizes[min(bisect_left(self.prompt_sizes, tokens), len(self.prompt_sizes) - 1)]
        rows = len(batch.decode)
        reading = self.base + self.per_row * rows + self.per_prompt_token * tokens
        computing = self.computing_base + self.per_computed_token * (rows + tokens)
        read = sum(row.sequence.num_computed for row in batch.decode)
        attention = max(self.per_pair * pairs, self.per_context_token * longest)
        return max(reading, computing) + self.per_cached_token * read + attention


# What an engine on a GPU compiles beside those who decode, for up to 64 sequences and 2048 tokens a step.
PROMPT_SIZES = (64, 96, 128, 192, 256, 512, 1024, 2048)
# Fitted to steps of Llama-3-8B in bfloat16 that docs/performance.md tells, as the tests have them.
LLAMA_8B_ON_H100 = StepModel(
    base=5.8e-3,
    per_row=5e-6,
    per_cached_token=49e-9,
    per_prompt_token=12e-6,
    per_pair=1.05e-9,
    prompt_sizes=PROMPT_SIZES,
    computing_base=0.6e-3,
    per_computed_token=19e-6,
    per_context_token=0.39e-6,
)
LLAMA_8B_ON_H200 = replace(LLAMA_8B_ON_H100, base=4.42e-3, per_cached_token=36e-9)


@dataclass(frozen=True)
class SimulatedRequest:
    """One request of a trace.

    Attributes:
        arrival: seconds from the start of the trace.
        num_output: tokens of the answer.
        abort_after: seconds after its arrival at which the client goes away, if it is not done then; None: never.
    """

    arrival: float
    prompt_token_ids: tuple[int, ...]
    num_output: int
    priority: int = 0
    cache_salt: str | None = None
    num_choices: int = 1
    abort_after: float | None = None


@dataclass
class SimulatedCourse:
    """What became of one choice of a request; times in seconds from the start of the trace."""

    request: SimulatedRequest
    token_times: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0

    @property
    def time_to_first_token(self) -> float:
        return self.token_times[0] - self.request.arrival

    @property
    def inter_token_times(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]


@dataclass(frozen=True)
class SimulationResult:
    """A whole trace.

    Attributes:
        courses: in the order of the trace, choices of a request side by side.
        seconds: from the start to the last token.
        busy: seconds in which the device had a step.
    """

    courses: list[SimulatedCourse]
    seconds: float
    busy: float
    num_steps: int
    num_preemptions: int

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were found in the prefix cache."""
        prompts = sum(len(course.request.prompt_token_ids) for course in self.courses)
        return sum(course.num_cached_tokens for course in self.courses) / prompts if prompts else 0.0

    def percentile(self, what: Callable[[SimulatedCourse], Iterable[float]], share: float) -> float:
        """Percentile of a figure over all choices that gave a token."""
        values = [value for course in self.courses if course.token_times for value in what(course)]
        return float(np.percentile(values, share)) if values else 0.0


class Simulator:
    """One scheduler with a device whose steps take what a model says. Steps are launched one ahead, as the engine does.

    Args:
        on_step: called with every step that was decided, before its tokens come.
        drafting, showing_seconds: as the scheduler takes them.
        sample: what a step brings; it must be given with `drafting`, since `simulated_tokens` keeps no draft.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        model: StepTimes,
        *,
        order: SchedulingOrder | None = None,
        pace: StepPace | None = None,
        prefill_sizes: PrefillSizes | None = None,
        prefix_caching: bool = True,
        on_step: Callable[[ScheduledBatch], None] = lambda batch: None,
        drafting: DraftLengths | None = None,
        showing_seconds: ShowingSeconds | None = None,
        sample: Callable[[ScheduledBatch], SampledTokens] | None = None,
    ) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(
            limits,
            prefix_caching=prefix_caching,
            order=order,
            pace=pace,
            prefill_sizes=prefill_sizes,
            drafting=drafting,
            showing_seconds=showing_seconds,
            clock=lambda: self.now,
        )
        self._sample = sample or simulated_tokens
        self._limits = limits
        self._model = model
        self._on_step = on_step
        self._courses: dict[tuple[str, int], SimulatedCourse] = {}
        self._busy = 0.0
        self._num_steps = 0

    def run(self, trace: Iterable[SimulatedRequest]) -> SimulationResult:
        """Serves a trace, which is in the order of arrival, to its end.

        Raises:
            RuntimeError: the scheduler has work and does none of it.
            RequestError: a request of the trace can never be served.
        """
        arrivals = _Arrivals(trace)
        pending: tuple[ScheduledBatch, float] | None = None
        device_free = last_fetch = 0.0
        while True:
            if pending is None and not self.scheduler.has_work:
                if arrivals.next_time is None:
                    break
                self.now = last_fetch = max(self.now, arrivals.next_time)
            arrivals.take(self.now, self._add, self.scheduler.abort)
            batch = self.scheduler.schedule()
            launched = None
            if batch:
                self._on_step(batch)
                seconds = self._model.seconds(batch)
                device_free = max(self.now, device_free) + seconds
                launched = batch, device_free
                self._busy += seconds
                self._num_steps += 1
            if pending is not None:
                self.now = max(self.now, pending[1])
                self._take(self.scheduler.update(pending[0], self._sample(pending[0])))
                self.scheduler.observe_step(pending[0], self.now - last_fetch)
                last_fetch = self.now
            elif launched is None:
                self._take(self.scheduler.take_pending_outputs())
                if self.scheduler.has_work:
                    raise RuntimeError(f"{len(self.scheduler.waiting)} wait, and nothing can be scheduled")
            pending = launched
        return SimulationResult(
            list(self._courses.values()), self.now, self._busy, self._num_steps, self.scheduler.num_preemptions
        )

    def _add(self, request_id: str, simulated: SimulatedRequest) -> None:
        request = Request(
            request_id,
            simulated.prompt_token_ids,
            SamplingParams(),
            arrival_time=simulated.arrival,
            cache_salt=simulated.cache_salt,
            priority=simulated.priority,
        )
        for index in range(simulated.num_choices):
            self._courses[request_id, index] = SimulatedCourse(simulated)
            self.scheduler.add(
                Sequence(
                    request=request,
                    index=index,
                    seed=0,
                    stop_token_ids=frozenset(),
                    max_output_tokens=min(
                        simulated.num_output, self._limits.longest_sequence - len(request.prompt_token_ids)
                    ),
                    token_ids=list(request.prompt_token_ids),
                )
            )

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            course = self._courses[output.request_id, output.index]
            course.token_times += [self.now] * len(output.token_ids)
            if output.token_ids:
                course.num_cached_tokens = output.num_cached_tokens
            course.finish_reason = output.finish_reason


class _Arrivals:
    """What is still to come of a trace: requests, and clients that go away."""

    def __init__(self, trace: Iterable[SimulatedRequest]) -> None:
        self._trace = enumerate(trace)
        self._next = next(self._trace, None)
        self._leaving: list[tuple[float, str]] = []

    @property
    def next_time(self) -> float | None:
        """When the next request comes; None: none does."""
        return None if self._next is None else self._next[1].arrival

    def take(self, now: float, add: Callable[[str, SimulatedRequest], None], abort: Callable[[str], None]) -> None:
        while self._next is not None and self._next[1].arrival <= now:
            number, request = self._next
            add(f"request-{number}", request)
            if request.abort_after is not None:
                self._leaving.append((request.arrival + request.abort_after, f"request-{number}"))
            self._next = next(self._trace, None)
        for when, request_id in self._leaving:
            if when <= now:
                abort(request_id)
        self._leaving = [(when, request_id) for when, request_id in self._leaving if when > now]


def poisson_trace(
    rate: float,
    lengths: Iterable[tuple[int, int]],
    *,
    shared_prefix: int = 0,
    seed: int = 0,
) -> list[SimulatedRequest]:
    """Requests that come at random, `rate` a second on average, with random prompts.

    Args:
        lengths: prompt and output tokens of each.
        shared_prefix: tokens that all prompts begin with, beside their own.
    """
    rng = np.random.default_rng(seed)
    prefix = tuple(rng.integers(0, _VOCABULARY, shared_prefix).tolist())
    trace: list[SimulatedRequest] = []
    now = 0.0
    for prompt, output in lengths:
        now += float(rng.exponential(1 / rate))
        trace.append(SimulatedRequest(now, prefix + tuple(rng.integers(0, _VOCABULARY, prompt).tolist()), output))
    return trace


def simulated_tokens(batch: ScheduledBatch) -> SampledTokens:
    """Tokens that tell answers apart and depend on nothing but the request and their place."""
    sequences = [row.sequence for row in batch.decode] + [chunk.sequence for chunk in batch.prefill]
    tokens = [
        (sequence.token_ids[-1] * 31 + sequence.num_output_tokens * 7 + sequence.index) % _VOCABULARY
        for sequence in sequences
    ]
    counts = [1] * len(batch.decode) + [int(chunk.samples) for chunk in batch.prefill]
    return SampledTokens(np.array(tokens, np.int32).reshape(-1, 1), np.array(counts, np.int32))
