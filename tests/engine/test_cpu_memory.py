"""What an engine takes of a CPU's memory, which is the host's, the other engines' and other programs' too."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine import build
from jaxserve.engine.build import build_engine, make_engine_mesh
from jaxserve.engine.capacity import MemoryShare, plan_limits
from jaxserve.engine.client import EngineClient, Replica
from jaxserve.engine.kv_offload import plan_offload
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.memory_plan import OutOfMemoryError
from jaxserve.engine.replicas import ReplicatedEngine
from jaxserve.progress import NoProgress
from jaxserve.sampling_params import SamplingParams
from tests.tiny_engine import MODEL_CONFIG, Answer, few_programs, tiny_engine, tiny_params

MIB, GIB = 1024**2, 1024**3

LONG = dataclasses.replace(MODEL_CONFIG, max_position_embeddings=131_072)  # of 512 bytes a token: 64 MiB
STEP_BYTES = 256 * 2048 + 8 * 2560  # of the 256 tokens and 8 sequences that a CPU's steps have at most, by hand


def limits_on_a_cpu(**options: Any) -> SchedulerLimits:
    config = EngineConfig(device="cpu", **options)
    return plan_limits(LONG, config, make_engine_mesh(config), jnp.dtype(jnp.float32))


def test_pages_on_a_cpu_leave_most_of_the_memory_to_others(machine: Callable[[int], None]) -> None:
    """A quarter of what is free beside a step, and a GiB at most."""
    assert limits_on_a_cpu().num_pages * 16 * 512 == pytest.approx((64 * MIB - STEP_BYTES) / 4, rel=0.02)
    machine(1000 * GIB)
    assert limits_on_a_cpu(max_num_seqs=100).num_pages * 16 * 512 == GIB


def test_a_context_that_is_asked_for_is_held_by_a_cpu_that_has_the_memory(machine: Callable[[int], None]) -> None:
    model = dataclasses.replace(LONG, max_position_embeddings=4 * 2**20)  # 2 GiB

    def context(**options: Any) -> int:
        config = EngineConfig(device="cpu", **options)
        return plan_limits(model, config, make_engine_mesh(config), jnp.dtype(jnp.float32)).max_model_len

    machine(8 * GIB)
    assert context(mode="interactive") == context(max_model_len=4 * 2**20) == 4 * 2**20
    assert context() == 2**21  # a GiB: nobody asked
    machine(GIB)
    fitting = context(mode="interactive")
    assert fitting * 512 == pytest.approx(0.75 * GIB, rel=0.02)
    with pytest.raises(
        OutOfMemoryError, match=rf"use --max-model-len {fitting} or less, or free memory of this machine"
    ):
        context(mode="interactive", max_model_len=4 * 2**20)
    assert context(mode="interactive", max_model_len=fitting) == fitting


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"page_size": 10**8, "max_model_len": 10**6}, "--page-size"),
        ({"max_num_batched_tokens": 10**8}, "--max-num-batched-tokens"),
        ({"max_num_batched_tokens": 10**8, "num_pages": 8}, "--max-num-batched-tokens"),
        ({"max_num_seqs": 10**6, "max_num_batched_tokens": 10**6}, "--max-num-seqs and --max-num-batched-tokens"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_what_a_cpu_has_no_memory_for_is_told_with_the_largest_that_fits(options: dict[str, Any], option: str) -> None:
    with pytest.raises(OutOfMemoryError, match=rf"use {option} \d+ (or less|at most)") as refusal:
        limits_on_a_cpu(**options)
    assert "gpu" not in str(refusal.value)
    assert "-" not in str(refusal.value).split("; use")[0]
    fitting = int(str(refusal.value).split(f"{option} ")[1].split()[0])
    changed = {name: fitting for name in options if f"--{name.replace('_', '-')}" in option}
    options = {**options, **changed}
    options.pop("max_model_len", None)
    assert limits_on_a_cpu(**options).num_pages >= 1
    with pytest.raises(OutOfMemoryError):
        limits_on_a_cpu(**{**options, **dict.fromkeys(changed, fitting + fitting // 50 + 1)})


@pytest.mark.usefixtures("machine")
def test_pages_that_a_cpu_has_no_memory_for_are_told_with_those_that_leave_others_some() -> None:
    """Three quarters of what is free, as planning takes; who asks for more gets that too, as long as it is there."""
    with pytest.raises(
        OutOfMemoryError, match=r"use --num-pages \d+ at most, which leaves other programs a quarter"
    ) as no:
        limits_on_a_cpu(num_pages=10**6)
    fitting = int(str(no.value).split("--num-pages ")[1].split()[0])
    assert fitting * 16 * 512 == pytest.approx(0.75 * (64 * MIB - STEP_BYTES), abs=16 * 512)
    assert limits_on_a_cpu(num_pages=fitting).num_pages == fitting
    with pytest.raises(OutOfMemoryError):
        limits_on_a_cpu(num_pages=fitting * 4 // 3 + 2)


@pytest.mark.usefixtures("machine")
def test_of_two_settings_that_are_too_large_one_is_told_after_the_other() -> None:
    with pytest.raises(OutOfMemoryError, match=r"use --max-num-batched-tokens \d+ or less"):
        limits_on_a_cpu(max_num_batched_tokens=10**8, num_pages=10**6)
    with pytest.raises(OutOfMemoryError, match=r"use --num-pages \d+ at most"):
        limits_on_a_cpu(num_pages=10**6)


def test_what_is_left_on_a_cpu_is_left_by_others_too(
    machine: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, build.__name__)
    machine(2 * GIB)
    with tiny_engine(EngineConfig(max_model_len=32, max_num_seqs=1, max_num_batched_tokens=4), mode="greedy"):
        assert "left             2.00  of 2.00 GiB: what other programs leave of the machine's memory" in caplog.text


def limits_with_host_memory(gib: float, num_replicas: int = 1, **options: Any) -> SchedulerLimits:
    config = EngineConfig(device="cpu", kv_offload_gib=gib, data_parallel_size=num_replicas, **options)
    mesh, float32 = make_engine_mesh(config), jnp.dtype(jnp.float32)
    offload = plan_offload(LONG, config, mesh, float32)
    return plan_limits(LONG, config, mesh, float32, offload=offload, share=MemoryShare(num_replicas))


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("options", [{}, {"num_pages": 800}, {"max_model_len": 20_001}, {"tensor_parallel_size": 2}])
@pytest.mark.usefixtures("machine")
def test_host_memory_for_pages_is_the_memory_of_a_cpu(options: dict[str, Any], num_replicas: int) -> None:
    """800 pages of 8192 bytes are 6.25 MiB; 20,001 tokens are 9.8 and want a third more beside them."""
    with pytest.raises(OutOfMemoryError, match=r"--kv-offload-gib 0\.07 is more than the 0\.0\d+ GiB that") as refusal:
        limits_with_host_memory(0.07, num_replicas, **options)
    assert ("for each of 2 replicas" in str(refusal.value)) == (num_replicas == 2)
    most = float(re.findall(r"use (\S+) at most", str(refusal.value))[0])
    limits = limits_with_host_memory(most, num_replicas, **options)
    assert limits.num_pages >= options.get("num_pages", 1)
    assert limits.num_pages * 16 >= options.get("max_model_len", 1)
    assert num_replicas * (limits.num_pages * 16 * 512 + most * GIB) <= 64 * MIB
    with pytest.raises(OutOfMemoryError, match="kv-offload-gib"):
        limits_with_host_memory(most + 1e-4, num_replicas, **options)


@pytest.mark.usefixtures("machine")
def test_pages_take_their_part_of_what_host_memory_for_pages_leaves() -> None:
    half = limits_with_host_memory(32 / 1024).num_pages
    assert half * 16 * 512 == pytest.approx(32 * MIB / 4, rel=0.2)
    assert half < limits_on_a_cpu().num_pages


@pytest.mark.usefixtures("machine")
def test_host_memory_that_nothing_is_left_for_is_to_be_left_out() -> None:
    num_pages = limits_on_a_cpu(num_pages=(64 * MIB - 2 * STEP_BYTES) // 8192).num_pages
    with pytest.raises(OutOfMemoryError, match=r"kv-offload-gib 1 is .* use 0\.0\d+ at most"):
        limits_with_host_memory(1, num_pages=num_pages - 500)
    with pytest.raises(OutOfMemoryError, match=r"kv-offload-gib 1 is .*: leave it out, or free memory"):
        limits_with_host_memory(1, num_pages=(64 * MIB - STEP_BYTES) // 8192 - 192)


def test_the_table_counts_host_memory_for_pages(
    machine: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, build.__name__)
    machine(4 * GIB)
    config = EngineConfig(max_model_len=32, max_num_seqs=1, max_num_batched_tokens=4, kv_offload_gib=1.5)
    with tiny_engine(config, mode="greedy"):
        assert re.search(r"^evicted +1\.50  pages in host memory, which is this device's, at most$", caplog.text, re.M)
        assert re.search(r"^left +2\.50  of 4\.00 GiB", caplog.text, re.M)


@pytest.mark.parametrize("options", [{"mode": "interactive"}, {"max_model_len": 2000}, {"kv_offload_gib": 0.0002}])
def test_replicas_share_a_cpus_memory(machine: Callable[[int], None], options: dict[str, Any]) -> None:
    """Each takes its weights and pages of the 4 MiB that are free when the first is built."""
    free = 4 * MIB

    def take(num_bytes: int) -> None:
        nonlocal free
        free -= num_bytes
        machine(free)

    config = EngineConfig(
        device="cpu", data_parallel_size=2, max_num_seqs=1, max_num_batched_tokens=4, seed=0, **options
    )
    weights = sum(array.nbytes for array in jax.tree.leaves(tiny_params()))
    limits: list[SchedulerLimits] = []

    def build_replica(config: EngineConfig, replica: Replica) -> EngineClient:
        build.check_model_fits(LONG, config, make_engine_mesh(config, replica.index), replica)
        take(weights)
        client = build_engine(LONG, tiny_params(), config, NoProgress(), replica)
        limits.append(client.limits)
        take(client.limits.num_pages * 8192)
        return client

    take(0)
    with few_programs("greedy"):
        engine = ReplicatedEngine(config, build_replica)
    try:
        first, second = limits
        assert first == second
        assert first.max_model_len >= (64 if "kv_offload_gib" in options else 1500)
        assert Answer(engine, [5, 6, 7], SamplingParams(max_tokens=2, temperature=0.0)).wait()
        assert free > 0
    finally:
        engine.shutdown()


@pytest.mark.usefixtures("machine")
def test_a_context_that_only_one_of_two_replicas_could_hold_is_refused_by_the_first() -> None:
    assert limits_with_host_memory(0, max_model_len=80_000).max_model_len == 80_000
    with pytest.raises(OutOfMemoryError, match=r"use --max-model-len \d+ or less") as refusal:
        limits_with_host_memory(0, 2, max_model_len=80_000)
    most = int(str(refusal.value).split("--max-model-len ")[1].split()[0])
    assert most * 512 == pytest.approx(0.75 * (32 * MIB - STEP_BYTES), rel=0.02)
    assert limits_with_host_memory(0, 2, max_model_len=most).max_model_len == most
