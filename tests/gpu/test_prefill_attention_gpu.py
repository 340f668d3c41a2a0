"""The Hopper kernel of prefill attention on the card."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.prefill_attention import prefill_attention
from jaxserve.kernels.prefill_attention_mosaic_gpu import TuningConfig, prefill_attention_mosaic_gpu
from tests.kernels.prefill_attention_cases import CASES, Arrays, Case, build, reference, relative_error


def run(case: Case, arrays: Arrays, implementation: str | None) -> np.ndarray:
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
            implementation=implementation,
            **case.kv_scales,
        )

    out = jax.jit(call)(jax.tree.map(jnp.asarray, arrays), jnp.int32(case.layer))
    assert out.dtype == arrays.q.dtype
    return np.asarray(out).astype(np.float64)


@pytest.fixture(autouse=True)
def _hopper() -> None:
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability != "9.0":
        pytest.skip(f"needs a Hopper GPU, this one has compute capability {capability}")


@pytest.mark.parametrize(
    "name",
    [
        "one token",
        "ragged rows",
        "earlier context",
        "padding rows with stale lengths",
        "all tokens live",
        "group 1",
        "group 3",
        "group 8, one KV head",
        "head_dim 96",
        "head_dim 256",
        "page size 8",
        "page size 64",
        "window and softcap",
        "float8 cache",
    ],
)
def test_kernel_matches_reference(name: str) -> None:
    case = dataclasses.replace(CASES[name], dtype="bfloat16")
    arrays = build(case)
    out = run(case, arrays, "mosaic_gpu")
    assert relative_error(out, reference(case, arrays)) < 5e-3
    assert not out[arrays.query_starts[-1] :].any()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_full_and_partial_tiles_of_two_warpgroups_match_reference(kv_dtype: str) -> None:
    case = Case(
        chunks=((0, 300), (500, 131), (0, 0), (77, 5)), tokens=512, kv_heads=8, group=4, head_dim=128,
        dtype="bfloat16", kv_dtype=kv_dtype,
    )  # fmt: skip
    arrays = build(case)
    out = run(case, arrays, None)  # None takes the kernel here
    np.testing.assert_array_equal(out, run(case, arrays, "mosaic_gpu"))
    assert relative_error(out, reference(case, arrays)) < 5e-3
    assert not out[arrays.query_starts[-1] :].any()


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("window", [None, 2700])
def test_cuda_blocks_that_share_a_context_match_reference(window: int | None, kv_dtype: str | None) -> None:
    """A piece of a long prompt beside one of a short one, a prompt of a single block, and padding."""
    case = Case(
        chunks=((5000, 24), (0, 5), (333, 30), (0, 0)), tokens=64, kv_heads=8, group=4, head_dim=128,
        window=window, dtype="bfloat16", kv_dtype=kv_dtype,
    )  # fmt: skip
    arrays = build(case)
    config = TuningConfig(1, 64, 2, cuts_kv=True)
    kernel = jax.jit(
        functools.partial(prefill_attention_mosaic_gpu, scale=case.scale, window=case.window, config=config)
    )
    a = jax.tree.map(jnp.asarray, arrays)
    first = None
    for _ in range(20):  # a race would show now and then
        out = np.asarray(
            kernel(a.q, a.k_pages, a.v_pages, jnp.int32(case.layer), a.page_table, a.query_starts, a.kv_lens)
        )
        first = out if first is None else first
        np.testing.assert_array_equal(out, first)
    out = out.astype(np.float64)
    assert relative_error(out, reference(case, arrays)) < 5e-3
    assert not out[arrays.query_starts[-1] :].any()


def test_fall_back_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["one row"]  # float32, which the kernel does not take
    arrays = build(case)
    for _ in range(2):
        assert relative_error(run(case, arrays, None), reference(case, arrays)) < 1e-2
    messages = [record.getMessage() for record in caplog.records if "prefill_attention" in record.getMessage()]
    assert len(messages) == 1
    assert "float32" in messages[0]
