"""Every implementation of prefill attention against a float64 reference on the host."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.prefill_attention import prefill_attention
from jaxserve.kernels.prefill_attention_mosaic_gpu import (
    TuningConfig,
    default_config,
    prefill_attention_mosaic_gpu,
    unsupported_reason,
)
from tests.kernels.mosaic_gpu_interpreter import interpret_mosaic_gpu
from tests.kernels.prefill_attention_cases import CASES, Arrays, Case, build, reference, relative_error
from tests.long_cases import named_cases


def run(case: Case, arrays: Arrays) -> np.ndarray:
    """Call the plain-XLA implementation, compiled."""

    def call(arrays: Arrays, layer: jax.Array) -> jax.Array:
        return prefill_attention(
            arrays.q,
            arrays.k_pages,
            arrays.v_pages,
            layer,
            arrays.page_table,
            arrays.query_starts,
            arrays.kv_lens,
            scale=case.scale,
            window=case.window,
            softcap=case.softcap,
            **case.kv_scales,
            implementation="xla",
        )

    out = jax.jit(call)(jax.tree.map(jnp.asarray, arrays), jnp.int32(case.layer))
    assert out.dtype == arrays.q.dtype
    return np.asarray(out).astype(np.float64)


def interpret(case: Case, arrays: Arrays, config: TuningConfig | None, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Call the Hopper kernel in JAX's interpreter, which runs its warpgroups, copies and barriers on the CPU."""
    scales = {name: None if value is None else jnp.float32(value) for name, value in case.kv_scales.items()}
    with interpret_mosaic_gpu(monkeypatch):
        out = prefill_attention_mosaic_gpu(
            jnp.asarray(arrays.q),
            jnp.asarray(arrays.k_pages),
            jnp.asarray(arrays.v_pages),
            jnp.int32(case.layer),
            jnp.asarray(arrays.page_table),
            jnp.asarray(arrays.query_starts),
            jnp.asarray(arrays.kv_lens),
            scale=case.scale,
            window=case.window,
            softcap=case.softcap,
            config=config,
            counts=False,
            **scales,
        )
    assert out.dtype == arrays.q.dtype
    return np.asarray(out).astype(np.float64)


# Between others of their kind that always run.
LONG = (
    "one row",
    "all tokens live",
    "group 1",
    "group 4",
    "head_dim 128",
    "page size 8",
    "page size 32",
    "window of one",
)


@pytest.mark.parametrize("case", named_cases(CASES, LONG))
def test_float32_matches_reference(case: Case) -> None:
    arrays = build(case)
    out = run(case, arrays)
    np.testing.assert_allclose(out, reference(case, arrays), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_matches_reference(dtype: str) -> None:
    case = Case(chunks=((100, 20), (0, 33)), tokens=64, dtype=dtype)
    arrays = build(case)
    assert relative_error(run(case, arrays), reference(case, arrays)) < 5e-3


@pytest.mark.parametrize("scales", [(None, None), (0.5, 4.0)], ids=["unscaled", "scaled"])
def test_float8_cache_matches_reference(scales: tuple[float | None, float | None]) -> None:
    case = Case(
        chunks=((100, 20), (0, 33)), tokens=64, dtype="bfloat16", kv_dtype="float8_e4m3fn",
        k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip
    arrays = build(case)
    assert relative_error(run(case, arrays), reference(case, arrays)) < 5e-3


ONE_WARPGROUP = TuningConfig(compute_warpgroups=1, kv_block=64, stages=2)
TWO_WARPGROUPS = TuningConfig(compute_warpgroups=2, kv_block=64, stages=2)
CUTTING_KV = TuningConfig(compute_warpgroups=1, kv_block=64, stages=2, cuts_kv=True)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter multiplies NaN too
@pytest.mark.parametrize(
    ("name", "config"),  # a few: one takes the interpreter many seconds
    [
        ("ragged rows", TWO_WARPGROUPS),
        ("group 3", ONE_WARPGROUP),
        ("window and softcap", TWO_WARPGROUPS),
        ("float8 cache", ONE_WARPGROUP),
        ("ragged rows", CUTTING_KV),
    ],
)
def test_hopper_kernel_matches_reference_when_interpreted(
    name: str, config: TuningConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = dataclasses.replace(CASES[name], dtype="bfloat16")
    arrays = build(case)
    out = interpret(case, arrays, config, monkeypatch)
    assert relative_error(out, reference(case, arrays)) < 5e-3
    assert not out[arrays.query_starts[-1] :].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter multiplies NaN too
@pytest.mark.parametrize("window", [None, 2100])
def test_hopper_kernel_shares_out_a_long_context_when_interpreted(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small piece behind 3000 tokens goes to three CUDA blocks, or with a window to two, beside one that is not cut."""
    case = Case(
        chunks=((3000, 20), (0, 9), (0, 0)), tokens=40, kv_heads=1, group=4, page_size=64, layers=1, layer=0,
        window=window, dtype="bfloat16",
    )  # fmt: skip
    arrays = build(case)
    out = interpret(case, arrays, CUTTING_KV, monkeypatch)
    assert relative_error(out, reference(case, arrays)) < 5e-3
    assert not out[arrays.query_starts[-1] :].any()


def test_kv_is_cut_for_small_pieces_of_what_may_be_long() -> None:
    q, many = jnp.zeros((64, 32, 128), jnp.bfloat16), jnp.zeros((512, 32, 128), jnp.bfloat16)
    assert default_config(q, q.dtype, 8192).cuts_kv and default_config(q, jnp.dtype(jnp.float8_e4m3fn), 8192).cuts_kv
    assert not default_config(q, q.dtype, 2048).cuts_kv
    assert not default_config(many, q.dtype, 8192).cuts_kv


def test_kv_is_cut_for_one_computing_warpgroup_only() -> None:
    with pytest.raises(ValueError, match="one computing warpgroup"):
        TuningConfig(2, kv_block=64, stages=2, cuts_kv=True)


@pytest.mark.parametrize(
    ("shape", "dtype", "kv_dtype", "page_size", "reason"),
    [
        ((16, 4, 64), "bfloat16", "bfloat16", 16, None),
        ((16, 4, 64), "bfloat16", "float8_e4m3fn", 16, None),
        ((16, 4, 64), "float32", "float32", 16, "float32"),
        ((16, 4, 80), "bfloat16", "bfloat16", 16, "head_dim=80"),
        ((16, 4, 256), "bfloat16", "float8_e4m3fn", 16, "shared memory"),
        ((16, 4, 64), "bfloat16", "bfloat16", 12, "page_size=12"),
    ],
)
def test_hopper_kernel_says_what_it_does_not_cover(
    shape: tuple[int, int, int], dtype: str, kv_dtype: str, page_size: int, reason: str | None
) -> None:
    q, k_pages = jnp.zeros(shape, dtype), jnp.zeros((1, 2, page_size, 2, shape[2]), kv_dtype)
    answer = unsupported_reason(q, k_pages, rows=2, scale=1.0)
    assert answer is None if reason is None else reason in answer


def test_hopper_kernel_on_another_device_raises() -> None:
    case = dataclasses.replace(CASES["one row"], dtype="bfloat16")
    arrays = jax.tree.map(jnp.asarray, build(case))
    with pytest.raises(NotImplementedError, match="cpu"):
        prefill_attention(
            arrays.q, arrays.k_pages, arrays.v_pages, 0, arrays.page_table, arrays.query_starts, arrays.kv_lens,
            scale=1.0, implementation="mosaic_gpu",
        )  # fmt: skip


def test_padding_tokens_give_zeros() -> None:
    case = Case(chunks=((0, 9), (0, 0), (50, 12)), tokens=64)
    out = run(case, build(case))
    assert not out[21:].any()
    assert out[:21].any(axis=(1, 2)).all()


def test_no_live_row_gives_zeros() -> None:
    case = Case(chunks=((0, 0), (0, 0)), tokens=16)
    assert not run(case, build(case)).any()


def test_chunks_of_a_prompt_agree_with_the_whole_prompt() -> None:
    whole = Case(chunks=((0, 150),), tokens=256)
    arrays = build(whole)
    expected = run(whole, arrays)
    chunk = Case(chunks=((90, 60),), tokens=64)
    q = np.zeros((64, *arrays.q.shape[1:]), np.float32)
    q[:60] = arrays.q[90:150]
    later = dataclasses.replace(arrays, q=q, query_starts=np.array([0, 60], np.int32))
    np.testing.assert_allclose(run(chunk, later)[:60], expected[90:150], rtol=1e-5, atol=1e-6)


def test_layer_may_be_a_plain_int_and_device_picks_an_implementation() -> None:
    case = CASES["ragged rows"]
    arrays = jax.tree.map(jnp.asarray, build(case))
    out = prefill_attention(
        arrays.q, arrays.k_pages, arrays.v_pages, case.layer, arrays.page_table, arrays.query_starts, arrays.kv_lens,
        scale=case.scale,
    )  # fmt: skip
    np.testing.assert_allclose(np.asarray(out), reference(case, build(case)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"implementation": "triton"}, "triton"),
        ({"q": jnp.zeros((4, 3, 64))}, "q_heads=3"),
        ({"q": jnp.zeros((4, 4, 32))}, "head_dim=32"),
        ({"q": jnp.zeros((4, 4, 64), jnp.int32)}, "int32"),
        ({"v_pages": jnp.zeros((1, 2, 16, 2, 32))}, "v_pages"),
        ({"query_starts": jnp.zeros(2, jnp.int32)}, "query_starts"),
        ({"kv_lens": jnp.zeros(2, jnp.float32)}, "kv_lens"),
    ],
)
def test_arguments_that_do_not_fit_raise(change: dict[str, object], message: str) -> None:
    pages = jnp.zeros((1, 2, 16, 2, 64))
    arguments = {
        "q": jnp.zeros((4, 4, 64)),
        "k_pages": pages,
        "v_pages": pages,
        "layer": 0,
        "page_table": jnp.zeros((2, 1), jnp.int32),
        "query_starts": jnp.zeros(3, jnp.int32),
        "kv_lens": jnp.zeros(2, jnp.int32),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        prefill_attention(**(arguments | change))
