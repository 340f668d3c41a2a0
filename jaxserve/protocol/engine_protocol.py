"""What the protocol needs of an engine. `EngineClient` has this shape, and so has the tests' fake.

Naming it here keeps the text side free of jax: importing the protocol or the server never initialises a device.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from jaxserve.config import ModelConfig
from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.engine.host_pages import OffloadStats
from jaxserve.engine.request import RequestOutput
from jaxserve.engine.time_histogram import TimeCounts
from jaxserve.sampling_params import SamplingParams


class TokenStream(Protocol):
    """The outputs of one request, all choices interleaved; ends after every choice has finished."""

    @property
    def request_id(self) -> str: ...
    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    def abort(self, index: int | None = None) -> None:
        """Ends choice `index` (None: all of them); each yields a last output with finish_reason "abort"."""
        ...

    async def aclose(self) -> None:
        """Aborts whatever still runs."""
        ...


class Stats(Protocol):
    """A frozen snapshot of the engine: numbers since its start, and gauges of now."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def num_free_pages(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def generation_tokens(self) -> int: ...
    @property
    def forced_tokens(self) -> int: ...
    @property
    def finished(self) -> Mapping[str, int]: ...
    @property
    def uptime_s(self) -> float: ...
    @property
    def last_step_ms(self) -> float: ...
    @property
    def host_gap(self) -> float: ...
    @property
    def busy_s(self) -> float: ...
    @property
    def device_idle_s(self) -> float: ...
    @property
    def host_s(self) -> float: ...
    @property
    def last_host_ms(self) -> float: ...
    @property
    def step_times(self) -> TimeCounts: ...
    @property
    def host_times(self) -> TimeCounts: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def kv_offload(self) -> OffloadStats | None:
        """Of KV pages in host memory; None: none are kept there."""
        ...

    @property
    def speculative(self) -> SpeculativeStats | None:
        """Of drafts; None: the engine makes none."""
        ...

    @property
    def replicas(self) -> Sequence[Stats | None]:
        """Of each of several engines behind this one; None: it does not run. Empty where it is one."""
        ...


class Engine(Protocol):
    """Takes token ids, gives token ids; safe to call from any thread but `submit`, which needs a running event loop."""

    @property
    def model_config(self) -> ModelConfig: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def failure(self) -> BaseException | None: ...
    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> TokenStream:
        """Queues a request.

        Args:
            cache_salt: only requests with the same one share what is computed of prompts.
            priority: a smaller one goes first, where the engine schedules by priority.

        Raises:
            RequestError: it can never be served; QueueFullError: not now; EngineStoppedError: not by this engine.
        """
        ...

    def flush_prefix_cache(self) -> Future[int]:
        """Forgets what is kept of prompts that nobody uses now; the result is how many KV pages that frees."""
        ...

    def pin_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Computes a prompt and keeps its KV pages, for as long as others can be given up. Blocks.

        Raises:
            RequestError: it is too long; EngineStoppedError: the engine ended meanwhile.
        """
        ...

    def stats(self) -> Stats: ...
    def start_draining(self) -> None: ...
    async def wait_drained(self, timeout: float) -> bool: ...
    def shutdown(self) -> None: ...
