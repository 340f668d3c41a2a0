"""How a model's arrays are laid out over the devices that share it, where that takes more than a slice of each.

With more devices than KV heads each KV head is copied to several devices, which divide the query heads of its group; a
vocabulary that does not divide is padded. Afterwards a device's part is a slice again, so that the forward pass knows
nothing of either: it runs a model with as many KV heads as there are devices.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import ModelConfig
from jaxserve.models.param_spec import ParamSpec
from jaxserve.models.params import LlamaParams, param_specs
from jaxserve.sharding.mesh import COPIES_AXIS, HEADS_AXIS, copies_mesh
from jaxserve.sharding.rules import partition_spec


@dataclass(frozen=True)
class ShardLayout:
    """The layout of one model over a number of devices.

    Attributes:
        config: of the model, as its checkpoint has it.
        size: devices that share it.

    Raises:
        ValueError: the model cannot be divided over so many; the message names the numbers that it can.
    """

    config: ModelConfig
    size: int

    def __post_init__(self) -> None:
        obstacle = _obstacle(self.config, self.size)
        if obstacle is not None:
            fitting = [size for size in range(1, self.config.num_heads + 1) if _obstacle(self.config, size) is None]
            raise ValueError(
                f"{obstacle} does not divide over tensor_parallel_size={self.size}; sizes that work: {fitting}"
            )

    @property
    def copies(self) -> int:
        """Devices that hold the same KV head."""
        return max(1, self.size // self.config.num_kv_heads)

    @property
    def device_config(self) -> ModelConfig:
        """The model as the devices run it: each copy of a KV head counts. The vocabulary is the one without padding."""
        if self.copies == 1:
            return self.config
        return dataclasses.replace(self.config, num_kv_heads=self.size)

    def specs(self) -> LlamaParams:
        """Declarations of the arrays as the devices share them."""
        return jax.tree.map(self._laid_out, param_specs(self.config))

    def device_bytes(self, dtype: jnp.dtype) -> int:
        """Bytes of each device's part of the arrays.

        Args:
            dtype: of weights that are not quantized.
        """
        return sum(
            spec.num_bytes(dtype) // (self.size if any(partition_spec(spec.logical_axes)) else 1)
            for spec in jax.tree.leaves(self.specs())
        )

    def shardings(self, mesh: Mesh) -> LlamaParams:
        """Of the arrays as the devices share them."""
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, partition_spec(spec.logical_axes)), param_specs(self.config)
        )

    def source_shardings(self, mesh: Mesh) -> LlamaParams:
        """Of the arrays as a checkpoint has them, such that `arrange` needs no exchange between devices."""
        return jax.tree.map(lambda spec: self._source_sharding(spec, mesh), param_specs(self.config))

    def arrange(self, params: LlamaParams, mesh: Mesh) -> LlamaParams:
        """From arrays placed by `source_shardings` to those of `specs`, placed by `shardings`.

        Arrays that are laid out anew are deleted one by one, so that there are never two models.
        """
        specs, treedef = jax.tree.flatten(param_specs(self.config))
        programs: dict[ParamSpec, Any] = {}
        arranged = []
        for spec, array in zip(specs, treedef.flatten_up_to(params), strict=True):
            if not self._changes(spec):
                arranged.append(array)
                continue
            if spec not in programs:
                programs[spec] = self._program(spec, mesh)
            parts = programs[spec](array)
            jax.block_until_ready(parts)
            array.delete()
            shards = [shard.data for shard in parts.addressable_shards]
            sharding = NamedSharding(mesh, partition_spec(spec.logical_axes))
            arranged.append(jax.make_array_from_single_device_arrays(parts.shape, sharding, shards))
        return jax.tree.unflatten(treedef, arranged)

    def _copies_heads(self, spec: ParamSpec) -> bool:
        return self.copies > 1 and "kv_heads" in spec.logical_axes

    def _pads(self, spec: ParamSpec) -> bool:
        return "vocab" in spec.logical_axes and self.config.vocab_size % self.size != 0

    def _changes(self, spec: ParamSpec) -> bool:
        return self._copies_heads(spec) or self._pads(spec)

    def _laid_out(self, spec: ParamSpec) -> ParamSpec:
        shape = list(spec.shape)
        if self._pads(spec):
            shape[spec.logical_axes.index("vocab")] = self.size * self._vocab_shard
        if self._copies_heads(spec):
            axis = spec.logical_axes.index("kv_heads")
            shape[axis] *= self.copies
            shape[axis + 1] = self._inner_size(spec)
        return dataclasses.replace(spec, shape=tuple(shape))

    @property
    def _vocab_shard(self) -> int:
        return -(-self.config.vocab_size // self.size)

    def _inner_size(self, spec: ParamSpec) -> int:
        """Of the axis after `kv_heads` on each of the devices that share a KV head."""
        axis = spec.logical_axes.index("kv_heads") + 1
        match spec.logical_axes[axis]:
            case "qkv":
                return (spec.shape[axis] - 2) // self.copies + 2
            case "groups":
                return spec.shape[axis] * self._splits_of_groups(spec.shape[axis]) // self.copies
            case _:  # query heads
                return spec.shape[axis] // self.copies

    def _splits_of_groups(self, num_groups: int) -> int:
        """Into how many an int4 group of a KV head's inputs is cut, so that none reaches over two devices.

        Parts have their numbers in the order of the whole: see `jaxserve.models.quantization.int4_groups`.
        """
        inputs = self.config.group_size * self.config.head_dim
        length = inputs // num_groups
        return length // math.gcd(length, inputs // self.copies)

    def _source_sharding(self, spec: ParamSpec, mesh: Mesh) -> NamedSharding:
        if self._copies_heads(spec):
            axes = (HEADS_AXIS if axis == "kv_heads" else None for axis in spec.logical_axes)
            return NamedSharding(copies_mesh(mesh, self.copies), PartitionSpec(*axes))
        if self._pads(spec):
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, partition_spec(spec.logical_axes))

    def _program(self, spec: ParamSpec, mesh: Mesh) -> Any:
        """One kind of array, laid out by each device on its own."""
        source = self._source_sharding(spec, mesh)
        if self._copies_heads(spec):
            cut = ((HEADS_AXIS, COPIES_AXIS) if axis == "kv_heads" else None for axis in spec.logical_axes)
            target, part = PartitionSpec(*cut), self._part_of_heads
        else:
            target, part = partition_spec(spec.logical_axes), self._part_of_vocabulary
        return jax.jit(
            jax.shard_map(
                lambda array: part(spec, array),
                mesh=source.mesh,
                in_specs=source.spec,
                out_specs=target,
                check_vma=False,
            )
        )

    def _part_of_heads(self, spec: ParamSpec, array: jax.Array) -> jax.Array:
        """This device's query heads of a KV head, and a copy of the rest."""
        axis = spec.logical_axes.index("kv_heads") + 1
        copied = None
        if spec.logical_axes[axis] == "qkv":
            array, copied = jnp.split(array, [array.shape[axis] - 2], axis)
        elif spec.logical_axes[axis] == "groups":
            array = jnp.repeat(array, self._splits_of_groups(array.shape[axis]), axis)
        each = array.shape[axis] // self.copies
        part = lax.dynamic_slice_in_dim(array, lax.axis_index(COPIES_AXIS) * each, each, axis)
        return part if copied is None else jnp.concatenate([part, copied], axis)

    def _part_of_vocabulary(self, spec: ParamSpec, array: jax.Array) -> jax.Array:
        """This device's part of the vocabulary, padded with zeros."""
        axis = spec.logical_axes.index("vocab")
        padding = [(0, 0)] * array.ndim
        padding[axis] = (0, self.size * self._vocab_shard - array.shape[axis])
        start = lax.axis_index(partition_spec(["vocab"])[0]) * self._vocab_shard
        return lax.dynamic_slice_in_dim(jnp.pad(array, padding), start, self._vocab_shard, axis)


def _obstacle(config: ModelConfig, size: int) -> str | None:
    """What keeps a model from being divided over so many devices, or None."""
    kv_heads, heads = config.num_kv_heads, config.num_heads
    if kv_heads % size and (size % kv_heads or heads % size):
        return f"kv_heads={kv_heads} (of heads={heads})"
    layer = param_specs(dataclasses.replace(config, num_layers=1)).layers[0]
    for path, spec in jax.tree_util.tree_leaves_with_path(layer):
        for axis, length in zip(spec.logical_axes, spec.shape, strict=True):
            if axis == "ffn" and length % size:
                return f"{jax.tree_util.keystr(path)}: ffn={length}"
    return None
