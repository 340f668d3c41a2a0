"""Loads a converted checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.checkpoint.cache import cached_model, fingerprint_of
from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.manifest import (
    TOKENIZER_FOLDER,
    WEIGHTS_FOLDER,
    check_files,
    is_converted,
    read_manifest,
)
from jaxserve.checkpoint.open_model import DTYPES
from jaxserve.checkpoint.orbax_weights import PIECES_AT_ONCE, restore_weights
from jaxserve.checkpoint.pieces import check_arrays
from jaxserve.checkpoint.trusted_files import require_utf8
from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.models.params import QUANTIZABLE, LlamaParams, param_specs
from jaxserve.models.quantize_params import LayerQuantizer
from jaxserve.models.shard_layout import ShardLayout
from jaxserve.progress import Progress


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A model ready to run.

    Attributes:
        params: arrays on their devices.
        tokenizer_dir: for `jaxserve.text.tokenizer.load_tokenizer`; missing where the source had no tokenizer.
        name: short name of the model.
    """

    model_config: ModelConfig
    params: LlamaParams
    tokenizer_dir: Path
    name: str


def load_checkpoint(
    path: str | Path,
    dtype: str,
    progress: Progress,
    *,
    mesh: Mesh | None = None,
    check: Callable[[ModelConfig], None] = lambda config: None,
    quantization: Callable[[ModelConfig], QuantizationConfig | None] = lambda config: None,
) -> LoadedCheckpoint:
    """Load a model onto its devices.

    Args:
        path: a folder that `convert` wrote; or a Hugging Face folder or GGUF file, which is first converted into the
            cache.
        dtype: "float32", "bfloat16" or "float16", of the weights; "auto": float32 on CPU, bfloat16 elsewhere. Norms are
            float32 always.
        mesh: the devices that share the model, each of which reads its own part (by `ShardLayout.source_shardings`);
            None: everything on the first device.
        check: told of the model before its weights are read; may raise, as where they do not fit.
        quantization: what the weights of a dense model's layers are quantized into, each as soon as it is read and from the
            numbers that are stored, as `convert` does it; None: they stay dense.

    Raises:
        CheckpointError: if there is no model, or it is damaged.
        ValueError: if the model does not divide over the mesh, or the quantization does not fit it.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"{dtype=} must be one of {', '.join(DTYPES)}")
    folder = converted_folder(Path(path), progress)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    check_arrays(manifest.model_config, manifest.arrays, str(folder))
    check(manifest.model_config)
    if dtype == "auto":
        platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
        dtype = "float32" if platform == "cpu" else "bfloat16"
    target = jnp.dtype(dtype)
    stored, wanted = manifest.model_config, quantization(manifest.model_config)
    model_config = stored if wanted is None else dataclasses.replace(stored, quantization=wanted)
    total = sum(spec.num_bytes(target) for spec in jax.tree.leaves(param_specs(stored)))
    shardings = None if mesh is None else ShardLayout(stored, mesh.size).source_shardings(mesh)
    quantizer, pieces_at_once, task = None, PIECES_AT_ONCE, "Loading weights"
    if wanted is not None:
        places = None if mesh is None else ShardLayout(model_config, mesh.size).source_shardings(mesh)
        quantizer, task = LayerQuantizer(wanted, places), f"Loading weights, quantizing to {wanted.name}"
        # Layers wait on the devices in the dtype of the files: as many as take no more than they would in the model's.
        layers = (array for name, array in manifest.arrays.items() if name.rpartition("/")[2] in QUANTIZABLE)
        widest = max(jnp.dtype(array.dtype).itemsize for array in layers)
        pieces_at_once = max(1, PIECES_AT_ONCE * target.itemsize // max(widest, target.itemsize))
    weights = folder / WEIGHTS_FOLDER
    with progress.task(task, total, "B") as advance:
        params = restore_weights(
            weights, stored, target, shardings, advance, quantizer=quantizer, pieces_at_once=pieces_at_once
        )
    return LoadedCheckpoint(model_config, params, folder / TOKENIZER_FOLDER, manifest.name)


def converted_folder(path: Path, progress: Progress, name: str | None = None) -> Path:
    """The path itself if it is a converted checkpoint, else the cache's conversion of the model there.

    Args:
        name: that a conversion gets, in the cache and in its manifest; None: as the path is called.

    Raises:
        CheckpointError: if there is no model, or it cannot be converted.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    require_utf8(path)
    if is_converted(path):
        return path
    own_name = name or (path.stem if path.is_file() else path.resolve().name)

    def make(folder: Path) -> None:
        convert(path, folder, progress=progress, name=own_name)

    return cached_model(own_name, fingerprint_of(path), make, progress)
