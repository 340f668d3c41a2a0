"""Tensors of PyTorch's own files (`.bin`, `.pth`), through its weights-only loader and nothing else.

Such files are pickles, which run code when they are opened plainly. The loader that takes tensors alone needs torch, which
is no dependency of jaxserve: it comes with the extra `torch`.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tensor_source import BFLOAT16
from jaxserve.checkpoint.tokenizer_files import error_line
from jaxserve.checkpoint.trusted_files import checked_file, has_entry, index_counts, index_of_files

BIN_FILE = "pytorch_model.bin"
BIN_INDEX_FILE = "pytorch_model.bin.index.json"
_MAPPED_BYTES = 1 << 28  # that are read of a mapped file before it is opened again


def bin_files(folder: Path) -> list[Path]:
    """The pickled weights of a Hugging Face folder, all there and inside it; empty: it has none.

    Raises:
        CheckpointError: if a file of the index is missing, or leaves the folder.
    """
    if index_counts(folder, BIN_INDEX_FILE, BIN_FILE):
        names = sorted(set(index_of_files(folder, BIN_INDEX_FILE).values()))
        return [checked_file(folder, name) for name in names]
    return [checked_file(folder, BIN_FILE)] if has_entry(folder, BIN_FILE) else []


def load_tensors(path: Path) -> dict[str, Any]:
    """The tensors of one file, mapped and not read where the file's format allows it.

    Raises:
        CheckpointError: without torch; if the file is damaged; if it holds anything but tensors by name, or tensors that
            are larger than it.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]  # here: an extra, and seconds to import
    except ImportError as error:
        raise CheckpointError(
            f"{path.name} holds pickled weights, which only torch can open without running what is in them: get the "
            "model's safetensors version, or pip install torch"
        ) from error
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # UnpicklingError for what is no tensor, others for what is damaged
        raise CheckpointError(
            f"{path} is damaged, or holds more than tensors, which is never opened ({error_line(error)[:200]}): get the "
            "model's safetensors version"
        ) from error
    tensors = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
    ):
        raise CheckpointError(f"{path} must hold tensors by name and nothing else: get the model's safetensors version")
    size = path.stat().st_size
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise CheckpointError(
                f"{path}: tensor {name!r} is no plain array of numbers ({tensor.layout}, {tensor.device}, {tensor.dtype}), "
                "which is not supported: get the model's safetensors version"
            )
        if tensor.numel() * tensor.element_size() > size:  # one number may stand for any number of them
            raise CheckpointError(
                f"{path} is damaged: tensor {name!r} of shape {tuple(tensor.shape)} has more bytes than the file"
            )
    return tensors


def numpy_dtype(tensor: Any, where: str, *, integers: bool = False) -> np.dtype:
    """Raises CheckpointError for a dtype that weights (or, where they may be, whole numbers) cannot have."""
    name = str(tensor.dtype).removeprefix("torch.")
    dtypes = {
        "float64": np.dtype(np.float64),
        "float32": np.dtype(np.float32),
        "float16": np.dtype(np.float16),
        "bfloat16": BFLOAT16,
    }
    if integers:
        dtypes |= {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64), "bool": np.dtype(np.bool_)}
    if name not in dtypes:
        raise CheckpointError(f"{where} has dtype {name}, which is not supported")
    return dtypes[name]


def to_numpy(tensor: Any, dtype: np.dtype) -> np.ndarray:
    """A copy of a tensor's values, whose dtype `numpy_dtype` told."""
    tensor = tensor.detach()  # a parameter of a model gives no values otherwise
    if dtype != BFLOAT16:
        return np.array(tensor.numpy())
    return np.array(tensor.contiguous().view(dtype=_torch_int16(tensor)).numpy()).view(BFLOAT16)


def _torch_int16(tensor: Any) -> Any:
    return tensor.new_empty(0).short().dtype  # NumPy knows no bfloat16: its bits travel as 16-bit integers


class TorchFile:
    """The tensors of one file.

    What was read of a mapped file counts as this process's memory until it is closed: it is opened again now and then.
    """

    def __init__(self, path: Path, *, integers: bool = False) -> None:
        """Raises CheckpointError as `load_tensors`.

        Args:
            integers: tensors may hold whole numbers as well, such as tables of tokens.
        """
        self.path = path
        self._integers = integers
        self._size = path.stat().st_size
        self._tensors = load_tensors(path)
        self._is_mapped = zipfile.is_zipfile(path)
        self._bytes_read = 0

    def close(self) -> None:
        self._tensors.clear()

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> np.dtype:
        return numpy_dtype(self._tensors[name], f"{self.path}: tensor {name!r}", integers=self._integers)

    def read(self, name: str, rows: range | None = None) -> np.ndarray:
        """As `TensorSource.read`."""
        if self._is_mapped:
            self._require_whole()
            if self._bytes_read > _MAPPED_BYTES:
                self._tensors = load_tensors(self.path)
                self._bytes_read = 0
        tensor = self._tensors[name]
        values = to_numpy(tensor if rows is None else tensor[rows.start : rows.stop], self.dtype(name))
        self._bytes_read += values.nbytes
        return values

    def _require_whole(self) -> None:
        """The operating system kills whoever reads of a map what the file has no longer.

        Raises:
            CheckpointError: the file became shorter, as where another process writes it anew, or is gone.
        """
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error_line(error)}") from error
        if size < self._size:
            raise CheckpointError(
                f"{self.path} became shorter while it was read, {size} bytes of {self._size}: fetch the file again"
            )


class BinSource:
    """A `TensorSource` over the pickled files of a Hugging Face folder."""

    def __init__(self, files: list[Path], *, integers: bool = False) -> None:
        """Raises CheckpointError as `load_tensors`, or if two files have a tensor of one name.

        Args:
            integers: as of `TorchFile`.
        """
        self._files: dict[str, TorchFile] = {}
        for path in files:
            file = TorchFile(path, integers=integers)
            for name in file.names():
                if name in self._files:
                    raise CheckpointError(f"{path}: tensor {name!r} is also in {self._files[name].path.name}")
                self._files[name] = file

    def file_names(self) -> dict[str, str]:
        """The file of each tensor."""
        return {name: file.path.name for name, file in self._files.items()}

    def __enter__(self) -> BinSource:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].shape(name)

    def dtype(self, name: str) -> np.dtype:
        return self._files[name].dtype(name)

    def read(self, name: str, rows: range | None = None) -> np.ndarray:
        return self._files[name].read(name, rows)
