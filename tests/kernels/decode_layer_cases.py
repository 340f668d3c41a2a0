"""Problems for decode_layer; shared by the tests on CPU and on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: shapes."""

    rows: int = 8
    attended: int = 128
    hidden: int = 256
    ffn: int = 256
    qkv: int | None = 384
    dtype: type = jnp.bfloat16


def make_arrays(case: Case, seed: int = 0) -> tuple[jax.Array | None, ...]:
    """The arguments of decode_layer, in its order; products keep the size of what goes in."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, deviation: float = 1.0, mean: float = 0.0) -> jax.Array:
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(deviation) + np.float32(mean)
        return jnp.asarray(values, case.dtype)

    return (
        normal(case.rows, case.attended),
        normal(case.rows, case.hidden, deviation=2.0),
        normal(case.attended, case.hidden, deviation=case.attended**-0.5),
        normal(case.hidden, deviation=0.3, mean=1.0),
        normal(case.hidden, 2, case.ffn, deviation=case.hidden**-0.5),
        normal(case.ffn, case.hidden, deviation=case.ffn**-0.5),
        None if case.qkv is None else normal(case.hidden, deviation=0.3, mean=1.0),
        None if case.qkv is None else normal(case.hidden, case.qkv, deviation=case.hidden**-0.5),
    )


def reference(arrays: tuple[jax.Array | None, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    """The definition in float64, with no rounding in between."""
    attended, residual, wo, mlp_norm, w_gate_up, w_down, next_norm, next_wqkv = [
        None if array is None else np.asarray(array.astype(jnp.float32)).astype(np.float64) for array in arrays
    ]

    def norm(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS) * weights

    x = residual + attended @ wo
    normed = norm(x, mlp_norm)
    gate, up = normed @ w_gate_up[:, 0], normed @ w_gate_up[:, 1]
    x = x + gate / (1 + np.exp(-gate)) * up @ w_down
    return x, None if next_wqkv is None else norm(x, next_norm) @ next_wqkv


def check(actual: jax.Array | None, expected: np.ndarray | None, tolerance: float) -> None:
    """Asserts that every row is as near as roundings allow, which add up over the row: a wrong tile shows."""
    if expected is None:
        assert actual is None
        return
    assert actual is not None and actual.shape == expected.shape
    error = np.asarray(actual.astype(jnp.float32)).astype(np.float64) - expected
    assert np.isfinite(error).all()
    assert (np.linalg.norm(error, axis=1) <= tolerance * np.linalg.norm(expected, axis=1)).all()
    # No element is far off: errors are sums of many roundings.
    assert np.abs(error).max() <= 8 * tolerance * np.abs(expected).max()
