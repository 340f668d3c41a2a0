"""What each kernel takes alone, and where the time of a decode step goes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from jaxserve.bench.floor import Ceiling
from jaxserve.bench.kernel_cases import kernel_cases
from jaxserve.bench.kernels import KernelCase, KernelTime, format_kernels, time_kernel
from jaxserve.bench.load import LoadTimeoutError
from jaxserve.bench.profile import (
    KernelEvent,
    Window,
    busy_seconds,
    format_window,
    profile_decode,
    scope_floors,
    scope_of,
)
from jaxserve.cli.main import build_app
from jaxserve.cli.profile import default_prompts, default_shapes, parse_calls, parse_shapes
from jaxserve.config import EngineConfig
from jaxserve.models.presets import preset_config
from jaxserve.quantization_config import QuantizationConfig
from jaxserve.sharding.mesh import make_mesh
from tests.tiny_engine import MODEL_CONFIG, tiny_engine

CEILING = Ceiling(1e12, 1e15, "table")
BFLOAT16 = jnp.dtype(jnp.bfloat16)


def test_the_cases_count_what_a_call_must_read_and_write() -> None:
    cases = {
        (case.kernel, case.shape): case
        for case in kernel_cases(
            preset_config("llama-3-8b"), BFLOAT16, rows=[1, 64], attention=[(8, 1024)], prefill=[256], page_size=16
        )
    }
    assert cases["product qkv", "1 x 4096 x 6144"].num_bytes == 2 * (4096 * 6144 + 4096 + 6144)
    assert cases["product gate-up", "64 x 4096 x 14336"].num_bytes == 2 * (2 * 4096 * 14336 + 64 * (4096 + 14336))
    assert cases["product gate-up", "64 x 4096 x 14336"].operations == 2 * 64 * 2 * 4096 * 14336
    # 8 rows of 1024 tokens, keys and values of 8 KV heads; queries in and results out of 32 heads.
    assert cases["decode attention", "8 x 1024"].num_bytes == 8 * 1024 * 4096 + 2 * 2 * 8 * 32 * 128
    assert cases["prefill attention", "256"].operations == 4 * (256 * 257 // 2) * 32 * 128
    assert {kernel for kernel, _ in cases} == {
        "product qkv", "product output", "product gate-up", "product down", "product head", "residual add and norm",
        "rounding to float8", "decode attention", "decode attention fp8 KV", "prefill attention", "rope and KV write",
        "sampling greedy", "sampling random", "sampling filtered",
    }  # fmt: skip
    assert cases["decode attention fp8 KV", "8 x 1024"].num_bytes == 8 * 1024 * 2048 + 2 * 2 * 8 * 32 * 128
    assert cases["rounding to float8", "64 x 4096"].num_bytes == 64 * (4096 * 3 + 4)
    assert cases["sampling random", "64 x 128256"].num_bytes == 64 * 128256 * 4


def test_quantized_products_read_fewer_bytes() -> None:
    def bytes_of(name: str) -> dict[str, int]:
        cases = kernel_cases(
            preset_config("llama-3-8b"), BFLOAT16, rows=[1], attention=[], prefill=[], page_size=16,
            quantization=QuantizationConfig.named(name),
        )  # fmt: skip
        return {case.kernel: case.num_bytes for case in cases}

    rows = 2 * (4096 + 6144)
    assert bytes_of("fp8")["product qkv fp8"] == 4096 * 6144 + 4 * 6144 + rows
    # Groups of 128 inputs share a scale of two bytes.
    assert bytes_of("int4")["product qkv int4"] == 4096 * 6144 // 2 + 2 * 6144 * 4096 // 128 + rows
    assert bytes_of("int4")["product head"] == 2 * (4096 * 128256 + 4096 + 128256)


@pytest.mark.parametrize("name", [None, "fp8", "int8", "int4"])
def test_every_kernel_runs_at_its_shape(name: str | None) -> None:
    cases = kernel_cases(
        MODEL_CONFIG, jnp.dtype(jnp.float32), rows=[2], page_size=4,
        attention=[] if name else [(2, 20)], prefill=[] if name else [12],
        quantization=None if name is None else QuantizationConfig.named(name),
    )  # fmt: skip
    for case in cases:
        x, arrays, step = case.make()
        out, _ = jax.jit(step, static_argnums=0)(1, x, arrays)
        assert out.shape == x.shape and out.dtype == x.dtype, case.kernel
        assert bool(jnp.isfinite(out).all()) and bool((out != x).any()), case.kernel


def test_the_sum_over_devices_runs_on_all_of_them() -> None:
    dtype, shapes = jnp.dtype(jnp.float32), {"rows": [2], "attention": [], "prefill": [], "page_size": 4}
    mesh = make_mesh(jax.devices("cpu"), 4)
    [case] = [case for case in kernel_cases(MODEL_CONFIG, dtype, **shapes, mesh=mesh) if "all-reduce" in case.kernel]
    assert case.shape == f"4 x 2 x {MODEL_CONFIG.hidden_size}"
    x, arrays, step = case.make()
    norm, (total, _, _) = jax.jit(step, static_argnums=0)(0, x, arrays)
    expected = x + arrays[0].sum(axis=0)
    assert total.shape == (4, *x.shape)  # of each device
    assert jnp.allclose(total, expected[None], rtol=1e-5) and jnp.allclose(
        norm, expected / jnp.sqrt((expected**2).mean(axis=1, keepdims=True) + 1e-5), rtol=1e-4
    )
    seconds = time_kernel(case, calls=(1, 20)).seconds
    assert math.isnan(seconds) or 0 < seconds < 1


def test_a_kernel_is_timed() -> None:
    case = next(
        iter(kernel_cases(MODEL_CONFIG, jnp.dtype(jnp.float32), rows=[2], attention=[], prefill=[], page_size=4))
    )
    seconds = time_kernel(case, calls=(1, 60)).seconds
    assert math.isnan(seconds) or 0 < seconds < 1


def test_the_table_sets_time_against_the_floor() -> None:
    case = next(
        iter(kernel_cases(preset_config("llama-3-8b"), BFLOAT16, rows=[1], attention=[], prefill=[], page_size=16))
    )
    text = format_kernels([KernelTime(case, 2 * case.num_bytes / 1e12), KernelTime(case, math.nan)], CEILING)
    row, noise = text.splitlines()[1:]
    assert row.split()[-1] == "50%" and row.split()[-4] == "500"
    assert "noise" in noise and noise.endswith("-")
    slow = Ceiling(1e12, 1e9, "table")  # so slow at products that these decide
    assert KernelTime(case, 1.0).floor(slow) == pytest.approx(case.operations / 1e9)


def test_what_is_small_is_told_in_digits_that_say_something() -> None:
    """As on a slow machine, or of a kernel that computes little."""
    case = KernelCase("norm", "1 x 64", 512, 640.0, lambda: pytest.fail("it is not run"))
    row = format_kernels([KernelTime(case, 1e-5)], Ceiling(1e10, 1e12, "measured")).splitlines()[1]
    assert row.split()[-6:] == ["10.0", "0.000512", "0.0512", "6.4e-05", "0.0512", "1%"]
    large = KernelCase("product", "2048 x 4096", 150_000_000, 4.12e11, lambda: pytest.fail("it is not run"))
    row = format_kernels([KernelTime(large, 6e-4)], Ceiling(3e12, 8e14, "table")).splitlines()[1]
    assert row.split()[-6:] == ["600.0", "150", "250", "687", "515", "86%"]


def test_shares_that_only_a_cache_allows_are_told_to_be_such() -> None:
    case = next(
        iter(kernel_cases(preset_config("llama-3-8b"), BFLOAT16, rows=[1], attention=[], prefill=[], page_size=16))
    )
    at_floor, above = KernelTime(case, case.num_bytes / 1e12), KernelTime(case, 0.5 * case.num_bytes / 1e12)
    assert len(format_kernels([at_floor, KernelTime(case, math.nan)], CEILING).splitlines()) == 3
    row, note = format_kernels([above], CEILING).splitlines()[1:]
    assert row.endswith("200%") and note.startswith("above 100%: so small that a cache serves the calls")


def test_what_noise_hid_is_told_as_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.bench.kernels.time_kernel", lambda case, calls: KernelTime(case, math.nan))
    monkeypatch.setattr("jaxserve.bench.floor.device_ceiling", lambda device: CEILING)
    monkeypatch.setattr("jax.devices", lambda: jax.local_devices()[:1])
    shapes = ["--rows", "1", "--attention", "1x16", "--prefill", "16"]
    result = CliRunner().invoke(build_app(), ["bench", "kernels", "llama-3-8b", *shapes])
    assert result.exit_code == 0, result.output
    assert "  product qkv 1 x 4096 x 6144: noise\n" in result.output and "nan" not in result.output


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ([], {"1 x 128", "8 x 128", "16 x 128", "32 x 128", "64 x 128", "128"}),
        (["--attention", "2x300", "--prefill", "300"], {"2 x 300", "300"}),  # what is asked for is done
    ],
)
def test_no_more_tokens_are_timed_unasked_than_the_model_takes(
    options: list[str], shapes: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny one took minutes on a CPU at lengths that it never sees."""
    timed: list[KernelCase] = []

    def time_kernel(case: KernelCase, *, calls: tuple[int, int]) -> KernelTime:
        timed.append(case)
        return KernelTime(case, 1.0)

    monkeypatch.setattr("jaxserve.bench.kernels.time_kernel", time_kernel)
    monkeypatch.setattr("jaxserve.bench.floor.device_ceiling", lambda device: CEILING)
    monkeypatch.setattr("jax.devices", lambda: jax.local_devices()[:1])
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps(MODEL_CONFIG.to_json()))
    result = CliRunner().invoke(build_app(), ["bench", "kernels", str(model), *options])
    assert result.exit_code == 0, result.output
    assert {case.shape for case in timed if "attention" in case.kernel} == shapes


def event(name: str, start: float, duration: float, scope: str = "") -> KernelEvent:
    return KernelEvent(name, scope, start, duration)


def test_kernels_that_overlap_are_busy_once() -> None:
    events = [event("a", 0.0, 2.0), event("b", 1.0, 2.0), event("c", 5.0, 1.0), event("d", 5.2, 0.1)]
    assert busy_seconds(events) == pytest.approx(4.0)
    assert Window(events, 1, 6.0, 400.0).host_gap == pytest.approx(1 / 3)


def test_the_tables_of_a_window_are_of_one_step() -> None:
    events = [event("gemm", 0.0, 0.004, "mlp"), event("gemm", 0.004, 0.004, "mlp"), event("add", 0.008, 0.002)]
    text = format_window(Window(events, 2, 0.010, 400.0), {"mlp": 0.003}, most=10)
    lines = [line.split() for line in text.splitlines()]
    assert lines[0][:6] == ["2", "steps", "in", "10.0", "ms:", "5.000"]
    assert ["4000.0", "3000.0", "75%", "mlp"] in lines
    assert ["1000.0", "-", "-", "(other)"] in lines
    assert ["5000.0", "3000.0", "60%", "all"] in lines
    assert ["4000.0", "3000.0", "75%", "1.0", "mlp", "gemm"] in lines
    assert ["1000.0", "-", "-", "0.5", "-", "add"] in lines


def test_a_window_says_where_its_rows_mean_less_than_they_seem_to() -> None:
    floors = {"mlp": 0.003}
    apart = [event("gemm", 0.0, 0.004, "mlp"), event("add", 0.004, 0.002)]
    text = format_window(Window(apart, 1, 0.010, 400.0), floors, most=10)
    assert "overlap" not in text and "above 100%" not in text
    beside = [event("gemm", 0.0, 0.004, "mlp"), event("add", 0.001, 0.002)]
    text = format_window(Window(beside, 1, 0.010, 400.0), floors, most=10)
    assert (
        "of a step some kernel ran in 4000.0 us, and their times add up to 6000.0 us" in text
        and "above 100%" not in text
    )
    cached = [event("gemm", 0.0, 0.002, "mlp")]
    text = format_window(Window(cached, 1, 0.010, 400.0), floors, most=10)
    assert "150%" in text and "above 100%: so small that a cache serves it" in text and "overlap" not in text


def test_products_that_nothing_tells_apart_are_set_against_the_floors_of_all_their_weights() -> None:
    """As in a GPU's launch graphs: of what has no row of its own."""
    names = ("nvjet_tst_64x8", "gemv2T_kernel_val", "decode_attention_main", "decode_attention_join")
    events = [event(name, 0.001 * place, 0.001, scope_of("", name)) for place, name in enumerate(names)]
    events.append(event("head", 0.010, 0.001, "lm_head"))
    floors = {"qkv": 2e-4, "output": 1e-4, "mlp": 7e-4, "lm_head": 3e-4, "attention": 5e-4}
    lines = [line.split() for line in format_window(Window(events, 1, 0.011, 400.0), floors, most=10).splitlines()]
    assert ["2000.0", "1000.0", "50%", "products"] in lines
    assert ["2000.0", "500.0", "25%", "attention"] in lines
    assert ["5000.0", "1800.0", "36%", "all"] in lines  # each floor once
    assert ["1000.0", "300.0", "30%", "1.0", "lm_head", "head"] in lines
    assert [
        "1000.0",
        "-",
        "-",
        "1.0",
        "attention",
        "decode_attention_join",
    ] in lines  # which of the two reads is not told


def test_kernels_are_put_to_the_paragraph_that_they_belong_to() -> None:
    assert scope_of("jit(forward)/jit(shard_map)/mlp/dot_general", "gemm_fusion") == "mlp"
    assert scope_of("jit(forward)/attention/qkv/dot", "x") == "qkv"
    assert scope_of("", "decode_attention_main") == "attention"
    assert scope_of("", "rope_write_kv_kernel") == "rope_write_kv"
    assert scope_of("", "fusion_3") == ""
    for name in ("nvjet_tst_128x64_h", "cutlass_80_tensorop", "sm90_xmma_gemm_bf16", "gemm_fusion_dot_12", "dot.3",
                 "cublasLt::splitKreduce_kernel", "decode_matmul_kernel"):  # fmt: skip
        assert scope_of("", name) == "products", name
    assert scope_of("", "add_rms_norm_kernel") == "norms"
    assert scope_of("", "ncclDevKernel_AllReduce_Sum_bf16") == "sums over devices"
    assert scope_of("", "all_reduce_add_rms_norm") == "sums over devices"
    assert scope_of("jit(forward)/mlp/dot", "nvjet") == "mlp"  # what the trace tells counts first
    assert scope_of("jit(draft)/draft/while/body/mlp/dot_general", "gemm") == "draft mlp"
    assert scope_of("jit(draft)/draft/while/body", "decode_attention_main") == "draft attention"
    assert scope_of("jit(verify)/verify/argmax", "fusion") == "verify"


def test_the_floors_of_the_paragraphs_sum_to_that_of_the_step() -> None:
    config = preset_config("llama-3-8b")
    floors = scope_floors(config, BFLOAT16, CEILING, batch=8, context=400, num_devices=1)
    assert sum(floors.values()) == pytest.approx((15.01e9 + 8 * 400 * 131072) / 1e12, rel=1e-3)


def test_the_floors_know_what_is_quantized() -> None:
    dense = preset_config("llama-3-8b")
    config = replace(dense, quantization=QuantizationConfig.named("fp8"))
    settings: dict[str, Any] = {"batch": 8, "context": 400, "num_devices": 1}
    wide = scope_floors(dense, BFLOAT16, CEILING, **settings)
    narrow = scope_floors(config, BFLOAT16, CEILING, **settings, cache_dtype=jnp.dtype(jnp.float8_e4m3fn))
    for name in ("qkv", "output", "mlp", "attention"):
        assert narrow[name] == pytest.approx(wide[name] / 2, rel=2e-3), name  # and scales
    assert narrow["lm_head"] == wide["lm_head"]


def test_a_decode_window_of_a_running_engine_is_traced(tmp_path: Path) -> None:
    with tiny_engine(EngineConfig(max_num_seqs=2, max_num_batched_tokens=32), mode="greedy") as engine:
        window = profile_decode(engine, concurrency=2, context=20, num_steps=3, folder=tmp_path)
        with pytest.raises(ValueError, match="do not fit"):
            profile_decode(engine, concurrency=3, context=20, num_steps=3, folder=tmp_path)
        late = "2 sequences from 20 tokens on did not get through 3 steps within 0 s: ask for less"
        with pytest.raises(LoadTimeoutError, match=late):
            profile_decode(engine, concurrency=2, context=20, num_steps=3, folder=tmp_path / "late", timeout=0.0)
    assert window.num_steps >= 3
    assert 20 < window.context < 128
    assert list(tmp_path.rglob("perfetto_trace.json.gz"))
    if jax.default_backend() == "cpu":
        assert window.events, "nothing that XLA ran was found in the trace"


def test_a_window_is_found_where_answers_are_shorter_than_it(tmp_path: Path) -> None:
    config = EngineConfig(max_model_len=26, max_num_seqs=4, max_num_batched_tokens=32)
    with tiny_engine(config, mode="greedy") as engine:
        window = profile_decode(engine, concurrency=4, context=20, num_steps=5, folder=tmp_path, timeout=60.0)
    assert window.num_steps >= 5


def test_arguments() -> None:
    assert default_shapes(8192) == [(1, 1024), (8, 330), (8, 1024), (16, 8192), (32, 1024), (64, 330), (64, 1024)]
    assert default_prompts(8192) == [256, 1024, 4096]
    assert parse_shapes("1x1024,8x330") == [(1, 1024), (8, 330)]
    assert parse_calls("4,24") == (4, 24)
    with pytest.raises(ValueError, match="BATCHxTOKENS"):
        parse_shapes("8")
    with pytest.raises(ValueError, match="two rising numbers"):
        parse_calls("24,4")
