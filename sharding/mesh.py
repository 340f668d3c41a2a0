"""The mesh of devices that one model runs on."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

TENSOR_AXIS = "tp"
# The same devices as two axes, where several hold the same KV head; only for laying out weights.
HEADS_AXIS = "tp_heads"
COPIES_AXIS = "tp_copies"


def make_mesh(devices: Sequence[jax.Device], tensor_parallel_size: int) -> Mesh:  # pyright: ignore[reportInvalidTypeForm]
    """A one-axis mesh (`tp`) over the first `tensor_parallel_size` devices.

    Raises:
        ValueError: if there are fewer devices.
    """
    if tensor_parallel_size > len(devices):
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} needs that many devices; {len(devices)} "
            f"{devices[0].platform if devices else ''} device(s) are here"
        )
    return Mesh(np.asarray(devices[:tensor_parallel_size]), (TENSOR_AXIS,))


def copies_mesh(mesh: Mesh, copies: int) -> Mesh:
    """The devices of a mesh with those that hold the same KV head side by side: axes `tp_heads` and `tp_copies`."""
    return Mesh(mesh.devices.reshape(-1, copies), (HEADS_AXIS, COPIES_AXIS))
