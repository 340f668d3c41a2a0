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


def make_mesh(
    devices: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
    tensor_parallel_size: int,
    *,
    data_parallel_size: int = 1,
    replica: int = 0,
) -> Mesh:
    """A one-axis mesh (`tp`) over the `tensor_parallel_size` devices of one of `data_parallel_size` replicas.

    Raises:
        ValueError: if there are fewer devices than all replicas need.
    """
    if tensor_parallel_size * data_parallel_size > len(devices):
        platform = devices[0].platform if devices else ""
        wanted = f"tensor_parallel_size={tensor_parallel_size}"
        if data_parallel_size > 1:
            wanted += f" times data_parallel_size={data_parallel_size}"
        remedy = "; the variable JAX_NUM_CPU_DEVICES makes more" if platform == "cpu" else ""
        raise ValueError(f"{wanted} needs that many devices; {len(devices)} {platform} device(s) are here{remedy}")
    first = replica * tensor_parallel_size
    return Mesh(np.asarray(devices[first : first + tensor_parallel_size]), (TENSOR_AXIS,))


def copies_mesh(mesh: Mesh, copies: int) -> Mesh:
    """The devices of a mesh with those that hold the same KV head side by side: axes `tp_heads` and `tp_copies`."""
    return Mesh(mesh.devices.reshape(-1, copies), (HEADS_AXIS, COPIES_AXIS))


def devices_of_hosts(devices: Sequence[jax.Device], num_hosts: int, count: int) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """`count` devices, as many of each host, host by host.

    Raises:
        ValueError: they do not divide over the hosts, or a host has fewer.
    """
    if count % num_hosts:
        raise ValueError(f"tensor_parallel_size={count} does not divide over nnodes={num_hosts}")
    chosen: list[jax.Device] = []  # pyright: ignore[reportInvalidTypeForm]
    for host in range(num_hosts):
        own = [device for device in devices if device.process_index == host]
        if len(own) < count // num_hosts:
            raise ValueError(
                f"tensor_parallel_size={count} over nnodes={num_hosts} takes {count // num_hosts} devices of each host; "
                f"host {host} has {len(own)}"
            )
        chosen += own[: count // num_hosts]
    return chosen
