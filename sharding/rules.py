"""The one table from logical axes (named beside each parameter's shape) to mesh axes."""

from __future__ import annotations

import math
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


def check_divides(declarations: Sequence[tuple[str, Sequence[int], Sequence[str]]], tensor_parallel_size: int) -> None:
    """Checks that every sharded axis of a model's arrays divides over the mesh.

    Args:
        declarations: name, shape and logical axes of each array.

    Raises:
        ValueError: if one does not, naming the sizes over which all of them do.
    """
    sharded = [
        (name, axis, size)
        for name, shape, logical_axes in declarations
        for size, axis in zip(shape, logical_axes, strict=True)
        if axis in LOGICAL_TO_MESH
    ]
    for name, axis, size in sharded:
        if size % tensor_parallel_size:
            common = math.gcd(*(size for _, _, size in sharded))
            fitting = [n for n in range(1, common + 1) if common % n == 0]
            raise ValueError(
                f"{name}: {axis}={size} does not divide over tensor_parallel_size={tensor_parallel_size}; "
                f"sizes that work: {fitting}"
            )
