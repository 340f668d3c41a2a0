"""The one table from logical axes (named beside each parameter's shape) to mesh axes."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from jaxserve.sharding.mesh import TENSOR_AXIS

# Logical axes that are not named here are replicated.
LOGICAL_TO_MESH: dict[str, str] = {
    "kv_heads": TENSOR_AXIS,
    "ffn": TENSOR_AXIS,
    "vocab": TENSOR_AXIS,
}


def partition_spec(logical_axes: Sequence[str]) -> PartitionSpec:
    """How an array with these logical axes is cut over the mesh."""
    return PartitionSpec(*(LOGICAL_TO_MESH.get(axis) for axis in logical_axes))


def check_divides(name: str, shape: Sequence[int], logical_axes: Sequence[str], tensor_parallel_size: int) -> None:
    """Raises:
    ValueError: if a sharded axis does not divide, naming the sizes that would.
    """
    for size, axis in zip(shape, logical_axes, strict=True):
        if axis in LOGICAL_TO_MESH and size % tensor_parallel_size:
            fitting = [n for n in range(1, size + 1) if size % n == 0 and n <= 64]
            raise ValueError(
                f"{name}: {axis}={size} does not divide over tensor_parallel_size={tensor_parallel_size}; "
                f"sizes that work: {fitting}"
            )
