"""Parameters in Orbax's format: written from NumPy, restored straight onto the devices that use them."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxserve.checkpoint.atomic import disk_message
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tokenizer_files import error_line
from jaxserve.config import ModelConfig
from jaxserve.models.params import LayerParams, LlamaParams, ParamSpec, param_specs

_LAYER = "layer_{:03d}"


def save_weights(params: LlamaParams, folder: Path) -> None:
    """Write parameters (NumPy or JAX arrays) into a folder that is not there yet.

    Uncompressed: weights hardly compress, and unpacking would take longer than reading.

    Raises:
        CheckpointError: if the disk is full or the folder cannot be written.
    """
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(_to_tree(params)))
    except OSError as error:
        raise CheckpointError(disk_message(error, folder)) from error
    except ValueError as error:  # how TensorStore reports what the file system said
        if "No space left" in str(error) or "RESOURCE_EXHAUSTED" in str(error):
            raise CheckpointError(disk_message(OSError(errno.ENOSPC, ""), folder)) from error
        raise CheckpointError(f"cannot write {folder}: {error_line(error)[:300]}") from error


def restore_weights(
    folder: Path, config: ModelConfig, dtype: jnp.dtype, shardings: LlamaParams | None = None
) -> LlamaParams:
    """Read parameters onto devices.

    Args:
        dtype: of every array but the norms, which are float32.
        shardings: a `LlamaParams` of `jax.sharding.Sharding`s, each device reading its part; None: the first device.

    Raises:
        CheckpointError: if a file is missing or damaged, or the arrays do not fit the config.
        ValueError: if a sharding does not divide its array.
    """
    specs = param_specs(config)
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: device, specs, is_leaf=_is_spec)

    def target(spec: ParamSpec, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        sharding.shard_shape(spec.shape)  # raises ValueError if it does not divide the array
        is_norm = spec.standard_deviation is None
        return jax.ShapeDtypeStruct(spec.shape, jnp.float32 if is_norm else dtype, sharding=sharding)

    targets = _to_tree(jax.tree.map(target, specs, shardings, is_leaf=_is_spec))
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            _check_shapes(checkpointer.metadata(folder.absolute()), targets, folder)
            restore_args = ocp.checkpoint_utils.construct_restore_args(targets)
            args = ocp.args.PyTreeRestore(item=targets, restore_args=restore_args)
            tree = checkpointer.restore(folder.absolute(), args=args)
    except CheckpointError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds for missing and damaged files
        raise CheckpointError(
            f"{folder} is damaged or incomplete ({error_line(error)[:300]}): convert the model again"
        ) from error
    return _from_tree(tree, config)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, ParamSpec)


def _check_shapes(metadata: Any, targets: Mapping[str, Any], folder: Path) -> None:
    stored = {name: tuple(leaf.shape) for name, leaf in _flat(metadata.item_metadata.tree).items()}
    wanted = {name: tuple(leaf.shape) for name, leaf in _flat(targets).items()}
    for name in sorted(stored.keys() | wanted.keys()):
        if stored.get(name) != wanted.get(name):
            raise CheckpointError(
                f"{folder}: array {name!r} has shape {stored.get(name)}, its config says {wanted.get(name)}: "
                "convert the model again"
            )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _to_tree(params: LlamaParams) -> dict[str, Any]:
    """Nested dictionaries by name, without what is None: what is on the disk does not hang on our classes."""
    tree: dict[str, Any] = {"embedding": params.embedding, "final_norm": params.final_norm}
    if params.lm_head is not None:
        tree["lm_head"] = params.lm_head
    for number, layer in enumerate(params.layers):
        fields = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
        tree[_LAYER.format(number)] = {name: value for name, value in fields.items() if value is not None}
    return tree


def _from_tree(tree: Mapping[str, Any], config: ModelConfig) -> LlamaParams:
    names = [field.name for field in dataclasses.fields(LayerParams)]
    layers = [tree[_LAYER.format(number)] for number in range(config.num_layers)]
    return LlamaParams(
        embedding=tree["embedding"],
        layers=tuple(LayerParams(**{name: layer.get(name) for name in names}) for layer in layers),
        final_norm=tree["final_norm"],
        lm_head=tree.get("lm_head"),
    )


def count_bytes(params: LlamaParams) -> int:
    """Of all arrays."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
