"""Problems for decode_matmul, with a float64 reference; shared by the tests on CPU and on a GPU."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.decode_matmul import decode_matmul, decode_matmul_swiglu


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: shapes and options."""

    rows: int = 8
    k: int = 512
    columns: int = 128
    is_swiglu: bool = False
    has_residual: bool = False
    dtype: type = jnp.bfloat16
    out_dtype: type | None = None

    @property
    def function(self) -> Callable[..., jax.Array]:
        return decode_matmul_swiglu if self.is_swiglu else decode_matmul


def make_arrays(case: Case, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    rng = np.random.default_rng(seed)
    w_shape = (case.k, 2, case.columns) if case.is_swiglu else (case.k, case.columns)
    x = jnp.asarray(rng.standard_normal((case.rows, case.k)), case.dtype)
    w = jnp.asarray(rng.standard_normal(w_shape) * case.k**-0.5, case.dtype)
    residual = rng.standard_normal((case.rows, case.columns)) if case.has_residual else None
    return x, w, None if residual is None else jnp.asarray(residual, case.out_dtype or case.dtype)


def reference(case: Case, x: jax.Array, w: jax.Array, residual: jax.Array | None) -> np.ndarray:
    """The definition in float64."""
    x64, w64 = (np.asarray(a.astype(jnp.float32)).astype(np.float64) for a in (x, w))
    if case.is_swiglu:
        gate, up = x64 @ w64[:, 0], x64 @ w64[:, 1]
        return gate / (1 + np.exp(-gate)) * up
    product = x64 @ w64
    return product if residual is None else product + np.asarray(residual.astype(jnp.float32)).astype(np.float64)


def check(case: Case, multiply: Callable[..., jax.Array]) -> np.ndarray:
    """Asserts that `multiply(x, w, ...)`, compiled, gives the reference's values, and returns them."""
    x, w, residual = make_arrays(case)
    options = {} if residual is None else {"residual": residual}
    if case.out_dtype is not None:
        multiply = _with_out_dtype(multiply, case.out_dtype)
    out = jax.jit(multiply)(x, w, **options)
    assert out.dtype == (case.out_dtype or x.dtype)
    assert out.shape == (case.rows, case.columns)
    # One rounding to bfloat16 is 2**-9 at most; sums in float32 lie far below it, whose error grows with their length.
    tolerance = 1e-5 if out.dtype == jnp.float32 else 2.0**-8
    actual = np.asarray(out.astype(jnp.float32)).astype(np.float64)
    np.testing.assert_allclose(actual, reference(case, x, w, residual), rtol=tolerance, atol=max(1e-5, 1e-8 * case.k))
    return actual


def _with_out_dtype(multiply: Callable[..., jax.Array], out_dtype: type) -> Callable[..., jax.Array]:
    return lambda *arrays, **options: multiply(*arrays, out_dtype=out_dtype, **options)


CASES = {
    "eight rows": Case(),
    "one row": Case(rows=1),
    "odd rows": Case(rows=13),
    "many rows": Case(rows=128),
    "more rows than the Hopper kernel takes": Case(rows=200),
    "residual": Case(rows=3, has_residual=True),
    "float32": Case(dtype=jnp.float32, has_residual=True),
    "float32 result of bfloat16": Case(out_dtype=jnp.float32, has_residual=True),
    "columns and k of no particular size": Case(rows=2, k=100, columns=37),
    "swiglu": Case(is_swiglu=True),
    "swiglu, one row": Case(rows=1, is_swiglu=True),
    "swiglu, odd rows and sizes": Case(rows=7, k=90, columns=51, is_swiglu=True),
    "swiglu in float32": Case(dtype=jnp.float32, is_swiglu=True),
}
