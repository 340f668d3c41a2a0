"""Requests on their way in and under way: how they are submitted, what has not ended yet, and to whom outputs go."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.config import EngineConfig
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.request import QueueFullError, RequestError, RequestOutput
from jaxserve.engine.stream import GenerationStream
from jaxserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)  # two of them are never the same one
class StepReceiver:
    """Takes all that a step brought for its requests at once.

    Attributes:
        deliver: called in the thread that brings outputs; must be quick.
    """

    deliver: Callable[[list[RequestOutput]], None]


Receiver = GenerationStream | StepReceiver | Callable[[RequestOutput], None]
_Delivery = tuple[GenerationStream, RequestOutput]


class SubmittingEngine(ABC):
    """The ways into an engine, all of which come to `submit_as`; the same for one in this process, in another, or several.

    Safe to use from any thread.

    Args:
        request_name: that the ids of its own requests begin with; of no other engine that the same requests come to.
    """

    def __init__(self, request_name: str = "request") -> None:
        self._request_name = request_name
        self._request_numbers = itertools.count()

    @property
    @abstractmethod
    def num_live(self) -> int:
        """Choices that were submitted and have not finished."""

    @abstractmethod
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
        """As `submit`, for one who gives requests their ids and takes the outputs in any way there is.

        Args:
            request_id: of no other request that is under way.
        """

    @abstractmethod
    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one choice of it; unknown ones are left alone."""

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> GenerationStream:
        """Queues a request; must be called on a running event loop, which its outputs come to.

        Args:
            cache_salt, priority: as `Request` has them.

        Raises:
            RequestError: the request can never be served as asked.
            QueueFullError: too many wait already.
            EngineStoppedError: the engine drains, was shut down or failed.
        """
        stream = GenerationStream(self._new_request_id(), sampling.n, self.abort)
        self.submit_as(stream.request_id, prompt_token_ids, sampling, stream, cache_salt=cache_salt, priority=priority)
        return stream

    def submit_with_callback(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        on_output: Callable[[RequestOutput], None],
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> str:
        """As `submit`, for code without an event loop.

        Args:
            on_output: called in the thread that brings outputs, which is the engine's own where it runs in this process;
                must be quick. If it raises, that is logged and the request is aborted.

        Returns:
            The request's id, for `abort`.
        """
        request_id = self._new_request_id()
        self.submit_as(request_id, prompt_token_ids, sampling, on_output, cache_salt=cache_salt, priority=priority)
        return request_id

    async def wait_drained(self, timeout: float) -> bool:
        """Waits until nothing runs; False if that takes longer than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.num_live:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def _new_request_id(self) -> str:
        return f"{self._request_name}-{next(self._request_numbers)}"


class Submissions:
    """Checks and counts requests, and hands their outputs out. Safe to use from any thread.

    Args:
        limits: of one engine.
        abort: ends a request whose outputs nobody takes.
        num_engines: engines that share the work.
    """

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        limits: SchedulerLimits,
        abort: Callable[[str], None],
        *,
        num_engines: int = 1,
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._limits = limits
        self._abort = abort
        self._most = num_engines * (config.max_num_queued_requests + limits.max_num_seqs)
        self._most_tokens = None if config.max_num_queued_tokens is None else num_engines * config.max_num_queued_tokens
        self._lock = threading.Lock()
        self._receivers: dict[str, Receiver] = {}
        self._unfinished: dict[str, set[int]] = {}  # choices
        self._num_live = 0  # choices that were submitted and have not finished
        self._queued_tokens: dict[tuple[str, int], int] = {}  # prompt tokens of choices that brought nothing yet
        self._num_queued_tokens = 0  # their sum

    @property
    def num_live(self) -> int:
        """Choices that were submitted and have not finished."""
        return self._num_live

    def live(self) -> list[tuple[str, int]]:
        """Request id and index of each of them."""
        with self._lock:
            return [(request_id, index) for request_id, left in self._unfinished.items() for index in sorted(left)]

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, priority: int) -> None:
        """Raises:
        RequestError: the request can never be served as asked.
        """
        if priority and self._config.scheduling_policy != "priority":
            raise RequestError(
                f"priority={priority} has no effect under the scheduling policy {self._config.scheduling_policy!r}: "
                "leave it out, or start the engine with --scheduling-policy priority",
                parameter="priority",
            )
        biased = [token for token, _ in sampling.logit_bias]
        for name, ids in (
            ("prompt", prompt_token_ids),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", biased),
        ):
            if len(ids) and (min(ids) < 0 or max(ids) >= self._vocab_size):
                wrong = next(token for token in ids if not 0 <= token < self._vocab_size)
                raise RequestError(
                    f"{name}: token id {wrong} is outside the vocabulary of {self._vocab_size}", parameter=name
                )
        self._limits.check_prompt(len(prompt_token_ids))

    def admit(self, request_id: str, num_prompt_tokens: int, num_choices: int, receiver: Receiver) -> None:
        """Counts a request, whose outputs go to `receiver` from now on.

        Raises:
            ValueError: a request of that id is under way, whose outputs would be lost.
            QueueFullError: too many wait already.
        """
        with self._lock:
            if request_id in self._unfinished:
                raise ValueError(f"{request_id=} is that of a request that is under way: give each one of its own")
            self._check_queue(num_prompt_tokens, num_choices)
            self._receivers[request_id] = receiver
            self._unfinished[request_id] = set(range(num_choices))
            self._num_live += num_choices
            self._num_queued_tokens += num_choices * num_prompt_tokens
            self._queued_tokens.update(((request_id, index), num_prompt_tokens) for index in range(num_choices))

    def distribute(self, outputs: list[RequestOutput]) -> None:
        """Hands outputs to their receivers, with one wake-up for each event loop. One thread at a time."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[_Delivery]] = defaultdict(list)
        by_step: defaultdict[StepReceiver, list[RequestOutput]] = defaultdict(list)
        for output in outputs:
            receiver = self._receivers.get(output.request_id)
            if receiver is None:
                continue
            self._count(output)
            if isinstance(receiver, StepReceiver):
                by_step[receiver].append(output)
            elif isinstance(receiver, GenerationStream):
                by_loop[receiver.loop].append((receiver, output))
            else:
                self._call_back(receiver, output)
        for receiver, of_step in by_step.items():
            receiver.deliver(of_step)
        for loop, deliveries in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver_all, deliveries)
            except RuntimeError:  # the loop was closed: nobody will ever read these
                for stream in {stream for stream, _ in deliveries}:
                    self._drop_receiver(stream.request_id)

    def _check_queue(self, num_prompt_tokens: int, num_choices: int) -> None:
        """Under the lock: whether a request may wait. One that nothing stands before always may."""
        if self._num_live + num_choices > self._most and self._num_live:
            live = "sequence runs or waits" if self._num_live == 1 else "sequences run or wait"
            raise QueueFullError(
                f"{self._num_live} {live}, of at most {self._most}; try again later, or raise --max-num-queued-requests"
            )
        if self._most_tokens is None or not self._num_queued_tokens:
            return
        if self._num_queued_tokens + num_choices * num_prompt_tokens > self._most_tokens:
            queued = "prompt token waits" if self._num_queued_tokens == 1 else "prompt tokens wait"
            raise QueueFullError(
                f"{self._num_queued_tokens} {queued}, of at most {self._most_tokens}, and this request brings "
                f"{num_choices * num_prompt_tokens} more; try again later, or raise --max-num-queued-tokens"
            )

    def _call_back(self, on_output: Callable[[RequestOutput], None], output: RequestOutput) -> None:
        try:
            on_output(output)
        except Exception:  # one caller's fault must not end the engine for all
            logger.exception("the callback of %s failed; the request is aborted", output.request_id)
            self._drop_receiver(output.request_id)

    def _drop_receiver(self, request_id: str) -> None:
        """Ends a request whose outputs nobody takes."""
        with self._lock:
            if request_id in self._receivers:
                self._receivers[request_id] = _discard
        self._abort(request_id)

    def _count(self, output: RequestOutput) -> None:
        request_id = output.request_id
        if (request_id, output.index) in self._queued_tokens:
            with self._lock:
                self._num_queued_tokens -= self._queued_tokens.pop((request_id, output.index))
        if output.finish_reason is not None:
            with self._lock:
                self._num_live -= 1
                left = self._unfinished[request_id]
                left.remove(output.index)
                if not left:
                    del self._unfinished[request_id], self._receivers[request_id]


def _discard(output: RequestOutput) -> None:
    del output


def _deliver_all(deliveries: list[_Delivery]) -> None:
    for stream, output in deliveries:
        stream.deliver(output)
