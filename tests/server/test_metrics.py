"""What /metrics tells: every name, and times that are the engine's, not a slow reader's."""

from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.engine.host_pages import OffloadStats
from jaxserve.protocol.observer import RequestCourse
from jaxserve.protocol.prompts import PromptBuilder
from jaxserve.server.metrics import Metrics
from jaxserve.server.slot import ServiceSlot
from tests.fakes import MODEL_NAME, FakeEngine, FakeStats, fake_service, say
from tests.server.harness import USER, client_of


def values(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of an exposition, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    return values(text)[(name, tuple(sorted(labels.items())))]


COURSE = RequestCourse(
    outcomes=("stop", "length"), prompt_tokens=7, completion_tokens=12, cached_tokens=4, total=2.0, queued=0.25,
    prefill=0.5, decode=1.25,
)  # fmt: skip


def test_a_request_s_course_is_told_in_every_histogram() -> None:
    metrics = Metrics(ServiceSlot())
    metrics.first_token(0.75)
    metrics.next_tokens(0.03, 3)
    metrics.finished(COURSE)
    text = metrics.exposition().decode()
    sums = {
        "time_to_first_token_seconds": 0.75, "e2e_request_latency_seconds": 2.0, "request_queue_time_seconds": 0.25,
        "request_prefill_time_seconds": 0.5, "request_decode_time_seconds": 1.25,
        "request_inference_time_seconds": 1.75, "request_time_per_output_token_seconds": 0.25,
        "request_prompt_tokens": 7, "request_generation_tokens": 12,
    }  # fmt: skip
    for name, expected in sums.items():
        assert value(text, f"jaxserve:{name}_sum") == expected
        assert value(text, f"jaxserve:{name}_count") == 1
    assert value(text, "jaxserve:inter_token_latency_seconds_count") == 3
    assert value(text, "jaxserve:inter_token_latency_seconds_bucket", le="0.0075") == 0
    assert value(text, "jaxserve:inter_token_latency_seconds_bucket", le="0.015") == 3
    assert value(text, "jaxserve:inter_token_latency_seconds_sum") == pytest.approx(0.03)
    assert value(text, "jaxserve:request_success_total", finished_reason="stop") == 1
    assert value(text, "jaxserve:prefix_cache_queries_total") == 7
    assert value(text, "jaxserve:prefix_cache_hits_total") == 4


def test_a_request_that_never_ran_has_no_times_of_running() -> None:
    metrics = Metrics(ServiceSlot())
    metrics.finished(
        RequestCourse(
            outcomes=("abort",),
            prompt_tokens=7,
            completion_tokens=0,
            cached_tokens=0,
            total=2.0,
            queued=None,
            prefill=None,
            decode=None,
        )
    )
    text = metrics.exposition().decode()
    for name in ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"):
        assert value(text, f"jaxserve:{name}_count") == 0
    assert value(text, "jaxserve:e2e_request_latency_seconds_count") == 1


VLLM_S_NAMES = {  # written out: what a dashboard reads must not change with the list that the server keeps
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits",
    "prompt_tokens", "generation_tokens", "num_preemptions", "request_success", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
}  # fmt: skip


def test_common_metrics_have_vllm_s_names_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(say("x"))
    drafts = SpeculativeStats("ngram", 0, (0,), (0,))
    monkeypatch.setattr(engine, "stats", lambda: FakeStats(num_running=0, num_waiting=0, speculative=drafts))
    metrics = Metrics(ServiceSlot(fake_service(engine)))
    metrics.finished(COURSE)
    text = metrics.exposition().decode()
    families = {family.name for family in text_string_to_metric_families(text)}
    assert {name for name in families if name.startswith("vllm:")} == {f"vllm:{name}" for name in VLLM_S_NAMES}
    labels = {"model_name": MODEL_NAME, "engine": "0"}
    assert value(text, "vllm:e2e_request_latency_seconds_sum", **labels) == 2.0
    assert value(text, "vllm:request_success_total", finished_reason="length", **labels) == 1
    assert value(text, "vllm:kv_cache_usage_perc", **labels) == 0.0


@pytest.mark.anyio
async def test_times_start_when_the_request_has_been_received(monkeypatch: pytest.MonkeyPatch) -> None:
    build = PromptBuilder.chat

    def build_slowly(*arguments: Any, **keywords: Any) -> list[int]:
        time.sleep(0.2)
        return build(*arguments, **keywords)

    monkeypatch.setattr(PromptBuilder, "chat", build_slowly)
    async with client_of(FakeEngine(say("x"))) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": [USER]})
        assert answer.status_code == 200
        text = (await client.get("/metrics")).text
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "e2e_request_latency_seconds"):
        assert value(text, f"jaxserve:{name}_sum") >= 0.2


def test_replicas_are_told_apart_by_a_label() -> None:
    parts = (
        FakeStats(num_running=2, num_waiting=0, generation_tokens=5),
        None,
        FakeStats(num_running=1, num_waiting=0),
    )
    service = fake_service(FakeEngine(say("a"), replicas=parts))
    text = Metrics(ServiceSlot(service)).exposition().decode()
    assert [value(text, "jaxserve:replica_up", engine=str(index)) for index in range(3)] == [1, 0, 1]
    assert value(text, "jaxserve:num_requests_running", engine="0") == 2
    assert value(text, "jaxserve:num_requests_running", engine="2") == 1
    assert value(text, "jaxserve:generation_tokens_total", engine="0") == 5
    assert value(text, "vllm:num_requests_running", engine="2", model_name=MODEL_NAME) == 1
    assert value(text, "jaxserve:engine_step_seconds_count", engine="0") == 0
    running = [name for name in values(text) if name[0] == "jaxserve:num_requests_running"]
    assert len(running) == 2  # none of the one that does not run, and no sum beside them


def test_pages_in_host_memory_are_told_where_there_are_any() -> None:
    offload = OffloadStats(num_places=9, num_used=4, num_stored=7, num_restored=3, num_dropped=2, hit_tokens=48)
    parts = FakeStats(num_running=0, num_waiting=0), FakeStats(num_running=0, num_waiting=0, kv_offload=offload)
    text = Metrics(ServiceSlot(fake_service(FakeEngine(say("a"), replicas=parts)))).exposition().decode()
    assert value(text, "jaxserve:kv_offload_pages", engine="1") == 4
    for name, expected in (("stored_pages", 7), ("restored_pages", 3), ("dropped_pages", 2), ("hit_tokens", 48)):
        assert value(text, f"jaxserve:kv_offload_{name}_total", engine="1") == expected
    assert not [name for name in values(text) if "kv_offload" in name[0] and ("engine", "0") in name[1]]


def test_drafts_are_told_by_method_and_position_under_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(say("a"))
    drafts = SpeculativeStats("ngram", 10, drafted_per_position=(10, 10, 10), accepted_per_position=(9, 5, 3))
    stats = FakeStats(num_running=0, num_waiting=0, speculative=drafts)
    monkeypatch.setattr(engine, "stats", lambda: stats)
    text = Metrics(ServiceSlot(fake_service(engine))).exposition().decode()
    for name, expected in (("drafts", 10), ("draft_tokens", 30), ("accepted_tokens", 17)):
        assert value(text, f"jaxserve:spec_decode_num_{name}_total", method="ngram") == expected
        assert (
            value(text, f"vllm:spec_decode_num_{name}_total", method="ngram", engine="0", model_name=MODEL_NAME)
            == expected
        )
    for name, expected in (("draft", [10, 10, 10]), ("accepted", [9, 5, 3])):
        counter = f"jaxserve:spec_decode_num_{name}_tokens_per_pos_total"
        assert [value(text, counter, method="ngram", position=str(position)) for position in range(3)] == expected
