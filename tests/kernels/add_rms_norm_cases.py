"""Problems for add_rms_norm, with a float64 reference; shared by the tests on CPU and on a GPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

EPS = 1e-3
SHAPES = [(1, 128), (3, 4096), (2, 8192), (5, 640)]


def make_arrays(
    rows: int, size: int, dtype: type = jnp.bfloat16, parts: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x, update = (jnp.asarray(rng.standard_normal((rows, size)), dtype) for _ in range(2))
    if parts is not None:
        update = jnp.asarray(rng.standard_normal((parts, rows, size)), jnp.float32)
    return x, update, jnp.asarray(rng.standard_normal(size), jnp.float32)


def check(arrays: tuple[jax.Array, jax.Array, jax.Array], add_rms_norm: Callable[..., tuple[jax.Array, jax.Array]]):
    """Asserts that the sum is rounded once, and the norm, taken of the sum before or after that, once more."""
    x, update, weight = arrays
    total, normed = jax.jit(add_rms_norm)(x, update, weight)
    assert total.dtype == normed.dtype == x.dtype
    if update.ndim == 2:
        np.testing.assert_array_equal(np.asarray(total, np.float32), np.asarray(x + update, np.float32))
    else:
        wide = np.asarray(x, np.float64) + np.asarray(update, np.float64).sum(axis=0)
        np.testing.assert_allclose(np.asarray(total, np.float64), wide, rtol=2.0**-8, atol=1e-6)
    exact = np.asarray(total, np.float64)
    exact = exact / np.sqrt(np.square(exact).mean(axis=1, keepdims=True) + EPS) * np.asarray(weight, np.float64)
    tolerance = 1e-5 if x.dtype == jnp.float32 else 2.0**-7  # each rounding to bfloat16 is 2**-9 at most
    np.testing.assert_allclose(np.asarray(normed, np.float64), exact, rtol=tolerance, atol=1e-6)
