"""What is in a checkpoint or would be made for a named architecture, and the memory that it takes: from headers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes

from jaxserve.checkpoint.manifest import ArrayInfo, check_files, is_converted, read_manifest
from jaxserve.checkpoint.open_model import open_model
from jaxserve.checkpoint.pieces import by_piece, check_arrays
from jaxserve.checkpoint.trusted_files import require_utf8
from jaxserve.config import ModelConfig
from jaxserve.models.kv_cache import kv_bytes_per_token
from jaxserve.models.params import param_specs
from jaxserve.models.shard_layout import ShardLayout


@dataclass(frozen=True)
class Inspection:
    """One checkpoint, converted or not; or an architecture whose weights are made up.

    Attributes:
        form: "converted", "huggingface", "meta" or "gguf"; "random weights" of an architecture.
        source: what a converted one was made from; else its form.
        arrays: by name: those that are stored, under the names that they have there; of an architecture those that are made.
    """

    name: str
    form: str
    source: str
    architecture: str
    config: ModelConfig
    arrays: dict[str, ArrayInfo]

    def bytes_by_dtype(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for info in self.arrays.values():
            found[info.dtype] = found.get(info.dtype, 0) + info.nbytes
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that one device of several holds.

    Attributes:
        weights: of its shards.
        kv_cache_per_token: of its share of one token's keys and values.
    """

    weights: int
    kv_cache_per_token: int


def inspect_checkpoint(path: Path) -> Inspection:
    """Read the headers of a checkpoint in any format.

    Raises:
        CheckpointError: if there is none, or it is damaged or not supported.
    """
    require_utf8(path)
    if is_converted(path):
        manifest = read_manifest(path)
        check_files(path, manifest)
        check_arrays(manifest.model_config, manifest.arrays, str(path))
        return Inspection(
            manifest.name, "converted", manifest.source, manifest.architecture, manifest.model_config, manifest.arrays
        )
    with open_model(path) as model:
        source = model.assembler.source
        arrays = {name: ArrayInfo(source.shape(name), source.dtype(name).name) for name in sorted(source.names())}
        return Inspection(model.name, model.source, model.source, model.architecture, model.assembler.config, arrays)


def inspect_architecture(name: str, config: ModelConfig, dtype: str) -> Inspection:
    """What is made where an architecture gets random weights (`load_format="dummy"`); none of it is made here.

    Args:
        config: with the quantization that is asked for.
        dtype: as in `device_memory`.
    """
    element = _element_type(dtype)
    arrays = {
        f"{piece}/{part}": ArrayInfo(spec.shape, spec.element_type(element).name)
        for piece, specs in by_piece(param_specs(config)).items()
        for part, spec in specs.items()
    }
    return Inspection(name, "random weights", "random weights", "LlamaForCausalLM", config, arrays)


def device_memory(config: ModelConfig, tensor_parallel_size: int, dtype: str) -> DeviceMemory:
    """What each device holds when the model is cut over so many.

    Args:
        dtype: that the engine runs with: of weights that are not quantized, and of the KV cache.

    Raises:
        ValueError: if the model cannot be cut so, naming sizes that work.
    """
    element = _element_type(dtype)
    layout = ShardLayout(config, tensor_parallel_size)
    return DeviceMemory(
        layout.device_bytes(element), kv_bytes_per_token(layout.device_config, element) // tensor_parallel_size
    )


def _element_type(dtype: str) -> jnp.dtype:
    return jnp.dtype(getattr(ml_dtypes, dtype, dtype))
