"""Shardings of whole pytrees, from the declarations of their arrays."""

from __future__ import annotations

from typing import Any

import jax
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


def _is_declaration(leaf: Any) -> bool:
    return hasattr(leaf, "logical_axes")
