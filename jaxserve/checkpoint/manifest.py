"""The one file that makes a folder a converted checkpoint: written last, so that it stands for a whole one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tokenizer_files import read_json
from jaxserve.config import DType, ModelConfig
from jaxserve.json_fields import from_json
from jaxserve.models.params import QUANTIZABLE, param_specs

MANIFEST_FILE = "jaxserve.json"
FORMAT_VERSION = 3
_OLDER_VERSION = 2  # the same, but for 4-bit numbers, which lie in another order
WEIGHTS_FOLDER = "weights"
TOKENIZER_FOLDER = "tokenizer"
ORIGINAL_FOLDER = "original"  # the source's own config and tokenizer files, for export


@dataclass(frozen=True)
class ArrayInfo:
    """Shape and dtype of one array of the weights, so that neither needs to be looked up in them."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(getattr(ml_dtypes, self.dtype, self.dtype)).itemsize

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape={self.shape} must be sizes")
        try:
            _ = self.nbytes
        except (TypeError, ValueError) as error:
            raise ValueError(f"dtype={self.dtype!r} is not known") from error

    @staticmethod
    def of(array: np.ndarray) -> ArrayInfo:
        return ArrayInfo(array.shape, array.dtype.name)


@dataclass(frozen=True)
class Manifest:
    """What a converted checkpoint is, and where it came from.

    Attributes:
        name: short name of the model, such as "smollm2-135m-instruct".
        model_config: of the weights beside it.
        dtype: that was asked for at conversion; "auto": as the source had it (quantized weights: float32).
        quantization: what was done to the weights at conversion; "none": nothing.
        architecture: the model's Hugging Face name, such as "LlamaForCausalLM".
        source: format of what it was made from: "huggingface", "meta" or "gguf".
        source_files: name and SHA-256 of each file it was made from.
        versions: of the packages that made it.
        arrays: of the weights, by piece and name.
        files: path (within the folder) and size in bytes of every file beside the manifest.
    """

    name: str
    model_config: ModelConfig
    dtype: str
    quantization: str
    architecture: str
    source: str
    source_files: dict[str, str]
    versions: dict[str, str]
    arrays: dict[str, ArrayInfo]
    files: dict[str, int]
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.dtype not in get_args(DType):  # it is what export tells others
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(get_args(DType))}")


def is_converted(path: Path) -> bool:
    return (path / MANIFEST_FILE).is_file()


def write_manifest(manifest: Manifest, folder: Path) -> None:
    text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False)
    (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError if the folder has no manifest, or one of a checkpoint that this version cannot read."""
    path = folder / MANIFEST_FILE
    data: dict[str, Any] = read_json(path, "convert the model again")
    version = data.get("format_version")
    if version not in (_OLDER_VERSION, FORMAT_VERSION):
        raise CheckpointError(
            f"{path}: format_version={version!r}, this version of jaxserve reads {_OLDER_VERSION} and {FORMAT_VERSION}: "
            "convert the model again"
        )
    try:
        manifest = from_json(Manifest, data)
        # Before a list of them is made: a number costs nothing.
        if manifest.model_config.num_layers > len(manifest.arrays):
            raise ValueError(f"num_layers={manifest.model_config.num_layers} of {len(manifest.arrays)} arrays")
        param_specs(manifest.model_config)  # raises where sizes go into no arrays
        _check_what_is_left(manifest.model_config)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}): convert the model again") from error
    quantization = manifest.model_config.quantization
    if version == _OLDER_VERSION and quantization is not None and quantization.format == "int4":
        raise CheckpointError(
            f"{path}: format_version={version} with int4 weights, whose 4-bit numbers lie in an older order: convert the "
            "model again"
        )
    return manifest


def _check_what_is_left(config: ModelConfig) -> None:
    """Raises ValueError where a quantization leaves a layer or a weight as it is that the model does not have."""
    quantization = config.quantization
    if quantization is None:
        return
    layers = {*quantization.dense_layers, *(layer for layer, _ in quantization.dense_parts)}
    weights = {*quantization.dense_weights, *(weight for _, weight in quantization.dense_parts)}
    unknown = [layer for layer in sorted(layers) if not 0 <= layer < config.num_layers]
    unknown += sorted(weights - QUANTIZABLE.keys())
    if unknown:
        raise ValueError(
            f"model_config.quantization leaves {unknown[0]!r} as it is, but there are {config.num_layers} layers, from 0 "
            f"on, with {', '.join(QUANTIZABLE)}"
        )


def file_sizes(folder: Path) -> dict[str, int]:
    """Path within the folder and size in bytes of each file, but for the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raises CheckpointError if a file is missing or has another size than when it was written."""
    found = file_sizes(folder)
    for name, size in manifest.files.items():
        if found.get(name) != size:
            state = f"has {found[name]} bytes instead of {size}" if name in found else "is missing"
            raise CheckpointError(f"{folder} is damaged: {name} {state}; remove the folder and convert the model again")


def sha256_of_file(path: Path, advance: Callable[[int], None] = lambda amount: None) -> str:
    """Hexadecimal digest of a file's content. `advance` is told the bytes that were read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            advance(len(piece))
    return digest.hexdigest()
