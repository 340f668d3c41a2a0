"""Shardings of whole pytrees, from the declarations of their arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.sharding.mesh import TENSOR_AXIS
from jaxserve.sharding.rules import check_divides, partition_spec


def partition_specs(specs: Any) -> Any:
    """The `PartitionSpec` of every declared array: `specs` is a pytree whose leaves have `shape` and `logical_axes`."""
    return jax.tree.map(lambda spec: partition_spec(spec.logical_axes), specs, is_leaf=_is_declaration)


def named_shardings(specs: Any, mesh: Mesh) -> Any:
    """The `NamedSharding` of every declared array on a mesh.

    Raises:
        ValueError: if a sharded axis does not divide over the mesh.
    """
    declarations = [
        (jax.tree_util.keystr(path), spec.shape, spec.logical_axes)
        for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_declaration)
    ]
    check_divides(declarations, mesh.shape[TENSOR_AXIS])
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, partition_spec(spec.logical_axes)), specs, is_leaf=_is_declaration
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec())


def put_replicated(arrays: Any, sharding: NamedSharding) -> Any:
    """A copy of host arrays on every device of `replicated`; where those are several processes', each puts it on its own.

    `jax.device_put` would have the processes compare what they bring, which takes a collective for each array.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(arrays, sharding)

    def put_one(array: Any) -> jax.Array:
        copies = [jax.device_put(np.asarray(array), device) for device in sharding.mesh.local_devices or ()]
        return jax.make_array_from_single_device_arrays(np.shape(array), sharding, copies)

    return jax.tree.map(put_one, arrays)


def put(tree: Any, shardings: Any) -> Any:
    """Places arrays; those of the host must be the same in all processes that share them, which is not looked at."""

    def place(array: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable or isinstance(array, jax.Array):
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: np.asarray(array[index]))

    return jax.tree.map(place, tree, shardings)


def _is_declaration(leaf: Any) -> bool:
    return hasattr(leaf, "logical_axes")
