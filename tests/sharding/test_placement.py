"""Which sizes go over a mesh, and what a device then holds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.device_batch import Sizes
from jaxserve.engine.runner import zero_cache
from jaxserve.models.kv_cache import kv_cache_specs
from jaxserve.models.params import param_specs
from jaxserve.sharding.mesh import devices_of_hosts, make_mesh
from jaxserve.sharding.placement import named_shardings, partition_specs, replicated
from tests.tiny_engine import MODEL_CONFIG, tiny_params


def with_sizes(**sizes: int) -> ModelConfig:
    return dataclasses.replace(MODEL_CONFIG, **sizes)  # type: ignore[arg-type]


def test_a_mesh_takes_the_first_devices() -> None:
    mesh = make_mesh(jax.devices(), 4)
    assert list(mesh.devices.flat) == jax.devices()[:4]
    assert dict(mesh.shape) == {"tp": 4}


@pytest.mark.parametrize("size", [9, 64])
def test_more_devices_than_there_are(size: int) -> None:
    with pytest.raises(ValueError, match=rf"tensor_parallel_size={size} .*8 cpu device"):
        make_mesh(jax.devices(), size)


@dataclass(frozen=True)
class Device:
    process_index: int
    number: int


def test_several_hosts_give_as_many_devices_each() -> None:
    devices = [Device(host, number) for number in range(3) for host in (1, 0)]
    chosen = devices_of_hosts(devices, 2, 4)  # type: ignore[arg-type]
    assert [(device.process_index, device.number) for device in chosen] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    with pytest.raises(ValueError, match="takes 4 devices of each host; host 0 has 3"):
        devices_of_hosts(devices, 2, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tensor_parallel_size=5 does not divide over nnodes=2"):
        devices_of_hosts(devices, 2, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nnodes": 2, "tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide over nnodes=2"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, "node_rank=2 must be one of the nnodes=2 hosts"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "the hosts share one engine"),
        ({"master_port": 70000}, "master_port=70000 must lie in"),
        ({"nnodes": 0}, "nnodes=0 must be at least 1"),
    ],
)
def test_hosts_that_cannot_be(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_device_holds_its_share_of_every_large_array(size: int) -> None:
    mesh = make_mesh(jax.devices(), size)
    params = jax.device_put(tiny_params(), named_shardings(param_specs(MODEL_CONFIG), mesh))
    sizes = Sizes(max_num_seqs=1, pages_per_seq=3, num_pages=6, page_size=4)
    cache = zero_cache(MODEL_CONFIG, sizes, mesh, np.dtype(np.float32))
    for path, array in jax.tree_util.tree_leaves_with_path((params, cache)):
        share = 1 if array.ndim == 1 else size  # norms are copied
        shards = array.addressable_shards
        assert len(shards) == size, path
        assert {shard.data.size for shard in shards} == {array.size // share}, path
        # Together the shards are the whole, each part once.
        parts = {str(shard.index) for shard in shards}
        assert len(parts) == share, path


def test_the_cache_is_cut_along_its_heads() -> None:
    specs = partition_specs(kv_cache_specs(MODEL_CONFIG, 6, 4))
    assert tuple(specs.k_pages) == tuple(specs.v_pages) == (None, None, None, "tp", None)


def test_a_copy_for_everyone() -> None:
    mesh = make_mesh(jax.devices(), 2)
    array = jax.device_put(np.arange(6), replicated(mesh))
    assert [shard.data.shape for shard in array.addressable_shards] == [(6,), (6,)]


@pytest.mark.parametrize(
    ("config", "size", "axis"),
    [
        (with_sizes(num_heads=6, num_kv_heads=3), 2, "kv_heads=3"),
        (with_sizes(num_heads=6, num_kv_heads=3), 4, "kv_heads=3"),
        (with_sizes(num_kv_heads=2), 4, "kv_heads=2"),
        (with_sizes(vocab_size=259), 2, "vocab=259"),
        (with_sizes(intermediate_size=66), 4, "ffn=66"),
    ],
)
def test_a_size_that_does_not_divide_names_those_that_do(config: ModelConfig, size: int, axis: str) -> None:
    with pytest.raises(ValueError, match=rf"{axis} .*tensor_parallel_size={size}; sizes that work") as refusal:
        named_shardings(param_specs(config), make_mesh(jax.devices(), size))
    named = [int(number) for number in str(refusal.value).rsplit("[", 1)[1].rstrip("]").split(",")]
    working = []
    for candidate in range(1, 9):
        try:
            named_shardings(param_specs(config), make_mesh(jax.devices(), candidate))
        except ValueError:
            continue
        working.append(candidate)
    assert [number for number in named if number <= 8] == working
