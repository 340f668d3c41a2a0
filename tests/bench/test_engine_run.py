"""Measuring an engine in this process, from its settings to the files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.bench import model_run
from jaxserve.bench.engine_run import (
    ceiling_of,
    devices_of,
    engine_config,
    engine_environment,
    judge_of,
    measure_engine,
    start_engine,
)
from jaxserve.bench.floor import (
    Ceiling,
    device_ceiling,
    operations_per_token,
    prompt_floor_ms,
    step_floor_ms,
    weight_bytes_per_step,
)
from jaxserve.bench.http_comparison import check_packages, compare_over_http, differences
from jaxserve.bench.records import Load, RequestRecord, RunResult, Summary, summarize
from jaxserve.bench.results import find_series, read_series, write_environment, write_one_file
from jaxserve.bench.run import BenchOptions
from jaxserve.bench.workload import load_workload
from jaxserve.cli.bench import _command
from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.client import EngineClient
from jaxserve.models.presets import preset_config
from jaxserve.progress import NoProgress
from jaxserve.speculative_config import SpeculativeConfig
from jaxserve.version import versions
from tests.tiny_engine import MODEL_CONFIG, few_programs, tiny_engine

CEILING = Ceiling(1e9, 1e12, "table")
LOADS = (Load("concurrency", 1), Load("concurrency", 2), Load("rate", 50))
FIXED = BenchOptions(load_workload("fixed:10/12"), LOADS, num_requests=4, timeout=60)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    with tiny_engine(EngineConfig(max_num_seqs=2, max_num_batched_tokens=32), mode="greedy") as started:
        yield started


def measure(engine: EngineClient, options: BenchOptions, folder: Path | None = None) -> tuple[list[str], dict]:
    seen: list[str] = []
    _, results = measure_engine(
        engine, options, ceiling=CEILING, temperature=0.0, folder=folder,
        on_summary=lambda summary: seen.append(summary.load.label),
    )  # fmt: skip
    return seen, results


def test_every_answer_has_the_length_that_was_asked_for(engine: EngineClient) -> None:
    seen, results = measure(engine, FIXED)
    assert seen == ["1", "2", "50/s"]
    for runs in results.values():
        records = runs[0].records
        assert [record.output_tokens for record in records] == [12] * 4
        assert all(record.submitted < record.first_token < record.last_token for record in records)
        for record in records:
            assert sum(record.gaps_ms) / 1e3 == pytest.approx(record.last_token - record.first_token, abs=1e-4)
    assert engine.stats().num_running == 0 or engine.stats().num_waiting == 0


def test_a_run_that_was_interrupted_goes_on_where_it_stopped(engine: EngineClient, tmp_path: Path) -> None:
    write_environment(tmp_path, engine_environment(engine, CEILING, model="tiny", name="tiny", command=["bench"]))
    assert measure(engine, replace(FIXED, loads=LOADS[:1]), tmp_path)[0] == ["1"]
    before = (tmp_path / "concurrency-1.jsonl").read_text()
    (tmp_path / "concurrency-2.jsonl").write_text("")  # written, but its figures were not
    assert measure(engine, FIXED, tmp_path)[0] == ["2", "50/s"]
    assert (tmp_path / "concurrency-1.jsonl").read_text() == before
    series = read_series(tmp_path)
    assert [point.summary.load for point in series.points] == list(LOADS)
    assert [len(point.records) for point in series.points] == [4, 4, 4]
    assert series.environment["settings"]["max_num_seqs"] == 2
    assert {key: series.environment[key] for key in versions()} == versions()
    assert series.name == "tiny" and find_series(tmp_path)[0].name == "tiny"


def test_several_rounds_are_kept_apart(engine: EngineClient) -> None:
    _, results = measure(engine, replace(FIXED, loads=LOADS[1:2], rounds=3))
    assert [record.round for run in results["2"] for record in run.records] == [0] * 4 + [1] * 4 + [2] * 4


def test_what_was_drafted_for_a_load_stands_in_its_summary(engine: EngineClient, tmp_path: Path) -> None:
    """That of the load alone: the short run before it drafted too."""
    assert measure(engine, replace(FIXED, loads=LOADS[:1]))[1]["1"][0].speculation is None
    # Not adaptive: on a busy machine steps with drafts may take so long that none are made.
    speculation = SpeculativeConfig("ngram", 2, prompt_lookup_max=2, prompt_lookup_min=1, adaptive=False)
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=32, speculative_config=speculation)
    options = replace(FIXED, workload=load_workload("fixed:40/40"), loads=LOADS[:1])
    with tiny_engine(config, mode="greedy") as speculating:
        environment = engine_environment(speculating, CEILING, model="tiny", name="tiny", command=["bench"])
        write_environment(tmp_path, environment)
        measure(speculating, options, tmp_path)
        everything = speculating.stats().speculative
    [point] = read_series(tmp_path).points
    drafted = point.summary.speculation
    assert drafted is not None and everything is not None and point.summary.drafts
    assert 0 < drafted.num_draft_tokens < everything.num_draft_tokens and len(drafted.drafted_per_position) == 2


def test_one_file_holds_it_all(engine: EngineClient, tmp_path: Path) -> None:
    summaries, results = measure_engine(
        engine, replace(FIXED, loads=LOADS[:1]), ceiling=CEILING, temperature=0.0, on_summary=lambda summary: None
    )
    write_one_file(tmp_path / "all.json", {"model": "tiny"}, summaries, results)
    data = json.loads((tmp_path / "all.json").read_text())
    assert data["model"] == "tiny" and len(data["requests"]["1"]) == 4
    assert data["summaries"][0]["bandwidth_utilization"] > 0


def test_the_floor_counts_weights_and_live_pages_once() -> None:
    config = preset_config("llama-3-8b")
    bfloat16 = jnp.dtype(jnp.bfloat16)
    assert weight_bytes_per_step(config, bfloat16) == pytest.approx(15.01e9, rel=1e-3)
    h100 = "NVIDIA H100 80GB HBM3"
    alone = step_floor_ms(config, bfloat16, h100, batch=1, context=0, num_devices=1)
    assert alone == pytest.approx(4.857, rel=1e-3)
    full = step_floor_ms(config, bfloat16, h100, batch=64, context=399, num_devices=2)
    assert full == pytest.approx((15.01e9 + 64 * 399 * 131072) / 3.09e12 / 2 * 1e3, rel=1e-3)
    assert step_floor_ms(config, bfloat16, "unknown card", batch=1, context=0, num_devices=1) is None
    known = step_floor_ms(config, bfloat16, "unknown card", batch=1, context=0, num_devices=1, bandwidth=1e12)
    assert known == pytest.approx(15.01, rel=1e-3)


def test_the_floor_of_a_prompt_is_its_weights_or_its_products() -> None:
    config, bfloat16 = preset_config("llama-3-8b"), jnp.dtype(jnp.bfloat16)
    ceiling = Ceiling(3e12, 800e12, "table")
    # 16 tokens: the weights take longest, 15.01 GB; 4096 tokens: 6.98e9 weights below the head, twice each, and attention.
    assert prompt_floor_ms(config, bfloat16, ceiling, tokens=16, num_devices=1) == pytest.approx(5.003, rel=1e-3)
    products = 2 * 6.979e9 * 4096 + 2 * 32 * 4096 * 4096**2
    long = prompt_floor_ms(config, bfloat16, ceiling, tokens=4096, num_devices=2)
    assert long == pytest.approx(products / 800e12 / 2 * 1e3, rel=1e-3)


def test_operations_of_a_token_are_two_a_weight_and_those_of_attention() -> None:
    config = preset_config("llama-3-8b")
    assert operations_per_token(config, 0) == pytest.approx(2 * 7.505e9, rel=1e-3)
    assert operations_per_token(config, 1000) - operations_per_token(config, 0) == 4 * 32 * 32 * 128 * 1000


def test_a_sliding_window_bounds_what_a_token_looks_at() -> None:
    config, bfloat16 = preset_config("llama-3-8b"), jnp.dtype(jnp.bfloat16)
    slides, ceiling = replace(config, sliding_window=1000), Ceiling(3e12, 1.0, "table")  # products take longest
    for context, seen in ((400, 400), (3000, 1000)):
        step, bounded = (
            step_floor_ms(part, bfloat16, "a card", batch=8, context=part_context, num_devices=1, bandwidth=1e12)
            for part, part_context in ((config, seen), (slides, context))
        )
        assert step == bounded
        assert operations_per_token(slides, context) == operations_per_token(config, seen)
    products = [prompt_floor_ms(part, bfloat16, ceiling, tokens=3000, num_devices=1) for part in (config, slides)]
    # 2000 of the tokens look at 1000 each in place of at 1000 to 3000.
    assert products[0] - products[1] == pytest.approx(4 * 32 * 32 * 128 * (2000 * 1000) * 1e3, rel=1e-6)


def test_a_device_that_is_not_in_the_table_is_measured() -> None:
    ceiling = device_ceiling(jax.devices("cpu")[0])
    assert ceiling.origin == "measured"
    assert 1e8 < ceiling.bandwidth < 1e13 and 1e8 < ceiling.matrix_rate < 1e15


def test_devices_that_a_cpu_is_split_into_share_what_it_reaches(
    engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.bench.engine_run.device_ceiling", lambda device: CEILING)
    split = SimpleNamespace(config=replace(engine.config, tensor_parallel_size=2, data_parallel_size=2))
    assert ceiling_of(split) == replace(  # pyright: ignore[reportArgumentType]
        CEILING, bandwidth=CEILING.bandwidth / 4, matrix_rate=CEILING.matrix_rate / 4
    )
    assert ceiling_of(engine) == CEILING


def test_floor_and_compute_are_judged_for_what_ran(engine: EngineClient) -> None:
    workload = load_workload("fixed:10/12")
    records = [RequestRecord(10, 12, 0.0, 0.1, 1.2, index=index) for index in range(2)]
    run = RunResult(records, 1.2, 24.0)
    summary = judge_of(engine, workload, CEILING)(summarize(Load("concurrency", 2), [run]), [run])
    floor = step_floor_ms(
        MODEL_CONFIG, jnp.dtype(jnp.float32), "cpu", batch=2, context=16, num_devices=1, bandwidth=1e9
    )
    assert summary.floor_ms == pytest.approx(floor)
    assert summary.bandwidth_utilization == pytest.approx((floor or 0) / 100)
    tokens_per_second = 20 * (1 + 20 / 24)
    assert summary.compute_utilization == pytest.approx(
        tokens_per_second * operations_per_token(MODEL_CONFIG, 16) / 1e12
    )


@pytest.mark.parametrize(("replicas", "in_flight", "running"), [(1, 2, 2), (1, 400, 2), (2, 3, 3), (2, 400, 4)])
def test_the_floor_is_of_the_requests_that_have_a_slot(
    engine: EngineClient, replicas: int, in_flight: int, running: int
) -> None:
    config = replace(engine.config, data_parallel_size=replicas)  # with two slots each
    run = RunResult([RequestRecord(10, 12, 0.0, 0.1, 1.2, index=index) for index in range(4)], 1.2, 48.0)
    summary = judged(engine, config, Load("concurrency", in_flight), run)
    assert summary.mean_running == running
    assert summary.floor_ms == pytest.approx(floor_of(running / replicas))


@pytest.mark.parametrize(
    ("replicas", "load", "running"),
    [
        (1, Load("concurrency", 3), 3),
        (1, Load("concurrency", 400), 4),
        (2, Load("concurrency", 400), 8),
        (1, Load("rate", 9), 4),  # its records have six at once, of whom two were preempted
    ],
)
def test_the_floor_is_of_the_requests_that_have_pages(
    engine: EngineClient, replicas: int, load: Load, running: int
) -> None:
    """There are slots for more, who wait: with them it was above what steps took."""
    config = with_few_pages(engine.config, data_parallel_size=replicas, enable_prefix_caching=False)
    run = RunResult([RequestRecord(10, 12, 0.0, 0.0, 1.2, index=index) for index in range(6)], 1.2, 72.0)
    summary = judged(engine, config, load, run)
    assert summary.mean_running == pytest.approx(running)
    assert summary.floor_ms == pytest.approx(floor_of(running / replicas))


def test_requests_that_share_pages_read_no_more_of_them_than_there_are(engine: EngineClient) -> None:
    run = RunResult([RequestRecord(10, 12, 0.0, 0.1, 1.2)], 1.2, 12.0)
    config = with_few_pages(engine.config, enable_prefix_caching=True)
    summary = judged(engine, config, Load("concurrency", 20), run)
    assert summary.mean_running == 20  # with pages of their own it could not be
    assert summary.floor_ms == pytest.approx(floor_of(4))


def with_few_pages(config: EngineConfig, **settings: Any) -> EngineConfig:
    """For four sequences of sixteen tokens, the mean length of those that `judged` has, and slots for more."""
    return replace(config, max_num_seqs=32, num_pages=8, page_size=8, **settings)


@pytest.mark.parametrize(("in_flight", "running"), [(1, 1), (2, 1.5), (400, 2)])
def test_under_static_batching_those_that_wait_for_a_batch_to_end_count_for_nothing(
    engine: EngineClient, in_flight: int, running: float
) -> None:
    config = replace(engine.config, static_batching=True)
    # Two at a time: one decodes all the time, one half of it and waits as long.
    records = [RequestRecord(10, 12, 0.0, 0.0, 1.0), RequestRecord(10, 7, 0.0, 0.5, 1.0)]
    summary = judged(engine, config, Load("concurrency", in_flight), RunResult(records, 1.0, 19.0))
    assert summary.mean_running == running
    assert summary.floor_ms == pytest.approx(floor_of(running))


def judged(engine: EngineClient, config: EngineConfig, load: Load, run: RunResult) -> Summary:
    measured = SimpleNamespace(config=config, model_config=engine.model_config, device_kind=engine.device_kind)
    judge = judge_of(measured, load_workload("fixed:10/12"), CEILING)  # pyright: ignore[reportArgumentType]
    return judge(summarize(load, [run]), [run])


def floor_of(batch: float) -> float | None:
    return step_floor_ms(
        MODEL_CONFIG, jnp.dtype(jnp.float32), "cpu", batch=batch, context=16, num_devices=1, bandwidth=1e9
    )


@pytest.mark.parametrize("caches", [False, True])
def test_a_prompt_has_a_floor_where_all_of_it_is_computed(engine: EngineClient, caches: bool) -> None:
    measured = SimpleNamespace(
        config=replace(engine.config, enable_prefix_caching=caches),
        model_config=engine.model_config,
        device_kind=engine.device_kind,
    )
    run = RunResult([RequestRecord(10 + 10 * index, 12, 0.0, 0.1, 1.2, index=index) for index in range(3)], 1.2, 24.0)
    judge = judge_of(measured, load_workload("fixed:10/12"), CEILING)  # pyright: ignore[reportArgumentType]
    floor = prompt_floor_ms(MODEL_CONFIG, jnp.dtype(jnp.float32), CEILING, tokens=20, num_devices=1)
    found = judge(summarize(Load("concurrency", 2), [run]), [run]).ttft_floor_ms
    assert found == (None if caches else pytest.approx(floor))


def test_steps_with_drafts_have_no_floor_for_a_token(engine: EngineClient) -> None:
    speculating = SimpleNamespace(
        config=replace(engine.config, speculative_config=SpeculativeConfig("ngram", 3)),
        model_config=engine.model_config,
        device_kind=engine.device_kind,
    )
    run = RunResult([RequestRecord(10, 12, 0.0, 0.1, 1.2, index=0)], 1.2, 24.0)
    judge = judge_of(speculating, load_workload("fixed:10/12"), CEILING)  # pyright: ignore[reportArgumentType]
    summary = judge(summarize(Load("concurrency", 1), [run]), [run])
    assert summary.floor_ms is None and summary.bandwidth_utilization is None
    assert summary.compute_utilization


@pytest.mark.parametrize("program", ["/opt/venv/jaxserve/__main__.py", "/opt/venv/bin/jaxserve"])
def test_the_command_of_a_run_is_told_as_anybody_would_type_it(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(sys, "argv", [program, "bench", "run", "llama-3-8b", "--name", "two words"])
    assert _command() == ("jaxserve", "bench", "run", "llama-3-8b", "--name", "two words")


def test_a_setting_that_the_engine_does_not_have_is_named() -> None:
    assert engine_config({"max_num_seqs": 3, "page_size": None}) == EngineConfig(max_num_seqs=3)
    with pytest.raises(ValueError, match="has no --warp-drive, --warp-speed"):
        engine_config({"warp_speed": 9, "warp_drive": True})
    assert devices_of(EngineConfig(tensor_parallel_size=4)) == 4


def test_a_workload_of_text_needs_a_server(engine: EngineClient) -> None:
    with pytest.raises(ValueError, match="is sent as text"):
        measure(engine, replace(FIXED, workload=load_workload("json-schema")))


def test_a_workload_of_text_is_no_hindrance_to_what_comes_over_http(engine: EngineClient, tmp_path: Path) -> None:
    options = BenchOptions(workload=load_workload("json-schema"), loads=LOADS[:1])
    run = model_run.ModelRun("tiny", "tiny", (), options, 0.5, lambda summary: None, tmp_path, loads_in_process=False)
    measured = model_run.measure(engine, run)
    assert measured.summaries == [] and measured.environment["workload"] == "json-schema"
    assert measured.environment["traffic"] == {"num_requests": None, "rounds": 1, "temperature": 0.5}


def test_a_trace_load_needs_arrival_times() -> None:
    with pytest.raises(ValueError, match="has no arrival times"):
        BenchOptions(load_workload("fixed:1/1"), (Load("trace", 1),))


def test_a_checkpoint_is_measured_with_its_own_weights(tiny_model_dir: Path) -> None:
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)
    with few_programs("greedy"):
        engine = start_engine(str(tiny_model_dir), config, NoProgress())
    try:
        assert engine.model_config.hidden_size == 64
        assert engine.model_config.eos_token_ids  # of the checkpoint; random weights have none
    finally:
        engine.shutdown()


def test_over_http_the_same_engine_gives_whole_answers_and_a_difference(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    config = ModelConfig(**{**MODEL_CONFIG.to_json(), "vocab_size": 300, "eos_token_ids": ()})
    with few_programs("greedy"):
        engine = start_engine(
            _written(tmp_path, config), EngineConfig(max_num_seqs=2, max_num_batched_tokens=32), NoProgress()
        )
    options = replace(FIXED, loads=LOADS[1:2])
    try:
        summaries, results = measure_engine(
            engine, options, ceiling=CEILING, temperature=0.0, on_summary=lambda summary: None
        )
        measured = model_run.Measured({"name": "tiny"}, CEILING, summaries, results)
        text, over_http = compare_over_http(
            engine, options, measured, temperature=0.0, client="own", client_processes=1,
            on_summary=lambda summary: None, folder=tmp_path, file=tmp_path / "all.json",
        )  # fmt: skip
    finally:
        engine.shutdown()
    records = read_series(tmp_path / "http").points[0].records
    assert [record.output_tokens for record in records] == [12] * 4
    assert text.splitlines()[-1].startswith("over HTTP at 2: TPOT ")
    both = json.loads((tmp_path / "all.json").read_text())
    assert both["name"] == "tiny" and both["http"]["name"] == "tiny over HTTP" and both["http"]["transport"] == "http"
    for part in (both, both["http"]):
        assert [Summary.from_json(summary).load for summary in part["summaries"]] == [LOADS[1]]
        assert [record["output_tokens"] for record in part["requests"]["2"]] == [12] * 4
    assert both["summaries"][0] == summaries[0].to_json() != both["http"]["summaries"][0] == over_http[0].to_json()


def _written(folder: Path, config: ModelConfig) -> str:
    (folder / "model.json").write_text(json.dumps(config.to_json()))
    return str(folder / "model.json")


def test_what_http_adds_is_told_load_by_load() -> None:
    def summary(tpot: float) -> object:
        record = RequestRecord(1, 11, 0.0, 0.01, 0.01 + 10 * tpot)
        return summarize(Load("concurrency", 4), [RunResult([record], 1.0, 10.0)])

    [line] = differences([summary(0.005)], [summary(0.0051)])  # type: ignore[list-item]
    assert line.startswith("over HTTP at 4: TPOT +2.0% (5.00 -> 5.10 ms), TTFT +0.0 ms")


def test_packages_that_http_needs_are_named_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("uvicorn", "openai") else object())
    with pytest.raises(RuntimeError, match=r"pip install uvicorn$"):
        check_packages()
    with pytest.raises(RuntimeError, match=r"pip install uvicorn openai$"):
        check_packages("openai")
