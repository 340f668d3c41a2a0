"""Inputs for prefill attention and a float64 reference on the host, for the tests of every implementation."""

import dataclasses
import itertools

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """What one call is about; `chunks` is (context length, number of queries) of each row."""

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

    @property
    def kv_scales(self) -> dict[str, float | None]:
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}


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


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


jax.tree_util.register_dataclass(Arrays)

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
    "float8 cache": Case(
        chunks=((100, 20), (0, 33)), tokens=64, kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=4.0, head_dim=128
    ),
}
