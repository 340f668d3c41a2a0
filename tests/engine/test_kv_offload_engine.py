"""A real, tiny model whose pages go to host memory gives what it gives without, over several devices and in float8 too."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine import build
from jaxserve.engine.build import make_engine_mesh
from jaxserve.engine.client import EngineClient
from jaxserve.engine.host_pages import OffloadStats
from jaxserve.engine.kv_offload import plan_offload
from jaxserve.engine.memory_plan import OutOfMemoryError
from jaxserve.sampling_params import SamplingParams
from tests.engine.random_traffic import RandomTraffic
from tests.engine.test_prefix_engine import SIZES, shared_requests
from tests.tiny_engine import MODEL_CONFIG, TIMEOUT, Answer, ask, tiny_engine

GIB = 1024**3
PAGE_BYTES = 4 * 2 * MODEL_CONFIG.num_layers * MODEL_CONFIG.num_kv_heads * MODEL_CONFIG.head_dim * 4
HOST_PAGES = 60
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    with tiny_engine(EngineConfig(**SIZES, kv_offload_gib=HOST_PAGES * PAGE_BYTES / GIB), mode="full") as engine:
        yield engine


@pytest.fixture(scope="module")
def plain() -> Iterator[EngineClient]:
    with tiny_engine(EngineConfig(**SIZES, enable_prefix_caching=False), mode="full") as engine:
        yield engine


def offload(engine: EngineClient) -> OffloadStats:
    stats = engine.stats().kv_offload
    assert stats is not None
    return stats


def test_random_traffic_gives_what_it_gives_without(engine: EngineClient, plain: EngineClient) -> None:
    requests = shared_requests(40, seed=3)
    traffic = RandomTraffic(engine, requests, seed=4, pauses=(0, 1, 4, 12), abort_share=0.2, flush_share=0.05)
    stats = offload(engine)
    assert stats.num_restored > 5
    assert stats.num_used <= stats.num_places == HOST_PAGES
    traffic.check(plain)
    engine.flush_prefix_cache().result(TIMEOUT)
    after = engine.stats()
    assert (after.num_free_pages, after.num_cached_pages, offload(engine).num_used) == (after.num_pages, 0, 0)


def fill(engine: EngineClient, first: int) -> None:
    """Takes every page for others' tokens."""
    for number in range(2):
        ask(engine, [first + number] * 60, SamplingParams(max_tokens=3, **GREEDY))


def test_a_prompt_comes_back_whole(engine: EngineClient, plain: EngineClient) -> None:
    prompt, sampling = list(range(3, 44)), SamplingParams(max_tokens=12, **GREEDY)
    expected = ask(plain, prompt, sampling)
    assert ask(engine, prompt, sampling) == expected
    fill(engine, 45)
    before = offload(engine)
    answer = Answer(engine, prompt, sampling)
    assert answer.next().num_cached_tokens == 40
    assert answer.wait()[0] == expected
    after = offload(engine)
    assert after.num_restored - before.num_restored >= 5
    assert after.hit_tokens - before.hit_tokens == 4 * (after.num_restored - before.num_restored)


def test_float8_over_two_devices_comes_back_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, build.__name__)
    few = {**SIZES, "max_num_seqs": 1}
    config = EngineConfig(
        **few, kv_cache_dtype="fp8", tensor_parallel_size=2, kv_offload_gib=HOST_PAGES * PAGE_BYTES / GIB
    )
    prompt, sampling = list(range(3, 44)), SamplingParams(max_tokens=12, **GREEDY)
    with tiny_engine(config, mode="greedy") as engine:
        assert offload(engine).num_places == 4 * HOST_PAGES  # float8 takes a quarter
        expected = ask(engine, prompt, sampling)
        fill(engine, 45)
        assert ask(engine, prompt, sampling) == expected
        assert offload(engine).num_restored >= 5
    (table,) = [record.getMessage() for record in caplog.records if "memory of each device" in record.getMessage()]
    assert re.search(r"^page copies +0\.00  on their way", table, re.MULTILINE)
    assert table.endswith("and 0.00 GiB of host memory 960 tokens of prompts that were here before")


def test_host_memory_that_holds_no_page() -> None:
    def plan(gib: float) -> Any:
        config = EngineConfig(device="cpu", kv_offload_gib=gib)
        return plan_offload(MODEL_CONFIG, config, make_engine_mesh(config), jnp.dtype(jnp.float32))

    assert plan(0.0) is None
    with pytest.raises(OutOfMemoryError, match=r"no room for one KV page of 8192 bytes: use 0\.000008 or more"):
        plan(1e-9)
    assert plan(0.000008).num_places == 1


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"kv_offload_gib=-1.* must be 0 or a number of GiB"):
        EngineConfig(kv_offload_gib=-1.0)
    with pytest.raises(ValueError, match="pages of the prefix cache, and enable_prefix_caching is False"):
        EngineConfig(kv_offload_gib=1.0, enable_prefix_caching=False)
