"""An engine's client over a fake device, and what tests do with it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.client import EngineClient
from jaxserve.engine.request import RequestOutput
from jaxserve.engine.scheduler import Scheduler, SchedulerLimits
from jaxserve.engine.stream import GenerationStream
from tests.engine.fake_device import VOCAB_SIZE, FakeRunner
from tests.engine.scheduler_harness import make_limits

EOS = 31
MODEL_CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8,
    max_position_embeddings=64, eos_token_ids=(EOS,),
)  # fmt: skip
PROMPT = (5, 6, 7)
TIMEOUT = 30.0  # seconds that nothing here comes near


@dataclass
class Gate:
    """Lets the engine fetch steps only while it is open; may make one fail.

    Attributes:
        free_steps: that pass it before.
    """

    opened: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    free_steps: int = 0

    def __call__(self, step: int) -> None:
        assert step < self.free_steps or self.opened.wait(TIMEOUT)
        if self.error is not None:
            raise self.error


@dataclass
class Collected:
    """What a callback was given."""

    outputs: queue.SimpleQueue[RequestOutput] = field(default_factory=queue.SimpleQueue)

    def __call__(self, output: RequestOutput) -> None:
        self.outputs.put(output)

    def all(self, choices: int = 1) -> list[RequestOutput]:
        """Every output until each choice has ended."""
        collected: list[RequestOutput] = []
        while sum(output.finish_reason is not None for output in collected) < choices:
            collected.append(self.outputs.get(timeout=TIMEOUT))
        return collected

    def tokens(self) -> list[int]:
        return [token for output in self.all() for token in output.token_ids]


@contextmanager
def engine(
    limits: SchedulerLimits | None = None,
    config: EngineConfig | None = None,
    gate: Callable[[int], None] = lambda step: None,
    model_config: ModelConfig = MODEL_CONFIG,
) -> Iterator[EngineClient]:
    limits = limits or make_limits()
    client = EngineClient(
        config=config or EngineConfig(seed=0),
        model_config=model_config,
        scheduler=Scheduler(limits),
        runner=FakeRunner(limits, gate),
        device_kind="fake",
    )
    client.start()
    with ExitStack() as stack:
        stack.callback(client.shutdown)
        yield client


def until(condition: Callable[[], bool]) -> None:
    """Waits for the engine thread's counters, which nothing announces."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def is_idle(client: EngineClient) -> bool:
    stats = client.stats()
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_pages == stats.num_pages


async def read(stream: GenerationStream) -> list[RequestOutput]:
    return [output async for output in stream]
