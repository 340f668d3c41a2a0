"""How a checkpoint is cut into pieces, each written, resumed and restored by itself: embedding, every layer, the head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.manifest import ArrayInfo
from jaxserve.config import ModelConfig
from jaxserve.models.param_spec import ParamSpec
from jaxserve.models.params import LlamaParams, param_specs
from jaxserve.sharding.rules import LOGICAL_TO_MESH

EMBEDDING_PIECE = "embedding"
HEAD_PIECE = "head"  # the final norm, and the output head where it is not the embedding
_LAYER_PREFIX = "layer_"
_FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def layer_piece(layer: int) -> str:
    return f"{_LAYER_PREFIX}{layer:03d}"


def layer_of_piece(piece: str) -> int | None:
    """Its number, where the piece is a layer."""
    return int(piece.removeprefix(_LAYER_PREFIX)) if piece.startswith(_LAYER_PREFIX) else None


def piece_names(config: ModelConfig) -> tuple[str, ...]:
    """All pieces, in the order in which they are converted."""
    return (EMBEDDING_PIECE, *(layer_piece(layer) for layer in range(config.num_layers)), HEAD_PIECE)


def by_piece(tree: LlamaParams) -> dict[str, dict[str, Any]]:
    """The leaves of a model (arrays, specs, shardings) by piece and by name within it, without what is None.

    A weight that is itself a structure of several arrays has names such as "wqkv/scales".
    """
    pieces: dict[str, dict[str, Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        piece, name = _place(path)
        pieces.setdefault(piece, {})[name] = leaf
    return pieces


def from_pieces(pieces: dict[str, dict[str, Any]], like: LlamaParams) -> LlamaParams:
    """The inverse of `by_piece`: a model with the structure of `like`."""
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    places = [_place(path) for path, _ in paths]
    return jax.tree.unflatten(structure, [pieces[piece][name] for piece, name in places])


def check_arrays(config: ModelConfig, arrays: Mapping[str, ArrayInfo], where: str) -> None:
    """Raises CheckpointError if arrays, by piece and name, are not those of a model with this config."""
    specs = {
        f"{piece}/{name}": spec
        for piece, specs in by_piece(param_specs(config)).items()
        for name, spec in specs.items()
    }
    for name in sorted(specs.keys() | arrays.keys()):
        shape = arrays[name].shape if name in arrays else None
        wanted = specs[name].shape if name in specs else None
        if shape != wanted:
            raise CheckpointError(
                f"{where}: array {name!r} has shape {shape}, its config says {wanted}: convert the model again"
            )
    for name, spec in specs.items():
        # Numbers of one kind would be read as those of another.
        if arrays[name].dtype not in _dtypes(spec):
            wanted = "a float" if spec.dtype is None else spec.dtype
            raise CheckpointError(
                f"{where}: array {name!r} has dtype {arrays[name].dtype}, its config says {wanted}: convert the model again"
            )


def has_arrays(specs: Mapping[str, ParamSpec], arrays: Mapping[str, ArrayInfo]) -> bool:
    """Whether the arrays of one piece are those of its specs, as `check_arrays` asks for all of them."""
    return specs.keys() == arrays.keys() and all(
        arrays[name].shape == spec.shape and arrays[name].dtype in _dtypes(spec) for name, spec in specs.items()
    )


def _dtypes(spec: ParamSpec) -> tuple[str, ...]:
    """What an array may be stored in: what is not quantized, any float, as it came."""
    return _FLOATS if spec.dtype is None else (str(spec.dtype),)


def path_names(path: tuple[Any, ...]) -> list[str]:
    """The names of fields and the numbers of items that lead to a leaf, from jax's path to it."""
    return [str(getattr(key, "name", getattr(key, "idx", getattr(key, "key", None)))) for key in path]


def _place(path: tuple[Any, ...]) -> tuple[str, str]:
    names = path_names(path)
    if names[0] == "layers":
        return layer_piece(int(names[1])), "/".join(names[2:])
    return EMBEDDING_PIECE if names[0] == "embedding" else HEAD_PIECE, "/".join(names)


@dataclass(frozen=True)
class StoredLayout:
    """How one array lies on the disk: in chunks along the axis that tensor parallelism cuts.

    A chunk is the least that is read. With chunks that end where the shards of every possible tensor-parallel size end,
    each device reads its own bytes and no others.

    Attributes:
        shape: as stored: that axis may be split in two, the number of chunks and what is in each, which moves no byte.
        axis: of the chunks; None: the array is one chunk.
    """

    shape: tuple[int, ...]
    axis: int | None


def stored_layout(shape: tuple[int, ...], logical_axes: tuple[str, ...], num_heads: int) -> StoredLayout:
    """The layout of an array with these axes.

    Args:
        num_heads: of the model: tensor-parallel sizes are divisors of it, so as many chunks suit all of them.
    """
    axis = next((index for index, name in enumerate(logical_axes) if name in LOGICAL_TO_MESH), None)
    if axis is None:
        return StoredLayout(shape, None)
    size = shape[axis]
    chunks = math.gcd(size, num_heads)
    if chunks in (1, size):
        return StoredLayout(shape, axis if chunks > 1 else None)
    return StoredLayout((*shape[:axis], chunks, size // chunks, *shape[axis + 1 :]), axis)
