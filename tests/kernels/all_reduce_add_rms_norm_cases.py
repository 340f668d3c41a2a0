"""Problems for all_reduce_add_rms_norm, with a float64 reference; shared by the tests on CPU and on GPUs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.kernels.all_reduce_add_rms_norm import all_reduce_add_rms_norm
from jaxserve.kernels.peer_memory import PeerMemory

AXIS = "tp"
EPS = 1e-3

Problem = tuple[jax.Array, jax.Array, jax.Array]


def make_problem(ranks: int, rows: int, size: int, parts: int | None = None, seed: int = 0) -> Problem:
    """x [rows, size], every rank's update [ranks, *parts, rows, size], weight [size]."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((rows, size)), jnp.bfloat16)
    if parts is None:
        update = jnp.asarray(rng.standard_normal((ranks, rows, size)), jnp.bfloat16)
    else:
        update = jnp.asarray(rng.standard_normal((ranks, parts, rows, size)), jnp.float32)
    return x, update, jnp.asarray(rng.standard_normal(size), jnp.float32)


def on_mesh(mesh: Mesh, implementation: str | None) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Takes a problem and the memory, or None; returns every device's total and norm, [ranks, rows, size] each."""

    def per_device(x: jax.Array, update: jax.Array, weight: jax.Array, peers: PeerMemory | None):
        # XLA has devices wait for each other before they run a program with a collective of its own, such as this one;
        # else one might still load the kernel while the other's waits for it.
        x = x + jax.lax.psum(jnp.zeros((), x.dtype), AXIS)
        total, normed = all_reduce_add_rms_norm(
            x,
            update[0],
            weight,
            EPS,
            axis=AXIS,
            peers=peers,
            implementation=implementation,  # pyright: ignore[reportArgumentType]
        )
        return total[None], normed[None]

    cut, whole = PartitionSpec(AXIS), PartitionSpec()
    mapped = jax.shard_map(
        per_device, mesh=mesh, in_specs=(whole, cut, whole, cut), out_specs=(cut, cut), check_vma=False
    )
    return jax.jit(mapped)


def check(problem: Problem, results: tuple[jax.Array, jax.Array], roundings: int) -> None:
    """Asserts that all ranks have the same bits, and the right ones.

    Args:
        results: total and norm, [ranks, rows, size] each.
        roundings: to bfloat16 on the way to the sum, at most; 1: of the sum alone.
    """
    x, update, weight = problem
    totals, norms = (np.asarray(result, np.float64) for result in results)
    for rank in range(1, len(totals)):
        np.testing.assert_array_equal(totals[rank], totals[0])
        np.testing.assert_array_equal(norms[rank], norms[0])
    wide = np.asarray(update, np.float64)
    summed_axes = tuple(range(wide.ndim - 2))
    exact = np.asarray(x, np.float64) + wide.sum(axis=summed_axes)
    rounded = (
        np.abs(exact) if roundings == 1 else np.abs(np.asarray(x, np.float64)) + np.abs(wide).sum(axis=summed_axes)
    )
    assert np.all(np.abs(totals[0] - exact) <= roundings * 2.0**-8 * rounded + 1e-6)
    exact = totals[0] / np.sqrt(np.square(totals[0]).mean(axis=1, keepdims=True) + EPS)
    np.testing.assert_allclose(norms[0], exact * np.asarray(weight, np.float64), rtol=2.0**-7, atol=1e-6)
