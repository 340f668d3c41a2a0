"""Where memory goes: the table, the sizes of each mode, and what is said when it does not fit."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.bench import engine_run
from jaxserve.checkpoint import store
from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.inspection import device_memory
from jaxserve.checkpoint.manifest import read_manifest
from jaxserve.config import EngineConfig, QuantizationConfig
from jaxserve.engine import build
from jaxserve.engine.build import build_dummy_engine, build_engine, make_engine_mesh
from jaxserve.engine.capacity import MemoryShare, plan_limits
from jaxserve.engine.kv_offload import plan_offload
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.memory_plan import MemoryPlan, MemoryUse, OutOfMemoryError
from jaxserve.engine.runner import ModelRunner
from jaxserve.models.kv_cache import kv_bytes_per_token
from jaxserve.models.presets import preset_config
from jaxserve.models.shard_layout import ShardLayout
from jaxserve.progress import NoProgress
from jaxserve.protocol.checkpoint_engine import load_draft, start_checkpoint_engine
from tests.engine.scheduler_harness import make_limits
from tests.tiny_engine import MODEL_CONFIG, tiny_engine, tiny_params

MIB, GIB = 1024**2, 1024**3
PLAN = MemoryPlan(
    device="some card",
    use=MemoryUse(weights=15 * GIB, kv_cache=50 * GIB, slots=GIB // 10, work_space=2 * GIB),
    usable=72 * GIB,
    usable_as="--gpu-memory-utilization 0.9 of the device's",
    limits=make_limits(seqs=64, page_size=16, pages=25_600, max_len=8192),
)


def test_the_table_says_where_it_goes_and_what_it_is_good_for() -> None:
    assert PLAN.table().splitlines() == [
        "memory of each device (some card), GiB:",
        "weights         15.00",
        "KV pages        50.00  25,600 of 16 tokens",
        "slots            0.10  64 sequences at once",
        "work space       2.00  of the largest step, activations included",
        "left             4.90  of 72.00 GiB: --gpu-memory-utilization 0.9 of the device's",
        "the KV cache holds 409,600 tokens: 50 x 8,192, or 64 sequences of 6,400 tokens",
    ]


def test_one_sequence_is_not_told_as_several() -> None:
    alone = dataclasses.replace(PLAN, limits=make_limits(seqs=1, page_size=16, pages=25_600, max_len=8192))
    assert "slots            0.10  1 sequence at once" in alone.table().splitlines()


def test_what_fits_is_told_when_it_does_not() -> None:
    PLAN.check()
    tight = dataclasses.replace(PLAN, usable=60 * GIB)
    with pytest.raises(OutOfMemoryError, match=r"67\.10 GiB of 60\.00 GiB.*use --num-pages 21964 or less"):
        tight.check()
    with pytest.raises(
        OutOfMemoryError, match=r"use less than --max-num-batched-tokens \d+ or --max-num-seqs 64, or a small"
    ):
        dataclasses.replace(PLAN, usable=16 * GIB).check()
    with pytest.raises(OutOfMemoryError, match="use a smaller model, or more devices"):
        dataclasses.replace(PLAN, usable=14 * GIB).check()


def limits_of(**options: Any) -> SchedulerLimits:
    config = EngineConfig(device="cpu", **options)
    return plan_limits(MODEL_CONFIG, config, make_engine_mesh(config), jnp.dtype(jnp.float32))


def test_modes_choose_what_is_left_open() -> None:
    local, interactive, server = (limits_of(mode=mode) for mode in ("local", "interactive", "server"))
    assert [limits.max_num_seqs for limits in (local, interactive, server)] == [4, 1, 8]
    assert [limits.num_pages for limits in (local, interactive, server)] == [8, 8, 64]  # contexts of 128 tokens
    assert {limits.max_model_len for limits in (local, interactive, server)} == {128}
    assert limits_of(mode="interactive", max_num_seqs=3, max_model_len=64).max_num_seqs == 3
    assert limits_of(mode="interactive", max_num_seqs=3, max_model_len=64).num_pages == 4


def test_the_local_cache_is_small_though_the_context_is_long() -> None:
    config = EngineConfig(device="cpu", mode="local")
    long = dataclasses.replace(MODEL_CONFIG, max_position_embeddings=131_072)
    limits = plan_limits(long, config, make_engine_mesh(config), jnp.dtype(jnp.float32))
    assert limits.max_model_len == limits.num_pages * limits.page_size == 8192


class Card:
    """A GPU with so many bytes, all of them JAX's, of which weights (and what else is there) take some."""

    platform = "gpu"
    device_kind = "some card"

    def __init__(self, size: int, in_use: int) -> None:
        self._stats = {"bytes_limit": size, "bytes_in_use": in_use}

    def memory_stats(self) -> dict[str, int]:
        return self._stats


@pytest.fixture(autouse=True)
def jax_takes_whole_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "1.0")


def card_mesh(in_use: float) -> Any:
    """A card of 6 GiB, a share of which is in use."""
    card = np.empty(1, object)
    card[0] = Card(6 * GIB, int(6 * GIB * in_use))
    return SimpleNamespace(devices=card, local_devices=list(card), size=1)


def limits_on_a_card(in_use: float, **options: Any) -> SchedulerLimits:
    """Of `card_mesh`."""
    mesh = card_mesh(in_use)
    long = dataclasses.replace(MODEL_CONFIG, max_position_embeddings=131_072)
    return plan_limits(long, EngineConfig(**options), mesh, jnp.dtype(jnp.float32))


def test_pages_take_what_weights_and_the_largest_step_leave() -> None:
    page_bytes = 16 * 2 * MODEL_CONFIG.num_layers * MODEL_CONFIG.num_kv_heads * MODEL_CONFIG.head_dim * 4
    pages = {share: limits_on_a_card(share, page_size=16).num_pages for share in (0.5, 0.6)}
    for share, num_pages in pages.items():
        left = 0.9 * 6 * GIB - share * 6 * GIB - num_pages * page_bytes
        assert GIB < left < 1.25 * GIB  # for the work of the largest step
    assert (pages[0.5] - pages[0.6]) * page_bytes == pytest.approx(0.6 * GIB, rel=2e-2)
    wider = limits_on_a_card(0.6, page_size=16, max_num_batched_tokens=65_536)
    assert wider.num_pages < pages[0.6]


@pytest.mark.parametrize(
    ("options", "drafts", "num_pages"),
    [
        # The longest sequences that run: 64 of 2048 tokens.
        ({"enable_prefix_caching": False}, False, 64 * 128),
        # With prompts to be found again: what is left beside 3 GiB to spare, rounded to seven binary digits.
        ({"enable_prefix_caching": True}, False, 71 * 1024),
        ({"enable_prefix_caching": True}, True, 100 * 512),
    ],
)
def test_llama_3_70b_in_float8_on_eight_cards_of_80_gib(
    options: dict[str, Any], drafts: bool, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: 60 GiB are JAX's (three quarters), of which 97% are planned with; 9,094,938,624 bytes are weights.

    A step of 1024 tokens and 64 sequences works in 738,197,504 + 131,334,144 bytes and a GiB. A page of 16 tokens takes
    655,360 bytes. So 51,453,562,060 are free, 48,232,336,588 beside what is to spare: 73,596 pages. Llama-3-8B as a draft
    model has 1,137,754,112 bytes of weights and 262,144 of each page: 47,094,582,476 are 51,329 pages of 917,504.
    """
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    model, draft = (
        dataclasses.replace(preset_config(name), quantization=QuantizationConfig("fp8"))
        for name in ("llama-3-70b", "llama-3-8b")
    )
    bfloat16 = jnp.dtype(jnp.bfloat16)
    weights = device_memory(model, 8, "bfloat16").weights
    assert weights == 9_094_938_624
    if drafts:
        weights += 1_137_754_112
        assert device_memory(draft, 8, "bfloat16").weights == 1_137_754_112
    cards = np.empty(8, object)
    cards[:] = [Card(60 * GIB, weights) for _ in range(8)]
    mesh: Any = SimpleNamespace(devices=cards, local_devices=list(cards), size=8)
    config = EngineConfig(
        tensor_parallel_size=8, quantization="fp8", max_model_len=2048, max_num_batched_tokens=1024, **options
    )
    draft_bytes = kv_bytes_per_token(draft, bfloat16) if drafts else 0
    limits = plan_limits(ShardLayout(model, 8).device_config, config, mesh, bfloat16, draft_bytes)
    assert (limits.num_pages, limits.max_num_seqs, limits.max_model_len) == (num_pages, 64, 2048)


def test_a_context_beyond_the_models_is_told(caplog: pytest.LogCaptureFixture) -> None:
    limits_of(max_model_len=MODEL_CONFIG.max_position_embeddings)
    assert "is beyond" not in caplog.text
    limits_of(max_model_len=MODEL_CONFIG.max_position_embeddings + 1)
    assert f"is beyond the {MODEL_CONFIG.max_position_embeddings} tokens" in caplog.text


def test_a_little_more_or_less_that_is_free_changes_no_program() -> None:
    """Each is compiled for a number of pages; a start should find what the last one compiled."""
    assert len({limits_on_a_card(0.52 + little, page_size=16).num_pages for little in (0.0, 1e-5, 1e-4, 5e-4)}) == 1


def test_a_server_keeps_prompts_in_all_that_its_sequences_leave() -> None:
    """Up to 16 times what they need at most; the other modes keep to the one context that they are for."""
    few: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 1, "page_size": 16}
    assert limits_on_a_card(0.1, mode="server", **few).num_pages == 16 * 4
    few = {"max_model_len": 40_960, "max_num_seqs": 4, "page_size": 16}
    page_bytes = 16 * 2 * MODEL_CONFIG.num_layers * MODEL_CONFIG.num_kv_heads * MODEL_CONFIG.head_dim * 4
    limits = limits_on_a_card(0.1, mode="server", **few)
    left = 0.8 * 6 * GIB - limits.num_pages * page_bytes
    assert 3.5 * GIB < left < 4.5 * GIB  # for the work of steps, and more than that
    assert limits.num_pages > 4 * 2560
    assert limits.max_model_len == 40_960
    for mode in ("local", "interactive"):
        assert limits_on_a_card(0.1, mode=mode, **few).num_pages == 2560
    assert limits_on_a_card(0.6, mode="server", **few).num_pages == 4 * 2560  # there is nothing to spare there
    uncached = limits_on_a_card(0.1, mode="server", enable_prefix_caching=False, **few)
    assert uncached.num_pages == 4 * 2560  # more would be of no use


def test_a_card_that_is_full_is_told_with_the_flag_to_change() -> None:
    told = (
        r"the largest step needs 1\.00 GiB beside the weights, a page 8192 bytes, and 0\.60 GiB are there; raise --gpu"
    )
    with pytest.raises(OutOfMemoryError, match=told):
        limits_on_a_card(0.8, page_size=16)
    with pytest.raises(OutOfMemoryError, match=r"and 0\.00 GiB are there; raise --gpu-mem"):
        limits_on_a_card(0.95, page_size=16)
    room = limits_on_a_card(0.73).num_pages * 16
    assert 1000 < room < 100_000
    with pytest.raises(OutOfMemoryError, match=rf"room for {room} tokens, .*use --max-model-len {room} or less"):
        limits_on_a_card(0.73, max_model_len=100_000)
    assert limits_on_a_card(0.73).max_model_len == room  # what was not asked for is cut, which is told


def test_a_step_that_takes_all_is_told_with_the_largest_that_fits() -> None:
    with pytest.raises(OutOfMemoryError, match=r"use --max-num-batched-tokens \d+ or less") as refusal:
        limits_on_a_card(0.6, max_num_batched_tokens=1_000_000)
    fitting = int(str(refusal.value).split("--max-num-batched-tokens ")[1].split()[0])
    assert limits_on_a_card(0.6, max_num_batched_tokens=fitting).num_pages >= 1
    with pytest.raises(OutOfMemoryError, match="--max-num-batched-tokens"):
        limits_on_a_card(0.6, max_num_batched_tokens=fitting + 100)
    with pytest.raises(
        OutOfMemoryError, match=r"use --max-num-seqs and --max-num-batched-tokens \d+ or less"
    ) as refusal:
        limits_on_a_card(0.6, max_num_seqs=1_000_000)
    fitting = int(str(refusal.value).split("--max-num-batched-tokens ")[1].split()[0])
    assert limits_on_a_card(0.6, max_num_seqs=fitting, max_num_batched_tokens=fitting).num_pages >= 1


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match=r"device 'gpu' was asked for, .*CUDA_VISIBLE_DEVICES, or use --device cpu"):
        make_engine_mesh(EngineConfig(device="gpu"))
    for device in ("auto", "cpu"):
        assert make_engine_mesh(EngineConfig(device=device)).devices.flat[0].platform == "cpu"


def test_more_pages_than_there_is_memory() -> None:
    with pytest.raises(OutOfMemoryError, match=r"use --num-pages \d+ at most"):
        limits_of(num_pages=10**12)
    fitting = pages_that_fit_a_card(num_pages=10**9)
    assert limits_on_a_card(0.5, num_pages=fitting).num_pages == fitting


def pages_that_fit_a_card(**options: Any) -> int:
    """What the refusal says of a card that is half full."""
    with pytest.raises(OutOfMemoryError, match=r"use --num-pages \d+ at most, or raise --gpu-mem") as refusal:
        limits_on_a_card(0.5, **options)
    return int(str(refusal.value).split("--num-pages ")[1].split()[0])


def test_host_memory_for_pages_of_a_card_is_not_the_cards(machine: Callable[[int], None]) -> None:
    def limits(gib: float, num_replicas: int = 1) -> SchedulerLimits:
        config = EngineConfig(kv_offload_gib=gib, data_parallel_size=num_replicas, num_pages=64)
        mesh, float32 = card_mesh(0.5), jnp.dtype(jnp.float32)
        offload = plan_offload(MODEL_CONFIG, config, mesh, float32)
        return plan_limits(MODEL_CONFIG, config, mesh, float32, offload=offload, share=MemoryShare(num_replicas))

    machine(8 * GIB)
    assert limits(8).num_pages == limits(4, num_replicas=2).num_pages == 64
    with pytest.raises(
        OutOfMemoryError, match=r"--kv-offload-gib 9 is more than the 8 GiB of host memory .*: use 8 at most"
    ):
        limits(9)
    with pytest.raises(OutOfMemoryError, match=r"the 4 GiB of host memory that are free for each of 2 rep.*: use 4 at"):
        limits(5, num_replicas=2)


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_loaded(
    machine: Callable[[int], None], tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    convert(tiny_model_dir, folder, progress=NoProgress())
    size = device_memory(read_manifest(folder).model_config, 1, "float32").weights
    machine(size - 1)
    monkeypatch.setattr(store, "restore_weights", lambda *arguments: pytest.fail("weights are loaded"))
    refused = r"the weights take 0\.0 GiB .*--dtype bfloat16.*or free memory of this machine"
    config = EngineConfig(device="cpu", dtype="float32")
    with pytest.raises(OutOfMemoryError, match=refused):
        start_checkpoint_engine(folder, None, config, NoProgress())
    with pytest.raises(OutOfMemoryError, match=refused):
        load_draft(folder, config, MODEL_CONFIG, NoProgress(), make_engine_mesh(config))
    with pytest.raises(OutOfMemoryError, match=refused):
        engine_run.start_engine(str(folder), config, NoProgress())
    machine(size + 100 * MIB)
    with pytest.raises(OutOfMemoryError, match=r"use --max-num-batched-tokens \d+ or less"):
        start_checkpoint_engine(
            folder, None, dataclasses.replace(config, max_num_batched_tokens=100_000_000), NoProgress()
        )
    with pytest.raises(OutOfMemoryError, match=r"use --max-model-len \d+ or less"):
        start_checkpoint_engine(folder, None, dataclasses.replace(config, max_model_len=10**9), NoProgress())
    with pytest.raises(
        OutOfMemoryError, match=r"--kv-offload-gib 1 is more than the 0\.\d+ GiB that weights, steps and"
    ):
        start_checkpoint_engine(folder, None, dataclasses.replace(config, kv_offload_gib=1.0), NoProgress())
    with pytest.raises(OutOfMemoryError, match=r"--kv-offload-gib 1e-09 has no room for one KV page"):
        start_checkpoint_engine(folder, None, dataclasses.replace(config, kv_offload_gib=1e-9), NoProgress())


def test_a_device_that_runs_full_while_programs_are_made_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole cache takes 2 pages of 8192 bytes and the device was asked for one of them more."""

    def warm_up(*arguments: object, **options: object) -> None:
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(ModelRunner, "warm_up", warm_up)
    config = EngineConfig(max_model_len=32, max_num_seqs=1, max_num_batched_tokens=4)
    said = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8192 bytes."
    with pytest.raises(
        OutOfMemoryError, match=r"beside the weights and 2 KV pages of 8192 bytes; use --num-pages 1 or"
    ):
        build_engine(MODEL_CONFIG, tiny_params(), config, NoProgress())
    said = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3.50GiB. [tf-allocator-allocation-error='']"
    with pytest.raises(
        OutOfMemoryError, match=r"3\.50 GiB more was asked .*fewer --num-pages than 2, .*batched-tokens 4"
    ):
        build_engine(MODEL_CONFIG, tiny_params(), config, NoProgress())
    said = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        build_engine(MODEL_CONFIG, tiny_params(), config, NoProgress())


def test_what_is_told_at_start_was_measured(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, build.__name__)
    plans: list[MemoryPlan] = []
    check = MemoryPlan.check

    def keep(plan: MemoryPlan) -> None:
        plans.append(plan)
        check(plan)

    monkeypatch.setattr(MemoryPlan, "check", keep)
    with tiny_engine(EngineConfig(max_model_len=32, max_num_seqs=1, max_num_batched_tokens=4), mode="greedy"):
        *_, plan = plans
    assert plan.table() in [record.getMessage() for record in caplog.records]
    assert "the KV cache holds 32 tokens: 1 x 32" in plan.table()
    head_bytes = 2 * MODEL_CONFIG.num_layers * MODEL_CONFIG.num_kv_heads * MODEL_CONFIG.head_dim * 4
    assert plan.use.kv_cache == 32 * head_bytes
    assert plan.use.weights > 4 * MODEL_CONFIG.vocab_size * MODEL_CONFIG.hidden_size
    assert plan.use.work_space > 4 * MODEL_CONFIG.vocab_size  # a row of logits at least


def test_random_weights_that_no_memory_holds_are_refused_before_they_are_made() -> None:
    config = EngineConfig(dtype="float32", load_format="dummy")
    with pytest.raises(OutOfMemoryError, match=r"the weights take 26\d\.\d GiB of each device, .*--quantization"):
        build_dummy_engine(preset_config("llama-3-70b"), config, NoProgress())
