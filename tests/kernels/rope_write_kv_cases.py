"""What the tests of rope_write_kv compute, and what must come out, in numpy."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LAYERS, PAGES, PAGE_SIZE = 3, 7, 4
PADDING = PAGES  # a page index past the end


@dataclasses.dataclass(frozen=True)
class Case:
    """Places are (page, offset), one a token."""

    places: tuple[tuple[int, int], ...] = ((2, 3), (PADDING, 0), (0, 0), (6, 3), (2, 2))
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 64
    dtype: Any = jnp.bfloat16
    cache_dtype: Any = None  # None: dtype
    k_scale: float | None = None
    v_scale: float | None = None
    layer: int = 1


CASES = {
    "padding token": Case(),
    "nothing but padding, however it is marked": Case(places=((PADDING, 0), (2**31 - 1, 3), (-1, 1))),
    "one token": Case(places=((5, 1),)),
    "one padding token": Case(places=((PADDING, 1),)),
    "multi-head, one KV head": Case(kv_heads=1, group=1),
    "odd group and KV heads, head_dim 96": Case(kv_heads=3, group=3, head_dim=96),
    "thread blocks share a token, head_dim 128": Case(kv_heads=8, group=4, head_dim=128),
    "many query heads, head_dim 256": Case(kv_heads=1, group=8, head_dim=256),
    "forty query heads": Case(kv_heads=2, group=40, head_dim=128, places=((3, 1), (PADDING, 2))),
    "last layer": Case(layer=2),
    "float32": Case(dtype=jnp.float32),
    "float16": Case(dtype=jnp.float16, layer=0),
    "float8": Case(cache_dtype=jnp.float8_e4m3fn),
    "float8 with scales": Case(cache_dtype=jnp.float8_e4m3fn, k_scale=0.25, v_scale=0.01),
    "float8, one scale, one KV head": Case(cache_dtype=jnp.float8_e4m3fn, v_scale=3.0, kv_heads=1, group=1),
}


def make_arrays(case: Case) -> dict[str, np.ndarray]:
    """The op's arrays. The cache holds random bits, so all kinds of NaN too."""
    generator = np.random.default_rng(7)
    tokens, half = len(case.places), case.head_dim // 2
    cache_dtype = np.dtype(case.cache_dtype or case.dtype)
    shape = LAYERS, PAGES, PAGE_SIZE, case.kv_heads, case.head_dim
    angles = generator.uniform(-9, 9, (tokens, half)).astype(np.float32)
    width = case.group + 2
    caches = [
        generator.integers(0, 256, (*shape[:-1], shape[-1] * cache_dtype.itemsize), np.uint8).view(cache_dtype)
        for _ in range(2)
    ]
    return {
        "qkv": (3 * generator.standard_normal((tokens, case.kv_heads, width, case.head_dim))).astype(case.dtype),
        "k_pages": caches[0],
        "v_pages": caches[1],
        "cosines": np.cos(angles),
        "sines": np.sin(angles),
        "pages": np.array([page for page, _ in case.places], np.int32),
        "offsets": np.array([offset for _, offset in case.places], np.int32),
    }


def check(case: Case, write: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]) -> None:
    """Compares what `write` makes of the case with the definition."""
    arrays = make_arrays(case)
    scales = {"k_scale": case.k_scale, "v_scale": case.v_scale}
    q, *caches = write(
        **{name: jnp.asarray(array) for name, array in arrays.items()},
        layer=jnp.int32(case.layer),
        **{name: jnp.float32(scale) for name, scale in scales.items() if scale is not None},
    )
    turned = _turned(arrays)
    assert q.dtype == case.dtype and q.shape == (len(case.places), case.kv_heads * case.group, case.head_dim)
    _assert_close(np.asarray(q), turned[:, :, : case.group].reshape(q.shape), case.dtype)
    k = turned[:, :, case.group].astype(case.dtype)
    v = arrays["qkv"][:, :, case.group + 1]
    for name, new, cache in zip("kv", (k, v), caches, strict=True):
        _check_cache(case, np.asarray(cache), arrays[f"{name}_pages"], new, scales[f"{name}_scale"], exact=name == "v")


def _check_cache(case: Case, cache: np.ndarray, old: np.ndarray, new: np.ndarray, scale, exact: bool) -> None:
    written = [(token, place) for token, place in enumerate(case.places) if 0 <= place[0] < PAGES]
    expected_bits = _bits(old).copy()
    for token, place in written:
        index = (case.layer, *place)
        stored = new[token].astype(np.float32) / np.float32(1 if scale is None else scale)
        if cache.dtype == jnp.float8_e4m3fn:
            stored = np.clip(stored, -448, 448)
        if exact and scale is None:
            stored = stored.astype(cache.dtype)
            np.testing.assert_array_equal(cache[index], stored)
        _assert_close(cache[index], stored, cache.dtype)
        expected_bits[index] = _bits(cache)[index]
    assert cache.dtype == old.dtype
    np.testing.assert_array_equal(_bits(cache), expected_bits, "written elsewhere")


def _turned(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """All heads of qkv turned, in float64."""
    first, second = np.split(arrays["qkv"].astype(np.float64), 2, axis=-1)
    cosines, sines = (arrays[name].astype(np.float64)[:, None, None] for name in ("cosines", "sines"))
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)


def _bits(array: np.ndarray) -> np.ndarray:
    if jax.__version_info__ < (0, 11):
        # XLA's CPU compiler widened 16-bit caches for the write: a NaN stays one, but not always the same.
        with np.errstate(invalid="ignore"):  # some are signalling
            array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return array.view(f"uint{8 * array.dtype.itemsize}")


def _assert_close(actual: np.ndarray, expected: np.ndarray, dtype) -> None:
    """Off by no more than one rounding to dtype, and by float32's where terms cancel."""
    assert actual.dtype == dtype
    info = jnp.finfo(dtype)
    np.testing.assert_allclose(
        actual.astype(np.float64),
        expected.astype(np.float64),
        rtol=float(info.eps),
        atol=max(2e-6, float(info.smallest_subnormal)),
    )
