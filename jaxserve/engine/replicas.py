"""Several engines with the same model on devices of their own, behind the face of one: data parallelism."""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.client import ONLY_REPLICA, EngineClient, EngineStats, Replica
from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.engine.host_pages import OffloadStats
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.request import EngineStoppedError, QueueFullError, token_bytes
from jaxserve.engine.submissions import Receiver, SubmittingEngine
from jaxserve.engine.time_histogram import TimeCounts
from jaxserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

BuildReplica = Callable[[EngineConfig, Replica], EngineClient]

MAX_RESTARTS = 5  # of one replica within the window; then the fault is not one that passes
FAILURE_WINDOW_SECONDS = 600.0
# A replica with more than twice the least load and these many sequences gets no more work for the sake of its cache:
# otherwise a system prompt that all conversations share would bring them all to the replica that computed it first.
_MORE_SEQUENCES = 4


class ReplicatedEngine(SubmittingEngine):
    """Offers what `EngineClient` does, over several of them. Safe to use from any thread.

    A request goes to the replica that has most of its prompt in KV pages, and among equals to the one with the least to
    do; a replica that has far more to do than another is not asked. A replica that fails ends its requests with an error
    that says so, is built anew while the others go on, and is given up if it fails too often. The engine as a whole has
    failed when every replica was given up.

    Args:
        config: of the engine; the first replica's plan for what it leaves open is the others' as well.
        build: makes one replica, running.
    """

    def __init__(self, config: EngineConfig, build: BuildReplica) -> None:
        super().__init__()
        self._build = build
        self._size = config.data_parallel_size
        self._failed: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # replicas to build anew; None: no more
        self._failures: list[list[float]] = [[] for _ in range(self._size)]
        self._num_built = 0
        self._pinned: tuple[int, ...] | None = None
        self._draining = self._stopped = False
        self._given_up: dict[int, BaseException] = {}
        self._lock = threading.Lock()
        self._clients: list[EngineClient | None] = [None] * self._size
        self.config = config
        try:
            for index in range(self._size):
                client = self._clients[index] = self._build_one(index)
                self.config = client.config
        except BaseException:
            self._shut_down_clients()
            raise
        clients = self._running()
        self.model_config: ModelConfig = clients[0].model_config
        self.device_kind: str = clients[0].device_kind
        shortest = min(clients, key=lambda client: client.max_model_len)
        self.max_model_len: int = shortest.max_model_len
        self.limits: SchedulerLimits = shortest.limits
        self._thread = threading.Thread(target=self._rebuild_failed, name="jaxserve-replicas", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken: by one replica at least."""
        return any(client.is_ready for client in self._running())

    @property
    def num_live(self) -> int:
        return sum(client.num_live for client in self._running())

    @property
    def failure(self) -> BaseException | None:
        """Why the last replica was given up, once all are."""
        return list(self._given_up.values())[-1] if len(self._given_up) == self._size else None

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
        refusal: QueueFullError | EngineStoppedError | None = None
        for client in self._in_order(prompt_token_ids, cache_salt):
            try:
                client.submit_as(
                    request_id, prompt_token_ids, sampling, receiver, cache_salt=cache_salt, priority=priority
                )
                return
            except QueueFullError as error:
                refusal = error
            except EngineStoppedError as error:  # it failed or began to drain just now
                refusal = refusal or error
        raise refusal or EngineStoppedError("no replica of the engine takes new requests: try again shortly")

    def abort(self, request_id: str, index: int | None = None) -> None:
        for client in self._running():
            client.abort(request_id, index)

    def flush_prefix_cache(self) -> Future[int]:
        """As `EngineClient.flush_prefix_cache`, of every replica; the result is the sum."""
        return _sum([client.flush_prefix_cache() for client in self._running()])

    def pin_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """As `EngineClient.pin_prompt`, on every replica, and on those that are built anew."""
        for client in self._running():
            client.pin_prompt(prompt_token_ids)
        self._pinned = tuple(prompt_token_ids)

    def start_draining(self) -> None:
        """Takes no new requests from now on; those that run go on."""
        with self._lock:
            self._draining = True
            clients = self._running()
        for client in clients:
            client.start_draining()

    def shutdown(self) -> None:
        """Stops every replica; requests that still run get finish_reason "error". Waits for one that is being built."""
        with self._lock:
            self._stopped = True
        self._failed.put(None)
        self._shut_down_clients()
        self._thread.join()

    def stats(self) -> EngineStats:
        """Of all replicas together; `replicas` has each, or None for one that does not run."""
        return _combined([client.stats() if client is not None else None for client in self._clients], self.device_kind)

    def sequence_counts(self) -> tuple[int, int]:
        """As `EngineClient.sequence_counts`, summed."""
        counts = [client.sequence_counts() for client in self._running()]
        return sum(running for running, _ in counts), sum(waiting for _, waiting in counts)

    def busy_times(self) -> tuple[float, float]:
        """As `EngineClient.busy_times`, summed."""
        times = [client.busy_times() for client in self._running()]
        return sum(busy for busy, _ in times), sum(idle for _, idle in times)

    def _running(self) -> list[EngineClient]:
        return [client for client in self._clients if client is not None]

    def _in_order(self, prompt: Sequence[int], cache_salt: str | None) -> list[EngineClient]:
        """The replicas that may get a request, the best one first."""
        clients = [client for client in self._running() if client.is_ready]
        loads = {client: client.num_live for client in clients}
        most = 2 * min(loads.values(), default=0) + _MORE_SEQUENCES
        data = token_bytes(prompt)

        def rank(client: EngineClient) -> tuple[bool, int, int]:
            return loads[client] > most, -client.num_cached_tokens(data, cache_salt), loads[client]

        return sorted(clients, key=rank)

    def _build_one(self, index: int) -> EngineClient:
        number = self._num_built
        self._num_built += 1
        to_build = max(1, self._size - number)
        return self._build(self.config, Replica(index, number, lambda: self._failed.put(index), to_build))

    def _rebuild_failed(self) -> None:
        """The thread that builds failed replicas anew, one after the other."""
        while (index := self._failed.get()) is not None:
            try:
                self._rebuild(index)
            except Exception as error:
                logger.critical("replica %d cannot be built anew and is given up", index, exc_info=error)
                self._given_up[index] = error

    def _rebuild(self, index: int) -> None:
        error = self._let_go(index)
        if self._stopped:
            return
        if not self._may_restart(index):
            logger.critical("replica %d failed too often and is given up: %s", index, error)
            self._given_up[index] = error
            return
        logger.error("replica %d failed and is built anew; the others go on: %s", index, error)
        client = self._build_one(index)
        with self._lock:
            stopped = self._stopped
            if not stopped:
                self._clients[index] = client
            if self._draining:
                client.start_draining()
        if stopped:
            client.shutdown()
            return
        logger.info("replica %d is back", index)
        if self._pinned is not None and client.is_ready:
            try:
                client.pin_prompt(self._pinned)
            except EngineStoppedError as error:  # its failure, if it is one, is in the queue already
                logger.warning("replica %d has not kept the pinned prompt: %s", index, error)

    def _let_go(self, index: int) -> BaseException:
        """Frees all that a failed replica has on its devices; its requests have been told when this returns."""
        client = self._clients[index]
        if client is None or client.failure is None:
            raise RuntimeError(f"replica {index} has not failed")
        client.shutdown()
        self._clients[index] = None
        traceback.clear_frames(client.failure.__traceback__)  # they hold the device's arrays
        failure = client.failure
        del client
        gc.unfreeze()  # the engine's process has frozen what was there when it began to serve
        gc.collect()
        return failure

    def _may_restart(self, index: int) -> bool:
        now = time.monotonic()
        failures = [*(at for at in self._failures[index] if now - at < FAILURE_WINDOW_SECONDS), now]
        self._failures[index] = failures
        return len(failures) <= MAX_RESTARTS

    def _shut_down_clients(self) -> None:
        for client in self._running():
            client.shutdown()


def start_engine(config: EngineConfig, build: BuildReplica) -> EngineClient | ReplicatedEngine:
    """As many replicas as the configuration asks for; a single one is an engine by itself."""
    return build(config, ONLY_REPLICA) if config.data_parallel_size == 1 else ReplicatedEngine(config, build)


def _combined(replicas: Sequence[EngineStats | None], device_kind: str) -> EngineStats:
    running = [stats for stats in replicas if stats is not None]

    def total(name: str) -> int:
        return sum(getattr(stats, name) for stats in running)

    counts = (
        "num_running", "num_waiting", "num_pages", "num_free_pages", "num_cached_pages", "num_preemptions", "num_steps",
        "prompt_tokens", "cached_prompt_tokens", "generation_tokens", "forced_tokens",
    )  # fmt: skip
    busy, idle, host = (
        sum(getattr(stats, name) for stats in running) for name in ("busy_s", "device_idle_s", "host_s")
    )
    reasons = sorted({reason for stats in running for reason in stats.finished})
    return EngineStats(
        **{name: total(name) for name in counts},  # pyright: ignore[reportArgumentType] - none of them is another field
        finished={reason: sum(stats.finished.get(reason, 0) for stats in running) for reason in reasons},
        uptime_s=max((stats.uptime_s for stats in running), default=0.0),
        last_step_ms=max((stats.last_step_ms for stats in running), default=0.0),
        host_gap=idle / busy if busy else 0.0,
        busy_s=busy,
        device_idle_s=idle,
        host_s=host,
        last_host_ms=max((stats.last_host_ms for stats in running), default=0.0),
        step_times=TimeCounts.sum([stats.step_times for stats in running]),
        host_times=TimeCounts.sum([stats.host_times for stats in running]),
        speculative=SpeculativeStats.sum([stats.speculative for stats in running if stats.speculative is not None]),
        device_kind=device_kind,
        kv_offload=OffloadStats.sum([stats.kv_offload for stats in running if stats.kv_offload is not None]),
        replicas=tuple(replicas),
    )


def _sum(parts: Sequence[Future[int]]) -> Future[int]:
    """The sum of what all parts give; an error of one of them."""
    total: Future[int] = Future()
    total.set_running_or_notify_cancel()  # it cannot be cancelled, as no part can
    lock = threading.Lock()
    missing = len(parts)

    def done(_: Future[int]) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            if missing:
                return
        try:
            total.set_result(sum(part.result() for part in parts))
        except Exception as error:
            total.set_exception(error)

    if not parts:
        total.set_exception(EngineStoppedError("no replica of the engine runs"))
    for part in parts:
        part.add_done_callback(done)
    return total
