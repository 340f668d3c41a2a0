"""Tensors in Meta's original layout: `consolidated.NN.pth`, each with every weight's part of one model-parallel rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.rotary_rows import pairs_apart
from jaxserve.checkpoint.tensor_names import META
from jaxserve.checkpoint.torch_source import load_tensors, numpy_dtype, to_numpy
from jaxserve.checkpoint.trusted_files import checked_file

_FILE = re.compile(r"consolidated\.(\d+)\.pth")


def consolidated_files(folder: Path) -> list[Path]:
    """The files of all ranks, in their order.

    Raises:
        CheckpointError: if there are none, one is missing, or leaves the folder.
    """
    numbers = {int(match[1]): path.name for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))}
    if not numbers:
        raise CheckpointError(f"{folder} has params.json and no consolidated.00.pth: fetch the checkpoint again")
    missing = sorted(set(range(max(numbers) + 1)) - numbers.keys())
    if missing:
        raise CheckpointError(f"{folder}: consolidated.{missing[0]:02d}.pth is missing: fetch the checkpoint again")
    return [checked_file(folder, numbers[number]) for number in sorted(numbers)]


class MetaSource:
    """A `TensorSource` that joins the parts of all ranks, and gives q's and k's rows in Hugging Face's order."""

    def __init__(self, folder: Path, *, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        """Opens every file.

        Raises:
            CheckpointError: as `load_tensors`, or if the files have unlike tensors.
        """
        self._folder = folder
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        files = consolidated_files(folder)
        self._ranks: list[dict[str, Any]] = [load_tensors(path) for path in files]
        first = self._ranks[0]
        for path, rank in zip(files, self._ranks, strict=True):
            if {name: tuple(tensor.shape) for name, tensor in rank.items()} != {
                name: tuple(tensor.shape) for name, tensor in first.items()
            }:
                raise CheckpointError(f"{path} has other tensors than {files[0].name}: fetch the checkpoint again")

    def __enter__(self) -> MetaSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ranks.clear()

    def names(self) -> list[str]:
        return list(self._ranks[0])

    def shape(self, name: str) -> tuple[int, ...]:
        shape, axis = tuple(self._ranks[0][name].shape), self._axis(name)
        if axis is None:
            return shape
        return (*shape[:axis], shape[axis] * len(self._ranks), *shape[axis + 1 :])

    def dtype(self, name: str) -> np.dtype:
        return numpy_dtype(self._ranks[0][name], f"{self._folder}: tensor {name!r}")

    def read(self, name: str) -> np.ndarray:
        where, axis = f"{self._folder}: tensor {name!r}", self._axis(name)
        if axis is None:
            return to_numpy(self._ranks[0][name], where)
        values = np.concatenate([to_numpy(rank[name], where) for rank in self._ranks], axis=axis)
        module = _module(name)
        if module == META.q:
            return pairs_apart(values, self.num_heads, where)
        return pairs_apart(values, self.num_kv_heads, where) if module == META.k else values

    def _axis(self, name: str) -> int | None:
        """Along which axis the ranks share a tensor; None: each has all of it."""
        shape = tuple(self._ranks[0][name].shape)
        if len(shape) != 2:
            return None
        if name == META.embedding:  # along the vocabulary since Llama 3, along the hidden size before
            return 0 if shape[1] == self.hidden_size else 1
        return 1 if _module(name) in (META.o, META.down) else 0


def _module(name: str) -> str:
    """The module of a layer's tensor, such as "attention.wq" of "layers.3.attention.wq.weight"; else the name."""
    return name.split(".", 2)[-1].removesuffix(".weight") if name.startswith("layers.") else name
