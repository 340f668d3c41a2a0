"""Tensors in Meta's original layout: `consolidated.NN.pth`, each with every weight's part of one model-parallel rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.rotary_rows import read_pairs_apart
from jaxserve.checkpoint.tensor_names import META
from jaxserve.checkpoint.tensor_source import common_dtype, joined
from jaxserve.checkpoint.torch_source import TorchFile
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
    for place, number in enumerate(sorted(numbers)):  # and not up to the largest, which may be any
        if number != place:
            raise CheckpointError(f"{folder}: consolidated.{place:02d}.pth is missing: fetch the checkpoint again")
    return [checked_file(folder, numbers[number]) for number in sorted(numbers)]


class MetaSource:
    """A `TensorSource` that joins the parts of all ranks, and gives q's and k's rows in Hugging Face's order."""

    def __init__(self, folder: Path, *, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        """Opens every file.

        Raises:
            CheckpointError: as `load_tensors`, or if the files have unlike tensors, or norms that are not the same.
        """
        self._folder = folder
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        files = consolidated_files(folder)
        self._ranks = [TorchFile(path) for path in files]
        shapes = [{name: rank.shape(name) for name in rank.names()} for rank in self._ranks]
        for path, own in zip(files, shapes, strict=True):
            if own != shapes[0]:
                raise CheckpointError(f"{path} has other tensors than {files[0].name}: fetch the checkpoint again")
        for name in self.names():
            if shapes[0][name] == (hidden_size,) and not name.endswith(META.ignored):
                self._check_norm(name, files)

    def _check_norm(self, name: str, files: Sequence[Path]) -> None:
        """Every rank has all of a norm. Raises CheckpointError if two have others, as ranks of two models would."""
        dtype = self.dtype(name)
        first, *others = (rank.read(name).astype(dtype, copy=False).tobytes() for rank in self._ranks)
        for path, other in zip(files[1:], others, strict=True):
            if other != first:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is not the same as in {files[0].name}, and every rank must have the same "
                    "norms: fetch the checkpoint again"
                )

    def __enter__(self) -> MetaSource:
        return self

    def __exit__(self, *exception: object) -> None:
        for rank in self._ranks:
            rank.close()

    def names(self) -> list[str]:
        return self._ranks[0].names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape, axis = self._ranks[0].shape(name), self._axis(name)
        if axis is None:
            return shape
        return (*shape[:axis], shape[axis] * len(self._ranks), *shape[axis + 1 :])

    def dtype(self, name: str) -> np.dtype:
        """One that holds every rank's part."""
        return common_dtype(rank.dtype(name) for rank in self._ranks)

    def read(self, name: str, rows: range | None = None) -> np.ndarray:
        shape, num_heads = self.shape(name), {META.q: self.num_heads, META.k: self.num_kv_heads}.get(_module(name))
        if rows is None and shape:
            rows = range(shape[0])
        if rows is None or num_heads is None:
            return self._read_rows(name, rows)
        where = f"{self._folder}: tensor {name!r}"
        return read_pairs_apart(lambda rows: self._read_rows(name, rows), shape, num_heads, rows, where)

    def _read_rows(self, name: str, rows: range | None) -> np.ndarray:
        """As they lie in the ranks' files; None: a tensor without rows."""
        axis = self._axis(name)
        if rows is None or axis is None:
            return self._ranks[0].read(name, rows).astype(self.dtype(name), copy=False)
        if axis == 1:
            return joined([rank.read(name, rows) for rank in self._ranks], axis=1)
        size = self._ranks[0].shape(name)[0]
        of_ranks = [
            range(max(rows.start - number * size, 0), min(rows.stop - number * size, size))
            for number in range(len(self._ranks))
        ]
        parts = [rank.read(name, own) for rank, own in zip(self._ranks, of_ranks, strict=True) if own]
        return joined(parts, axis=0).astype(self.dtype(name), copy=False)

    def _axis(self, name: str) -> int | None:
        """Along which axis the ranks share a tensor; None: each has all of it."""
        shape = self._ranks[0].shape(name)
        if len(shape) != 2:
            return None
        if name == META.embedding:  # along the vocabulary since Llama 3, along the hidden size before
            return 0 if shape[1] == self.hidden_size else 1
        return 1 if _module(name) in (META.o, META.down) else 0


def _module(name: str) -> str:
    """The module of a layer's tensor, such as "attention.wq" of "layers.3.attention.wq.weight"; else the name."""
    return name.split(".", 2)[-1].removesuffix(".weight") if name.startswith("layers.") else name
