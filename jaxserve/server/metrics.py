"""Prometheus metrics, named as vLLM names its own: under the prefix `jaxserve:`, and the common ones as `vllm:` as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.engine.host_pages import OffloadStats
from jaxserve.engine.time_histogram import TimeCounts, TimeHistogram
from jaxserve.protocol.engine_protocol import Stats
from jaxserve.protocol.observer import RequestCourse
from jaxserve.server.slot import ServiceSlot

PREFIX = "jaxserve:"
ALIAS_PREFIX = "vllm:"

# What dashboards and autoscalers written for vLLM read, as the metric families are called (counters without `_total`).
ALIASED = frozenset({
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits",
    "prompt_tokens", "generation_tokens", "num_preemptions", "request_success", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
})  # fmt: skip

_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_NEXT_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
)  # fmt: skip
_ENGINE_TIMES: tuple[tuple[str, str, Callable[[Stats], TimeCounts]], ...] = (
    ("engine_step_seconds", "Duration of the engine's steps.", lambda stats: stats.step_times),
    ("engine_host_step_seconds", "What the host took to schedule and launch a step.", lambda stats: stats.host_times),
)
_REPLICA_LABEL = "engine"
_TOKEN_COUNT_BUCKETS = tuple(2**power for power in range(18))


class Metrics:
    """Counts and times requests (see `ObservedRequest`), and reads the rest off the engine when it is scraped.

    Each app has a registry of its own: two apps in one process do not add up.
    """

    def __init__(self, slot: ServiceSlot) -> None:
        self._registry = CollectorRegistry()
        self._next_token = TimeHistogram(_NEXT_TOKEN_BUCKETS)  # at every token, where a Histogram would cost too much
        self._registry.register(_EngineCollector(slot))
        self._registry.register(_TimesCollector("inter_token_latency_seconds", "Token to token.", self._next_token))
        self._finished = Counter(
            f"{PREFIX}request_success", "Choices that ended, by reason.", ["finished_reason"], registry=self._registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(reason)
        self._cache_queries = self._counter("prefix_cache_queries", "Prompt tokens that were looked for in KV pages.")
        self._cache_hits = self._counter("prefix_cache_hits", "Prompt tokens whose KV pages were there already.")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time from token to token of a request.", _NEXT_TOKEN_BUCKETS
        )
        self._request = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_BUCKETS)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to the first step.", _REQUEST_BUCKETS)
        self._prefill = self._histogram("request_prefill_time_seconds", "First step to first token.", _REQUEST_BUCKETS)
        self._decode = self._histogram("request_decode_time_seconds", "First token to last.", _REQUEST_BUCKETS)
        self._inference = self._histogram(
            "request_inference_time_seconds", "First step to last token.", _REQUEST_BUCKETS
        )
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKEN_COUNT_BUCKETS)
        self._generation = self._histogram(
            "request_generation_tokens", "Tokens generated for a prompt.", _TOKEN_COUNT_BUCKETS
        )
        self._exposed = CollectorRegistry()
        self._exposed.register(_WithAliases(self._registry, slot))

    def first_token(self, since_arrival: float) -> None:
        self._first_token.observe(since_arrival)

    def next_tokens(self, since_previous: float, count: int) -> None:
        self._next_token.add(since_previous / count, count)

    def finished(self, course: RequestCourse) -> None:
        for outcome in course.outcomes:
            self._finished.labels(outcome).inc()
        self._request.observe(course.total)
        self._prompt.observe(course.prompt_tokens)
        self._generation.observe(course.completion_tokens)
        if course.queued is not None:
            self._cache_queries.inc(course.prompt_tokens)
            self._cache_hits.inc(course.cached_tokens)
            self._queue.observe(course.queued)
        if course.prefill is not None:
            self._prefill.observe(course.prefill)
        if course.decode is not None:
            self._decode.observe(course.decode)
            self._inference.observe(course.decode + (course.prefill or 0.0))
            per_choice = course.completion_tokens / len(course.outcomes)
            if per_choice > 1:
                self._per_token.observe(course.decode / (per_choice - 1))

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._exposed)

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}{name}", description, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, description: str) -> Counter:
        return Counter(f"{PREFIX}{name}", description, registry=self._registry)


class _WithAliases(Collector):
    """The metrics, and after them the common ones once more under vLLM's name, with the labels that vLLM gives them."""

    def __init__(self, registry: CollectorRegistry, slot: ServiceSlot) -> None:
        self._registry = registry
        self._slot = slot

    def collect(self) -> Iterator[Metric]:
        metrics = list(self._registry.collect())
        yield from metrics
        if self._slot.service is None:
            return
        labels = {"model_name": self._slot.service.model_name, "engine": "0"}
        for metric in metrics:
            if metric.name.removeprefix(PREFIX) in ALIASED:
                yield _alias(metric, labels)


def _alias(metric: Metric, labels: dict[str, str]) -> Metric:
    alias = Metric(_alias_name(metric.name), metric.documentation, metric.type)
    alias.samples = [
        Sample(_alias_name(sample.name), {**labels, **sample.labels}, sample.value)
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]
    return alias


def _alias_name(name: str) -> str:
    return ALIAS_PREFIX + name.removeprefix(PREFIX)


class _TimesCollector(Collector):
    """A `TimeHistogram` as a metric."""

    def __init__(self, name: str, description: str, times: TimeHistogram) -> None:
        self._name = name
        self._description = description
        self._times = times

    def collect(self) -> Iterator[Metric]:
        yield _times_family(self._name, self._description, self._times.read())


def _times_family(name: str, description: str, times: TimeCounts) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"{PREFIX}{name}", description, buckets=_buckets(times), sum_value=times.total)


def _buckets(times: TimeCounts) -> list[tuple[str, int]]:
    return [(floatToGoString(bound), count) for bound, count in times.cumulative()]


class _EngineCollector(Collector):
    """The engine's own numbers, at the moment of the scrape; none before the model is loaded."""

    def __init__(self, slot: ServiceSlot) -> None:
        self._slot = slot

    def collect(self) -> Iterator[Metric]:
        if self._slot.service is None:
            return
        stats = self._slot.service.engine.stats()
        if stats.replicas:
            yield from _of_replicas(stats.replicas)
        else:
            yield from _of_one(stats)
        if stats.speculative is not None:
            yield from _of_drafts(stats.speculative)
        device = GaugeMetricFamily(
            f"{PREFIX}device_info", "The device that the model runs on.", labels=["device", "model"]
        )
        device.add_metric([stats.device_kind, self._slot.service.model_name], 1)
        yield device


def _of_one(stats: Stats) -> Iterator[Metric]:
    for name, description, value in _gauges(stats):
        yield GaugeMetricFamily(f"{PREFIX}{name}", description, value=value)
    for name, description, value in _counters(stats):
        yield CounterMetricFamily(f"{PREFIX}{name}", description, value=value)
    for name, description, times in _ENGINE_TIMES:
        yield _times_family(name, description, times(stats))


def _of_drafts(stats: SpeculativeStats) -> Iterator[Metric]:
    """What was drafted and kept, of all replicas together."""
    for name, description, value in (
        ("num_drafts", "Sequences that brought drafts to a step, one for each step.", stats.num_drafts),
        ("num_draft_tokens", "Tokens drafted until the engine ended the answer.", stats.num_draft_tokens),
        ("num_accepted_tokens", "Drafts kept until the engine ended the answer.", stats.num_accepted_tokens),
    ):
        family = CounterMetricFamily(f"{PREFIX}spec_decode_{name}", description, labels=["method"])
        family.add_metric([stats.method], value)
        yield family
    for name, description, counts in (
        ("draft", "Tokens drafted until the engine ended the answer", stats.drafted_per_position),
        ("accepted", "Drafts kept until the engine ended the answer", stats.accepted_per_position),
    ):
        by_position = CounterMetricFamily(
            f"{PREFIX}spec_decode_num_{name}_tokens_per_pos",
            f"{description}, by their place after the last token.",
            labels=["method", "position"],
        )
        for position, value in enumerate(counts):
            by_position.add_metric([stats.method, str(position)], value)
        yield by_position


def _of_replicas(replicas: Sequence[Stats | None]) -> Iterator[Metric]:
    """The same for each, with the label `engine`, that vLLM has too; one that does not run has none but that it is down."""
    up = GaugeMetricFamily(f"{PREFIX}replica_up", "Whether the replica runs.", labels=[_REPLICA_LABEL])
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    histograms = [
        HistogramMetricFamily(f"{PREFIX}{name}", description, labels=[_REPLICA_LABEL])
        for name, description, _ in _ENGINE_TIMES
    ]
    for index, stats in enumerate(replicas):
        label = [str(index)]
        up.add_metric(label, float(stats is not None))
        if stats is None:
            continue
        for family, numbers in ((GaugeMetricFamily, _gauges(stats)), (CounterMetricFamily, _counters(stats))):
            for name, description, value in numbers:
                if name not in families:
                    families[name] = family(f"{PREFIX}{name}", description, labels=[_REPLICA_LABEL])
                families[name].add_metric(label, value)
        for histogram, (_, _, times) in zip(histograms, _ENGINE_TIMES, strict=True):
            histogram.add_metric(label, buckets=_buckets(times(stats)), sum_value=times(stats).total)
    yield from (up, *families.values(), *histograms)


def _gauges(stats: Stats) -> list[tuple[str, str, float]]:
    offload = stats.kv_offload
    used = 1 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0
    return [
        ("num_requests_running", "Sequences that run.", stats.num_running),
        ("num_requests_waiting", "Sequences that wait for a slot or for pages.", stats.num_waiting),
        ("kv_cache_usage_perc", "Share of the KV pages in use; 1 is all of them.", used),
        ("last_step_seconds", "Duration of the engine's last step.", stats.last_step_ms / 1000),
        ("last_host_step_seconds", "What the host took for the engine's last step.", stats.last_host_ms / 1000),
        ("host_gap", "Share of the time with work in which the device waited for the host.", stats.host_gap),
        ("uptime_seconds", "Since the engine was built.", stats.uptime_s),
        *([] if offload is None else [("kv_offload_pages", "KV pages in host memory.", offload.num_used)]),
    ]


def _counters(stats: Stats) -> list[tuple[str, str, float]]:
    return [
        ("prompt_tokens", "Tokens of prompts that were begun.", stats.prompt_tokens),
        ("generation_tokens", "Tokens generated.", stats.generation_tokens),
        ("forced_tokens", "Tokens that grammars forced, which took no step of their own.", stats.forced_tokens),
        ("num_preemptions", "Sequences that gave their pages up for others.", stats.num_preemptions),
        ("engine_steps", "Steps of the engine.", stats.num_steps),
        ("engine_busy_seconds", "Time in which the engine had work.", stats.busy_s),
        ("engine_device_idle_seconds", "Of that, time in which the device waited for the host.", stats.device_idle_s),
        ("engine_host_seconds", "Time that the host took to schedule and launch steps.", stats.host_s),
        *([] if stats.kv_offload is None else _offload_counters(stats.kv_offload)),
    ]


def _offload_counters(offload: OffloadStats) -> list[tuple[str, str, float]]:
    return [
        ("kv_offload_stored_pages", "KV pages that were evicted to host memory.", offload.num_stored),
        ("kv_offload_restored_pages", "KV pages that came back from host memory.", offload.num_restored),
        ("kv_offload_dropped_pages", "KV pages that were evicted for good.", offload.num_dropped),
        ("kv_offload_hit_tokens", "Tokens that were not computed, since their pages came back.", offload.hit_tokens),
    ]
