"""From a Hugging Face folder or a GGUF file to a folder with Orbax weights, config, tokenizer and manifest."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxserve.checkpoint.assemble import Assembler
from jaxserve.checkpoint.atomic import made_aside, require_space
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.families import GGUF, HUGGING_FACE
from jaxserve.checkpoint.gguf_config import eos_token_ids_from_gguf, model_config_from_gguf
from jaxserve.checkpoint.gguf_source import GGUFFile
from jaxserve.checkpoint.hf_config import model_config_from_hf
from jaxserve.checkpoint.manifest import (
    TOKENIZER_FOLDER,
    WEIGHTS_FOLDER,
    Manifest,
    file_sizes,
    is_converted,
    sha256_of_file,
    write_manifest,
)
from jaxserve.checkpoint.orbax_weights import count_bytes, save_weights
from jaxserve.checkpoint.safetensors_source import SafetensorsSource, checked_file, weight_files
from jaxserve.checkpoint.tensor_source import BFLOAT16
from jaxserve.checkpoint.tokenizer_files import TokenizerFiles, read_json, write_tokenizer
from jaxserve.checkpoint.tokenizer_read import eos_token_ids_from_configs, read_gguf_tokenizer, read_hf_tokenizer
from jaxserve.progress import Progress

logger = logging.getLogger(__name__)

DTYPES: dict[str, np.dtype | None] = {
    "auto": None,
    "float32": np.dtype(np.float32),
    "bfloat16": BFLOAT16,
    "float16": np.dtype(np.float16),
}
_PACKAGES = ("jaxserve", "jax", "orbax-checkpoint", "numpy", "gguf", "safetensors", "tokenizers")


@dataclass(frozen=True)
class OpenModel:
    """A model in its own format, its headers read and checked against its config.

    Attributes:
        files: all that it is made of, the weights first.
        tokenizer: None where there is none.
    """

    assembler: Assembler
    tokenizer: TokenizerFiles | None
    files: tuple[Path, ...]
    source: str
    name: str


@contextlib.contextmanager
def open_model(path: Path, dtype: str = "auto") -> Iterator[OpenModel]:
    """Open a Hugging Face folder or a GGUF file and check all that can be told without reading the weights.

    Args:
        dtype: of the arrays it will give, but for the norms; "auto": as the file has them (quantized: float32).

    Raises:
        CheckpointError: if it is neither, or incomplete, damaged or not supported.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"{dtype=} must be one of {', '.join(DTYPES)}")
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if is_converted(path):
        raise CheckpointError(f"{path} is a converted checkpoint already")
    if path.is_file():
        with GGUFFile(path) as file:
            yield _open_gguf(file, DTYPES[dtype])
    elif (path / "config.json").exists():
        config = read_json(checked_file(path, "config.json"))
        tokenizer = read_hf_tokenizer(path)
        settings = tokenizer.settings if tokenizer else None
        model_config = model_config_from_hf(
            config,
            eos_token_ids=settings.eos_token_ids if settings else eos_token_ids_from_configs(path),
            bos_token_id=settings.bos_token_id if settings else config.get("bos_token_id"),
            where=str(path / "config.json"),
        )
        with SafetensorsSource(path) as source:
            assembler = Assembler.checked(source, HUGGING_FACE, model_config, DTYPES[dtype], str(path))
            yield OpenModel(assembler, tokenizer, _hf_files(path), "huggingface", path.resolve().name)
    else:
        raise CheckpointError(
            f"{path} is no model: it has neither config.json (Hugging Face) nor jaxserve.json (converted)"
        )


def _open_gguf(file: GGUFFile, dtype: np.dtype | None) -> OpenModel:
    tokenizer = read_gguf_tokenizer(file)
    model_config = model_config_from_gguf(
        file,
        eos_token_ids=tokenizer.settings.eos_token_ids if tokenizer else eos_token_ids_from_gguf(file),
        bos_token_id=tokenizer.settings.bos_token_id if tokenizer else None,
    )
    assembler = Assembler.checked(file, GGUF, model_config, dtype, str(file.path))
    return OpenModel(assembler, tokenizer, (file.path,), "gguf", file.path.stem)


def _hf_files(folder: Path) -> tuple[Path, ...]:
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    return (*weight_files(folder), *(folder / name for name in names if (folder / name).exists()))


def convert(
    source: str | Path, destination: str | Path, *, dtype: str = "auto", progress: Progress, name: str | None = None
) -> Path:
    """Convert a model into a folder that `load_checkpoint` reads. The folder is whole, or not there.

    Args:
        source: a Hugging Face folder or a GGUF file.
        destination: the folder to make; it must not exist.
        dtype: of the weights, but for the norms; "auto": as the source has them (quantized weights: float32).
        name: of the model, for the manifest; None: the source's.

    Returns:
        The destination.

    Raises:
        CheckpointError: if the source is not usable, the destination exists, or the disk is full.
    """
    source, destination = Path(source), Path(destination)
    if destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination} exists: remove it or choose another folder")
    with contextlib.ExitStack() as stack:
        with progress.task("Reading headers", None, "B"):
            model = stack.enter_context(open_model(source, dtype))
        require_space(destination, _written_bytes(model), f"the converted model {destination}")
        try:
            with made_aside(destination) as aside:
                _write(model, aside, dtype, name or model.name, progress)
        except FileExistsError as error:
            raise CheckpointError(f"{destination} exists: remove it or choose another folder") from error
    return destination


def _write(model: OpenModel, folder: Path, dtype: str, name: str, progress: Progress) -> None:
    folder.mkdir()
    with progress.task("Checking files", sum(path.stat().st_size for path in model.files), "B") as advance:
        hashes = {path.name: sha256_of_file(path, advance) for path in model.files}
    with progress.task("Converting weights", model.assembler.total_bytes, "B") as advance:
        params = model.assembler.params(advance)
    num_bytes = count_bytes(params)
    with progress.task("Writing weights", num_bytes, "B") as advance:
        save_weights(params, folder / WEIGHTS_FOLDER)
        advance(num_bytes)
    if model.tokenizer is None:
        logger.warning("%s has no tokenizer: the converted model takes token ids only", model.files[0].parent)
    else:
        write_tokenizer(model.tokenizer, folder / TOKENIZER_FOLDER)
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES if _is_installed(package)}
    config, files = model.assembler.config, file_sizes(folder)
    write_manifest(Manifest(name, config, dtype, model.source, hashes, versions, files), folder)


def _written_bytes(model: OpenModel) -> int:
    """A little more than the weights will take on the disk."""
    assembler = model.assembler
    itemsize = assembler.dtype.itemsize if assembler.dtype is not None else None
    source = assembler.source
    names = [name for name in source.names() if not name.endswith(assembler.names.ignored)]
    sizes = (int(np.prod(source.shape(name))) * (itemsize or source.dtype(name).itemsize) for name in names)
    return int(sum(sizes) * 1.02) + (16 << 20)


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
