"""Problems for decode_attention, with a float64 reference; shared by the tests on CPU and on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: shapes, row lengths and options."""

    kv_lens: tuple[int, ...] = (1, 37, 0, 150)
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 64
    page_size: int = 16
    layers: int = 3
    layer: int = 1
    dtype: type = jnp.bfloat16
    window: int | None = None
    softcap: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    scale: float = 0.3


def make_arrays(case: Case, seed: int = 0) -> tuple[jax.Array, ...]:
    """(q, k_pages, v_pages, page_table, kv_lens); whatever no row may read is NaN or an absurd page id."""
    rng = np.random.default_rng(seed)
    kv_lens = np.asarray(case.kv_lens, np.int32)
    pages_needed = -(-kv_lens // case.page_size)
    pages_per_seq = int(pages_needed.max(initial=0)) + 2
    pages = int(pages_needed.sum()) + 3
    free_pages = list(rng.permutation(pages))
    page_table = np.full((len(kv_lens), pages_per_seq), 2**31 - 1, np.int32)
    page_table[:, 1::2] = -1
    shape = (case.layers, pages, case.page_size, case.kv_heads, case.head_dim)
    caches = [np.full(shape, np.nan, np.float32) for _ in range(2)]
    for row, length in enumerate(kv_lens):
        for position in range(0, int(length), case.page_size):
            page = free_pages.pop()
            page_table[row, position // case.page_size] = page
            used = min(case.page_size, int(length) - position)
            for cache in caches:
                cache[case.layer, page, :used] = rng.standard_normal((used, case.kv_heads, case.head_dim))
    q = rng.standard_normal((len(kv_lens), case.kv_heads * case.group, case.head_dim))
    query_dtype = jnp.bfloat16 if jnp.dtype(case.dtype).itemsize == 1 else case.dtype
    return (
        jnp.asarray(q, query_dtype),
        jnp.asarray(caches[0]).astype(case.dtype),
        jnp.asarray(caches[1]).astype(case.dtype),
        jnp.asarray(page_table),
        jnp.asarray(kv_lens),
    )


def reference(case: Case, q, k_pages, v_pages, page_table, kv_lens) -> np.ndarray:
    """The definition, row by row and head by head, in float64."""
    q, k_pages, v_pages = (np.asarray(x.astype(jnp.float32)).astype(np.float64) for x in (q, k_pages, v_pages))
    page_table, kv_lens = np.asarray(page_table), np.asarray(kv_lens)
    out = np.zeros(q.shape)
    for row, length in enumerate(kv_lens):
        first = 0 if case.window is None else max(0, int(length) - case.window)
        positions = np.arange(first, int(length))
        if not len(positions):
            continue
        where = (case.layer, page_table[row, positions // case.page_size], positions % case.page_size)
        keys = k_pages[where] * (case.k_scale or 1.0)  # [tokens, kv_heads, head_dim]
        values = v_pages[where] * (case.v_scale or 1.0)
        for head in range(q.shape[1]):
            scores = keys[:, head // case.group] @ q[row, head] * case.scale
            if case.softcap is not None:
                scores = case.softcap * np.tanh(scores / case.softcap)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ values[:, head // case.group]
    return out


def check(case: Case, attend) -> None:
    """Asserts that `attend(q, k_pages, ..., scale=..., ...)`, compiled, gives the reference's values."""
    arrays = make_arrays(case)
    q, k_pages, v_pages, page_table, kv_lens = arrays
    scales = {
        name: None if value is None else jnp.float32(value)
        for name, value in (("k_scale", case.k_scale), ("v_scale", case.v_scale))
    }

    @jax.jit
    def run(q, k_pages, v_pages, layer, page_table, kv_lens):
        options = {"scale": case.scale, "window": case.window, "softcap": case.softcap, **scales}
        return attend(q, k_pages, v_pages, layer, page_table, kv_lens, **options)

    out = run(q, k_pages, v_pages, jnp.int32(case.layer), page_table, kv_lens)
    assert out.dtype == q.dtype
    assert out.shape == q.shape
    tolerance = 2e-5 if q.dtype == jnp.float32 else 2e-2
    expected = reference(case, *arrays)
    np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), expected, rtol=tolerance, atol=tolerance)


CASES = {
    "ragged, padding rows, NaN in what no row reads": Case(),
    "float32": Case(dtype=jnp.float32),
    "float8 with scales": Case(dtype=jnp.float8_e4m3fn, k_scale=0.5, v_scale=3.0),
    "float8 without scales": Case(dtype=jnp.float8_e4m3fn),
    "one query head a KV head": Case(group=1),
    "three query heads a KV head": Case(group=3),
    "eight query heads a KV head": Case(group=8),
    "twelve query heads a KV head": Case(group=12),
    "head_dim 96": Case(head_dim=96),
    "head_dim 128": Case(head_dim=128, kv_lens=(1, 300)),
    "head_dim 256": Case(head_dim=256, kv_lens=(1, 100)),
    "page_size 32": Case(page_size=32),
    "page_size 64": Case(page_size=64),
    "page_size 128": Case(page_size=128, kv_lens=(128, 129, 5)),
    "window inside the row": Case(window=20),
    "window that starts in a later block": Case(window=20, kv_lens=(400, 0, 300, 3)),
    "window of one token": Case(window=1),
    "softcap": Case(softcap=2.0),
    "softcap and window": Case(softcap=2.0, window=40),
    "last layer": Case(layer=2),
    "one row": Case(kv_lens=(513,)),
    "full pages": Case(kv_lens=(16, 32, 128, 256)),
    "only padding rows": Case(kv_lens=(0, 0)),
}
