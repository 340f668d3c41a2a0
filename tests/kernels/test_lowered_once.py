"""Functions that a process traces and lowers once."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxserve.kernels.lowered_once import LoweredOnce


class Traces:
    """A function that counts how often it is traced."""

    def __init__(self):
        self.count = 0

    def __call__(self, x: jax.Array, *, factor: int, shift: jax.Array | None = None) -> jax.Array:
        self.count += 1
        return x * factor if shift is None else x * factor + shift


def lowered_once(traces: Traces) -> LoweredOnce:
    return LoweredOnce(traces, static_argnames=("factor",), platform="cpu")


def test_programs_share_what_was_lowered():
    traces = Traces()
    scale = lowered_once(traces)
    x = jnp.arange(4.0)
    first = jax.jit(lambda x: scale(scale(x, factor=2), factor=2) + 1)
    second = jax.jit(lambda x: scale(x, factor=2) - 1)
    np.testing.assert_array_equal(first(x), 4 * x + 1)
    np.testing.assert_array_equal(second(x), 2 * x - 1)
    np.testing.assert_array_equal(scale(x, factor=2), 2 * x)
    assert traces.count == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (((jnp.ones(3),), {"factor": 2}), 2 * np.ones(3)),
        (((jnp.ones(2, jnp.int32),), {"factor": 2}), 2 * np.ones(2, np.int32)),
        (((jnp.ones(2),), {"factor": 3}), 3 * np.ones(2)),
        (((jnp.ones(2),), {"factor": 2, "shift": jnp.ones(2)}), 3 * np.ones(2)),
        (((jnp.ones(2),), {"factor": 2, "shift": None}), 2 * np.ones(2)),
    ],
    ids=["shape", "dtype", "static argument", "an array more", "None"],
)
def test_other_arguments_are_another_program(arguments, expected: np.ndarray):
    scale = lowered_once(Traces())
    scale(jnp.ones(2), factor=2)
    positional, named = arguments
    result = scale(*positional, **named)
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == expected.astype(result.dtype).dtype


def test_serves_devices_that_each_run_their_part():
    traces = Traces()
    scale = lowered_once(traces)
    for count in (1, 2):
        mesh = Mesh(np.array(jax.devices()[:count]), ("devices",))
        parts = PartitionSpec("devices")
        mapped = jax.shard_map(
            lambda x: scale(x[:4], factor=2), mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False
        )
        np.testing.assert_array_equal(jax.jit(mapped)(jnp.ones(4 * count)), 2 * np.ones(4 * count))
    assert traces.count == 1


def test_threads_that_come_at_once_share_too():
    traces = Traces()
    scale = lowered_once(traces)
    barrier = threading.Barrier(4)
    results = []

    def run() -> None:
        barrier.wait()
        results.append(jax.jit(lambda x: scale(x, factor=2))(jnp.ones(2)))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert traces.count == 1
