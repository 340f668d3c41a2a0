"""From a model in any format to a folder with Orbax weights, config, tokenizer and manifest: one piece at a time."""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jaxserve.checkpoint.atomic import require_free_name, require_space
from jaxserve.checkpoint.file_states import FileStates
from jaxserve.checkpoint.manifest import (
    FORMAT_VERSION,
    ORIGINAL_FOLDER,
    TOKENIZER_FOLDER,
    ArrayInfo,
    Manifest,
    sha256_of_file,
    write_manifest,
)
from jaxserve.checkpoint.open_model import open_model
from jaxserve.checkpoint.opened_model import OpenModel
from jaxserve.checkpoint.orbax_weights import holds_piece, save_piece
from jaxserve.checkpoint.pieces import by_piece, layer_of_piece, path_names, piece_names
from jaxserve.checkpoint.tokenizer_files import write_tokenizer
from jaxserve.checkpoint.unfinished import UnfinishedFolder, unfinished_folder
from jaxserve.config import ModelConfig
from jaxserve.models.params import param_specs
from jaxserve.progress import Progress

logger = logging.getLogger(__name__)

_ROOM_FOR_THE_REST = 16 << 20  # bytes: the tokenizer, the manifest, what the store notes of itself
_HASHED_AT_ONCE = 4  # files: one thread takes longer for it than most disks do to read them
_PACKAGES = ("jaxserve", "jax", "orbax-checkpoint", "numpy", "gguf", "safetensors", "tokenizers")


class WeightStep(Protocol):
    """What happens to each array between its assembly and the disk: quantization."""

    @property
    def name(self) -> str:
        """For the manifest, and to tell an unfinished conversion with another step."""
        ...

    def config(self, config: ModelConfig) -> ModelConfig:
        """Of the model as it will be stored, whose `param_specs` declare what `apply` gives."""
        ...

    def apply(self, config: ModelConfig, layer: int | None, name: str, values: np.ndarray) -> Any:
        """What is stored in place of an array: an array, or a pytree of arrays such as a `QuantizedWeight`.

        Args:
            config: of the model as it will be stored.
            layer: number of the layer that the array belongs to, if any.
            name: of the array within its piece: a field of `LayerParams` or `LlamaParams`.
        """
        ...


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str = "auto",
    progress: Progress,
    name: str | None = None,
    resume: bool = False,
    step: WeightStep | None = None,
) -> Path:
    """Convert a model into a folder that `load_checkpoint` reads. The folder is whole, or not there.

    Holds one piece (the embedding, a layer, the head) in memory at a time.

    Args:
        source: a Hugging Face folder, a folder in Meta's layout, or a GGUF file.
        destination: the folder to make; it must not exist.
        dtype: of the weights, but for the norms; "auto": as the source has them (quantized weights: float32).
        name: of the model, for the manifest; None: the source's.
        resume: go on with what an earlier run, killed or failed, has finished, and leave what this one finishes if it
            fails.
        step: quantization; None: none.

    Returns:
        The destination.

    Raises:
        CheckpointError: if the source is not usable or changes meanwhile, the destination exists, or the disk is full.
    """
    source, destination = Path(source), Path(destination)
    require_free_name(destination, source)
    states = FileStates(source)
    with open_model(source, dtype) as model, states.explain(model.files):
        if model.ignored:
            logger.warning("%s: ignored, as nothing of a model that is read: %s", source, ", ".join(model.ignored))
        if model.tokenizer is None:
            logger.warning("%s has no tokenizer: the converted model takes token ids only", source)
        config = model.assembler.config if step is None else step.config(model.assembler.config)
        if not resume:  # when it is known what is left, it is asked again
            _require_space(model, config, piece_names(config), destination)
        with (
            progress.task("Checking files", sum(path.stat().st_size for path in model.files), "B") as advance,
            ThreadPoolExecutor(_HASHED_AT_ONCE) as threads,
        ):
            digests = list(threads.map(lambda path: sha256_of_file(path, advance), model.files))
        hashes = {path.name: digest for path, digest in zip(model.files, digests, strict=True)}
        quantization = "none" if step is None else step.name
        origin = {"format": FORMAT_VERSION, "files": hashes, "dtype": dtype, "quantization": quantization}
        with unfinished_folder(destination, origin, resume=resume) as folder:
            arrays = _write_weights(model, config, folder, step, lambda: states.check(model.files), progress)
            _write_rest(model, folder.path)
            manifest = Manifest(
                name=name or model.name,
                model_config=config,
                dtype=dtype,
                quantization=quantization,
                architecture=model.architecture,
                source=model.source,
                source_files=hashes,
                versions={
                    package: importlib.metadata.version(package) for package in _PACKAGES if _is_installed(package)
                },
                arrays=arrays,
                files=folder.written_files(),
            )
            write_manifest(manifest, folder.path)
            states.check(model.files)  # what was hashed is what was read
    return destination


def _write_weights(
    model: OpenModel,
    config: ModelConfig,
    folder: UnfinishedFolder,
    step: WeightStep | None,
    check: Callable[[], None],
    progress: Progress,
) -> dict[str, ArrayInfo]:
    """Writes the pieces that are not there yet. Returns every array by piece and name.

    Args:
        check: raises if the source has changed: no piece that was read of other bytes counts as finished.
    """
    specs, pieces = by_piece(param_specs(config)), piece_names(config)
    for piece, arrays in list(folder.finished.items()):
        if piece not in specs or not holds_piece(folder.weights / piece, arrays, specs[piece], config.num_heads):
            logger.warning("%s: %s is not what this conversion writes, and is written again", folder.path, piece)
            folder.forget(piece)
    left = [piece for piece in pieces if piece not in folder.finished]
    if len(left) < len(pieces):
        logger.info("%s: %d of %d pieces are there already", folder.path, len(pieces) - len(left), len(pieces))
    _require_space(model, config, left, folder.path)
    with progress.task("Converting weights", sum(model.assembler.piece_bytes(piece) for piece in left), "B") as advance:
        for piece in left:
            arrays = _assembled(model, config, piece, step, advance)
            # Asked once more: others may have filled the disk, and running into its end is not told on one line.
            _require_space(model, config, [piece], folder.path)
            save_piece(arrays, specs[piece], config.num_heads, folder.weights / piece)
            check()
            folder.add_finished(piece, {name: ArrayInfo.of(array) for name, array in arrays.items()})
            del arrays  # before the next ones are read
    return {f"{piece}/{name}": info for piece in pieces for name, info in folder.finished[piece].items()}


def _assembled(
    model: OpenModel, config: ModelConfig, piece: str, step: WeightStep | None, advance: Callable[[int], None]
) -> dict[str, np.ndarray]:
    """The arrays of a piece as they will be stored."""
    assembled = model.assembler.arrays(piece, advance)
    if step is None:
        return dict(assembled)
    stored: dict[str, np.ndarray] = {}
    for name, array in assembled:
        value = step.apply(config, layer_of_piece(piece), name, array)
        del array  # before the next one is made
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            stored["/".join((name, *path_names(path)))] = np.asarray(leaf)
    return stored


def _write_rest(model: OpenModel, folder: Path) -> None:
    """The tokenizer, and the source's own small files, which export gives back."""
    if model.tokenizer is not None:
        write_tokenizer(model.tokenizer, folder / TOKENIZER_FOLDER)
    if model.carried:
        (folder / ORIGINAL_FOLDER).mkdir(exist_ok=True)
    for path in model.carried:
        shutil.copyfile(path, folder / ORIGINAL_FOLDER / path.name)


def _require_space(model: OpenModel, config: ModelConfig, pieces: Sequence[str], destination: Path) -> None:
    """Raises CheckpointError if there is no room for these pieces, as they will be stored, and a little more."""
    specs, needed = by_piece(param_specs(config)), _ROOM_FOR_THE_REST
    for piece in pieces:
        parts = {name: spec for name, spec in specs[piece].items() if "/" in name}  # of quantized weights
        needed += sum(spec.size * np.dtype(spec.dtype).itemsize for spec in parts.values())
        needed += model.assembler.stored_bytes(piece, {name.partition("/")[0] for name in parts})
    require_space(destination, int(1.02 * needed), f"the converted model {destination}")


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
