"""Prometheus metrics, named as vLLM names its own, under the prefix `jaxserve:`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from jaxserve.protocol.engine_protocol import Stats
from jaxserve.protocol.observer import Outcome
from jaxserve.server.slot import ServiceSlot

PREFIX = "jaxserve:"

_FIRST_TOKEN_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_NEXT_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_TOKEN_COUNT_BUCKETS = tuple(2**power for power in range(18))


class Metrics:
    """Counts and times requests (it is a `RequestObserver`), and reads the rest off the engine when it is scraped.

    Each app has a registry of its own: two apps in one process do not add up.
    """

    def __init__(self, slot: ServiceSlot) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(slot))
        self._finished = Counter(
            f"{PREFIX}request_success", "Choices that ended, by reason.", ["finished_reason"], registry=self._registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(reason)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_BUCKETS
        )
        self._next_token = self._histogram(
            "inter_token_latency_seconds", "Token to token of a choice.", _NEXT_TOKEN_BUCKETS
        )
        self._request = self._histogram("e2e_request_latency_seconds", "Arrival to the end.", _REQUEST_BUCKETS)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKEN_COUNT_BUCKETS)
        self._generation = self._histogram(
            "request_generation_tokens", "Tokens generated for a prompt.", _TOKEN_COUNT_BUCKETS
        )

    def first_token(self, since_arrival: float) -> None:
        self._first_token.observe(since_arrival)

    def next_tokens(self, since_previous: float, count: int) -> None:
        for _ in range(count):
            self._next_token.observe(since_previous / count)

    def finished(
        self, outcomes: list[Outcome], since_arrival: float, prompt_tokens: int, completion_tokens: int
    ) -> None:
        for outcome in outcomes:
            self._finished.labels(outcome).inc()
        self._request.observe(since_arrival)
        self._prompt.observe(prompt_tokens)
        self._generation.observe(completion_tokens)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}{name}", description, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    """The engine's own numbers, at the moment of the scrape; none before the model is loaded."""

    def __init__(self, slot: ServiceSlot) -> None:
        self._slot = slot

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        if self._slot.service is None:
            return
        stats = self._slot.service.engine.stats()
        for name, description, value in _gauges(stats):
            yield GaugeMetricFamily(f"{PREFIX}{name}", description, value=value)
        for name, description, value in _counters(stats):
            yield CounterMetricFamily(f"{PREFIX}{name}", description, value=value)
        device = GaugeMetricFamily(
            f"{PREFIX}device_info", "The device that the model runs on.", labels=["device", "model"]
        )
        device.add_metric([stats.device_kind, self._slot.service.model_name], 1)
        yield device


def _gauges(stats: Stats) -> list[tuple[str, str, float]]:
    used = 1 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0
    return [
        ("num_requests_running", "Sequences that run.", stats.num_running),
        ("num_requests_waiting", "Sequences that wait for a slot or for pages.", stats.num_waiting),
        ("kv_cache_usage_perc", "Share of the KV pages in use; 1 is all of them.", used),
        ("last_step_seconds", "Duration of the engine's last step.", stats.last_step_ms / 1000),
        ("host_gap", "Share of the time in which the device waited for the host.", stats.host_gap),
        ("uptime_seconds", "Since the engine was built.", stats.uptime_s),
    ]


def _counters(stats: Stats) -> list[tuple[str, str, float]]:
    return [
        ("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
        ("generation_tokens", "Tokens generated.", stats.generation_tokens),
        ("num_preemptions", "Sequences that gave their pages up for others.", stats.num_preemptions),
        ("engine_steps", "Steps of the engine.", stats.num_steps),
    ]
