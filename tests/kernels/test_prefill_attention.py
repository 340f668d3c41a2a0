"""Every implementation of prefill attention against a float64 reference on the host."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.prefill_attention import prefill_attention

IMPLEMENTATIONS = ["xla"]


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of one call, as host arrays; `chunks` is (context length, number of queries) of each row."""

    chunks: tuple[tuple[int, int], ...]
    tokens: int
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    page_size: int = 16
    layers: int = 2
    layer: int = 1
    window: int | None = None
    softcap: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    dtype: str = "float32"
    kv_dtype: str | None = None
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclasses.dataclass(frozen=True)
class Arrays:
    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    query_starts: np.ndarray
    kv_lens: np.ndarray


def build(case: Case) -> Arrays:
    """Random inputs, with NaN in all that no query may read and page ids out of range behind each row's last page."""
    random = np.random.default_rng(case.seed)
    rows = len(case.chunks)
    kv_lens = np.array([context + new for context, new in case.chunks], np.int32)
    query_starts = np.array([0, *itertools.accumulate(new for _, new in case.chunks)], np.int32)
    used = [-(-int(length) // case.page_size) for length in kv_lens]
    pages = sum(used) + 3
    shuffled = random.permutation(pages)
    page_table = np.full((rows, max(used) + 2), 1_000_000, np.int32)
    page_table[:, 1::2] = -7
    shape = (case.layers, pages, case.page_size, case.kv_heads, case.head_dim)
    kv_dtype = np.dtype(case.kv_dtype or case.dtype)
    k_pages, v_pages = np.full(shape, np.nan, kv_dtype), np.full(shape, np.nan, kv_dtype)
    taken = 0
    for row, count in enumerate(used):
        page_table[row, :count] = shuffled[taken : taken + count]
        taken += count
        # With a window, what no query of this chunk sees may be gone already.
        context = case.chunks[row][0]
        first = 0 if case.window is None else max(0, context - case.window + 1)
        for position in range(first, int(kv_lens[row])):
            page, entry = page_table[row, position // case.page_size], position % case.page_size
            k_pages[case.layer, page, entry] = random.standard_normal(shape[3:]).astype(kv_dtype)
            v_pages[case.layer, page, entry] = random.standard_normal(shape[3:]).astype(kv_dtype)
        page_table[row, : first // case.page_size] = 2_000_000
    q = random.standard_normal((case.tokens, case.kv_heads * case.group, case.head_dim)).astype(case.dtype)
    q[query_starts[-1] :] = np.nan
    return Arrays(q, k_pages, v_pages, page_table, query_starts, kv_lens)


def reference(case: Case, arrays: Arrays) -> np.ndarray:
    """Attention query by query, in float64."""
    out = np.zeros(arrays.q.shape, np.float64)
    for row, (context, new) in enumerate(case.chunks):
        positions = np.arange(context + new)
        pages = arrays.page_table[row, positions // case.page_size].clip(0, arrays.k_pages.shape[1] - 1)
        entries = positions % case.page_size
        keys = arrays.k_pages[case.layer, pages, entries].astype(np.float64) * (case.k_scale or 1.0)
        values = arrays.v_pages[case.layer, pages, entries].astype(np.float64) * (case.v_scale or 1.0)
        for i, head in itertools.product(range(new), range(case.kv_heads * case.group)):
            token, end = arrays.query_starts[row] + i, context + i + 1
            start = 0 if case.window is None else max(0, end - case.window)
            seen_keys, seen_values = keys[start:end, head // case.group], values[start:end, head // case.group]
            scores = seen_keys @ arrays.q[token, head].astype(np.float64) * case.scale
            if case.softcap is not None:
                scores = case.softcap * np.tanh(scores / case.softcap)
            weights = np.exp(scores - scores.max())
            out[token, head] = weights @ seen_values / weights.sum()
    return out


def run(case: Case, arrays: Arrays, implementation: str) -> np.ndarray:
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
            k_scale=case.k_scale,
            v_scale=case.v_scale,
            implementation=implementation,
        )

    out = jax.jit(call)(jax.tree.map(jnp.asarray, arrays), jnp.int32(case.layer))
    assert out.dtype == arrays.q.dtype
    return np.asarray(out).astype(np.float64)


jax.tree_util.register_dataclass(Arrays)


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


CASES = {
    "one row": Case(chunks=((0, 40),), tokens=64),
    "one token": Case(chunks=((0, 1),), tokens=16),
    "ragged rows": Case(chunks=((0, 7), (0, 70), (0, 1), (0, 33)), tokens=128),
    "earlier context": Case(chunks=((100, 20), (3, 17), (300, 5)), tokens=64),
    "padding rows": Case(chunks=((0, 9), (0, 0), (50, 12), (0, 0)), tokens=32),
    "padding rows with stale lengths": Case(chunks=((0, 9), (37, 0), (5, 3)), tokens=16),
    "all tokens live": Case(chunks=((0, 30), (0, 34)), tokens=64),
    "group 1": Case(chunks=((20, 30),), tokens=32, group=1),
    "group 3": Case(chunks=((20, 30), (0, 11)), tokens=64, group=3),
    "group 4": Case(chunks=((20, 30), (0, 11)), tokens=64, group=4),
    "group 8, one KV head": Case(chunks=((20, 30), (0, 11)), tokens=64, group=8, kv_heads=1),
    "head_dim 96": Case(chunks=((20, 30),), tokens=32, head_dim=96),
    "head_dim 128": Case(chunks=((20, 30),), tokens=32, head_dim=128),
    "head_dim 256": Case(chunks=((20, 30),), tokens=32, head_dim=256),
    "page size 8": Case(chunks=((20, 30), (0, 11)), tokens=64, page_size=8),
    "page size 32": Case(chunks=((20, 30), (0, 11)), tokens=64, page_size=32),
    "page size 64": Case(chunks=((200, 30), (0, 11)), tokens=64, page_size=64),
    "window": Case(chunks=((200, 30), (0, 100), (3, 1)), tokens=256, window=24),
    "window of one": Case(chunks=((70, 30), (0, 40)), tokens=128, window=1),
    "softcap": Case(chunks=((20, 30), (0, 11)), tokens=64, softcap=1.5),
    "window and softcap": Case(chunks=((200, 80), (0, 11)), tokens=128, window=65, softcap=2.0),
    "first layer": Case(chunks=((20, 30),), tokens=32, layer=0, layers=3),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_float32_matches_reference(case: Case, implementation: str) -> None:
    arrays = build(case)
    out = run(case, arrays, implementation)
    np.testing.assert_allclose(out, reference(case, arrays), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_matches_reference(dtype: str, implementation: str) -> None:
    case = Case(chunks=((100, 20), (0, 33)), tokens=64, dtype=dtype)
    arrays = build(case)
    assert relative_error(run(case, arrays, implementation), reference(case, arrays)) < 5e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scales", [(None, None), (0.5, 4.0)], ids=["unscaled", "scaled"])
def test_float8_cache_matches_reference(scales: tuple[float | None, float | None], implementation: str) -> None:
    case = Case(
        chunks=((100, 20), (0, 33)), tokens=64, dtype="bfloat16", kv_dtype="float8_e4m3fn",
        k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip
    arrays = build(case)
    assert relative_error(run(case, arrays, implementation), reference(case, arrays)) < 5e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_tokens_give_zeros(implementation: str) -> None:
    case = Case(chunks=((0, 9), (0, 0), (50, 12)), tokens=64)
    out = run(case, build(case), implementation)
    assert not out[21:].any()
    assert out[:21].any(axis=(1, 2)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_live_row_gives_zeros(implementation: str) -> None:
    case = Case(chunks=((0, 0), (0, 0)), tokens=16)
    assert not run(case, build(case), implementation).any()


def test_chunks_of_a_prompt_agree_with_the_whole_prompt() -> None:
    whole = Case(chunks=((0, 150),), tokens=256)
    arrays = build(whole)
    expected = run(whole, arrays, "xla")
    chunk = Case(chunks=((90, 60),), tokens=64)
    q = np.zeros((64, *arrays.q.shape[1:]), np.float32)
    q[:60] = arrays.q[90:150]
    later = dataclasses.replace(arrays, q=q, query_starts=np.array([0, 60], np.int32))
    np.testing.assert_allclose(run(chunk, later, "xla")[:60], expected[90:150], rtol=1e-5, atol=1e-6)


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
