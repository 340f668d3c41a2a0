"""The face of the engine for code that lives on an event loop (the server, the Python API) or on threads."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine import sequence as sequences
from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.engine.host_pages import OffloadStats
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.loop import EngineLoop
from jaxserve.engine.prefix_cache import CacheDomain
from jaxserve.engine.request import EngineStoppedError, Request, RequestOutput
from jaxserve.engine.runner_protocol import Runner
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.submissions import Receiver, Submissions, SubmittingEngine
from jaxserve.engine.time_histogram import TimeCounts
from jaxserve.engine.token_masks import MaskWriter
from jaxserve.sampling_params import SamplingParams

_SEED_MASK = 2**64 - 1


@dataclass(frozen=True)
class EngineStats:
    """What the engine is doing and has done; one moment's snapshot."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_preemptions: int
    num_steps: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generation_tokens: int
    finished: dict[str, int]
    uptime_s: float
    last_step_ms: float
    host_gap: float
    busy_s: float
    device_idle_s: float
    host_s: float
    last_host_ms: float
    step_times: TimeCounts
    host_times: TimeCounts
    device_kind: str
    forced_tokens: int = 0  # of the generated ones, those that a constraint forced and that took no step of their own
    speculative: SpeculativeStats | None = None  # of an engine that speculates
    kv_offload: OffloadStats | None = None  # of an engine that keeps pages in host memory
    replicas: tuple[EngineStats | None, ...] = ()  # of an engine that has several; None: does not run at the moment


@dataclass(frozen=True)
class Replica:
    """Which of several engines one is.

    Attributes:
        index: its place among those that run at once, and in the devices.
        number: counts all that were ever built: the seeds of two replicas differ by it.
        on_failure: called in the engine's thread when it has failed, before its requests are told.
        num_to_build: replicas of the first start that are not there yet, this one included.
    """

    index: int = 0
    number: int = 0
    on_failure: Callable[[], None] = lambda: None
    num_to_build: int = 1


ONLY_REPLICA = Replica()


class EngineClient(SubmittingEngine):
    """Submits requests to the engine thread and brings their outputs back. Safe to use from any thread."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        model_config: ModelConfig,
        scheduler: Scheduler,
        runner: Runner,
        device_kind: str,
        replica: Replica = ONLY_REPLICA,
    ) -> None:
        super().__init__("request" if config.data_parallel_size == 1 else f"replica-{replica.number}-request")
        self.config = config
        self.model_config = model_config
        self.max_model_len = scheduler.limits.longest_sequence
        self.device_kind = device_kind
        self.failure: BaseException | None = None
        self._replica = replica
        self._scheduler = scheduler
        self._submissions = Submissions(config, model_config.vocab_size, scheduler.limits, self.abort)
        self._loop = EngineLoop(
            scheduler, runner, self._submissions.distribute, self._fail, MaskWriter(model_config.vocab_size)
        )
        self._pin_numbers = itertools.count()
        self._seed_lock = threading.Lock()
        self._draining = False
        self._stopped = False
        self._started_at = time.monotonic()
        self._seeds = None if config.seed is None else _seeds(config.seed, replica.number)

    def start(self) -> None:
        """Starts the engine thread; called once, by whoever built the engine."""
        self._loop.start()

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return not (self._draining or self._stopped or self.failure)

    @property
    def num_live(self) -> int:
        return self._submissions.num_live

    @property
    def limits(self) -> SchedulerLimits:
        return self._scheduler.limits

    def num_cached_tokens(self, prompt_bytes: bytes, cache_salt: str | None) -> int:
        """How many tokens of a prompt have their KV pages here at the moment: a hint. Any thread.

        Args:
            prompt_bytes: its `token_bytes`.
        """
        return self._scheduler.pages.num_cached_tokens(CacheDomain(salt=cache_salt), prompt_bytes)

    def submit_as(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        receiver: Receiver,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> None:
        request = Request(
            request_id,
            tuple(prompt_token_ids),
            sampling,
            arrival_time=time.monotonic(),
            cache_salt=cache_salt,
            priority=priority,
        )
        self._submit(request, receiver)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._loop.abort(request_id, index)

    def flush_prefix_cache(self) -> Future[int]:
        """Forgets what is kept of prompts, but for what running requests use; the result is how many pages that frees."""
        return self._loop.call(self._scheduler.pages.flush)

    def pin_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Computes the pages of a prompt, and keeps them for as long as memory can be had from others. Blocks.

        Raises:
            RequestError: it is too long.
            EngineStoppedError: the engine was shut down or failed meanwhile.
        """
        self._loop.call(lambda: self._scheduler.pages.pin(prompt_token_ids)).result()
        ended: Future[RequestOutput] = Future()
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        # Not as a request of this engine's own: another one in front of it may number those that it submits here alike.
        request_id = f"pin-{next(self._pin_numbers)}"
        arrival_time = time.monotonic()
        self._submit(
            Request(request_id, tuple(prompt_token_ids), sampling, arrival_time, is_counted=False), ended.set_result
        )
        if ended.result().finish_reason == "error":
            raise EngineStoppedError(f"the pinned prompt was not computed: {ended.result().error}")

    def start_draining(self) -> None:
        """Takes no new requests from now on; those that run go on."""
        self._draining = True

    def shutdown(self) -> None:
        """Stops the engine thread; requests that still run get finish_reason "error"."""
        self._stopped = True
        self._loop.stop()

    def stats(self) -> EngineStats:
        scheduler, loop = self._scheduler, self._loop.stats
        num_running, num_waiting = self.sequence_counts()
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_pages=scheduler.pages.num_pages,
            num_free_pages=scheduler.pages.num_free,
            num_cached_pages=scheduler.pages.num_cached,
            num_preemptions=scheduler.num_preemptions,
            num_steps=loop.num_steps,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_prompt_tokens=scheduler.num_cached_tokens,
            generation_tokens=scheduler.num_generation_tokens,
            finished=dict(scheduler.finished),
            uptime_s=time.monotonic() - self._started_at,
            last_step_ms=loop.last_step * 1e3,
            host_gap=loop.device_idle / loop.busy if loop.busy else 0.0,
            busy_s=loop.busy,
            device_idle_s=loop.device_idle,
            host_s=loop.host,
            last_host_ms=loop.last_host * 1e3,
            step_times=self._loop.step_times.read(),
            host_times=self._loop.host_times.read(),
            device_kind=self.device_kind,
            forced_tokens=scheduler.num_forced_tokens,
            speculative=scheduler.speculative_stats,
            kv_offload=scheduler.pages.offload_stats,
        )

    def sequence_counts(self) -> tuple[int, int]:
        """`num_running` and `num_waiting` of `stats` alone, for one who looks at every step."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    def busy_times(self) -> tuple[float, float]:
        """Seconds in which there was work so far, and those of them in which the device waited for the host."""
        loop = self._loop.stats
        return loop.busy, loop.device_idle

    def _submit(self, request: Request, receiver: Receiver) -> None:
        """Raises as `submit_as` does."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        self._submissions.check(prompt, sampling, request.priority)
        choices = self._make_sequences(request)
        if not self.is_ready:
            raise EngineStoppedError("the engine takes no new requests: it drains, was shut down, or failed")
        self._submissions.admit(request.request_id, len(prompt), sampling.n, receiver)
        self._loop.add(choices)

    def _make_sequences(self, request: Request) -> tuple[sequences.Sequence, ...]:
        sampling = request.sampling
        seed = sampling.seed & _SEED_MASK if sampling.seed is not None else self._random_seed()
        room = self.max_model_len - len(request.prompt_token_ids)
        stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids.update(self.model_config.eos_token_ids)
        return tuple(
            sequences.Sequence(
                request=request,
                index=index,
                seed=choice_seed(seed, index),
                stop_token_ids=frozenset(stop_ids),
                max_output_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
                constraint=None if sampling.constraint is None else sampling.constraint.start(),
                token_ids=list(request.prompt_token_ids),
            )
            for index in range(sampling.n)
        )

    def _random_seed(self) -> int:
        if self._seeds is None:
            return secrets.randbits(64)
        with self._seed_lock:
            return int(self._seeds.integers(0, 2**64, dtype=np.uint64))

    def fail(self, error: BaseException) -> None:
        """Gives the engine up, though its thread may be stuck: live requests get an error output. Any thread."""
        self._loop.fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self._replica.on_failure()


def _seeds(seed: int, replica: int) -> np.random.Generator:
    return np.random.default_rng((seed, replica) if replica else seed)


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index` of a request: the request's own for choice 0, an independent one for each other."""
    if index == 0:
        return seed
    low, high = np.random.SeedSequence([seed & 0xFFFFFFFF, seed >> 32, index]).generate_state(2)
    return int(high) << 32 | int(low)
