"""Parameters in Orbax's format: written piece by piece from NumPy, restored straight onto the devices that use them."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import math
import os
import re
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from jaxserve.checkpoint.atomic import disk_message
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.manifest import ArrayInfo
from jaxserve.checkpoint.pieces import (
    StoredLayout,
    by_piece,
    from_pieces,
    has_arrays,
    layer_of_piece,
    stored_layout,
)
from jaxserve.checkpoint.read_ahead import reading_ahead
from jaxserve.checkpoint.tokenizer_files import error_line
from jaxserve.config import ModelConfig
from jaxserve.models.params import LlamaParams, ParamSpec, param_specs
from jaxserve.models.quantize_params import LayerQuantizer

PIECES_AT_ONCE = 4  # that are read while others are copied to the devices; each takes memory of the host meanwhile
PIECES_AHEAD = 8  # those and the next ones, whose files the system reads before they are asked for
_BYTES_AT_ONCE = 1 << 25  # that are written of a piece

Specs = Mapping[str, ParamSpec]  # of a piece's arrays, by name


def save_piece(arrays: Mapping[str, np.ndarray], specs: Specs, num_heads: int, folder: Path) -> None:
    """Write the arrays of a piece into a folder that is not there yet.

    Uncompressed: weights hardly compress, and unpacking would take longer than reading. When it ends, by an interrupt too,
    nothing writes into the folder any more.

    Raises:
        CheckpointError: if the disk is full or the folder cannot be written.
        ValueError: if the arrays are not those of `specs`.
    """
    found = {name: array.shape for name, array in arrays.items()}
    wanted = {name: spec.shape for name, spec in specs.items()}
    if found != wanted:
        raise ValueError(f"{folder.name}: arrays {found} are not those that its config says: {wanted}")
    layouts = {name: stored_layout(spec.shape, spec.logical_axes, num_heads) for name, spec in specs.items()}
    tree = _nested({name: array.reshape(layouts[name].shape) for name, array in arrays.items()})
    save_args = _nested({name: _save_args(layout) for name, layout in layouts.items()})
    try:
        # Orbax has threads of its own, and an interrupt of the one that waits for them leaves them at work: here that is a
        # thread that no interrupt reaches, and whose end is waited for.
        with _orbax_silent(), ThreadPoolExecutor(1) as thread:
            # It has started then: an interrupt within that would leave a thread that the pool does not know.
            thread.submit(int).result()
            thread.submit(_save, tree, save_args, folder).result()
    except OSError as error:
        raise CheckpointError(disk_message(error, folder)) from error
    except ValueError as error:  # how TensorStore reports what the file system said
        number = re.search(r"os_error_code='(\d+)'", str(error))
        if number is None:
            raise CheckpointError(f"cannot write {folder}: {error_line(error)[:300]}") from error
        told = OSError(int(number[1]), os.strerror(int(number[1])))
        raise CheckpointError(disk_message(told, folder)) from error


def holds_piece(folder: Path, arrays: Mapping[str, ArrayInfo], specs: Specs, num_heads: int) -> bool:
    """Whether a folder said to hold `arrays` has those of `specs`, by its own list of them. Their numbers are not read."""
    layouts = {name: stored_layout(spec.shape, spec.logical_axes, num_heads) for name, spec in specs.items()}
    try:
        with _orbax_silent(), _damage_reported(folder), ocp.Checkpointer(_handler(_NumpyHandler())) as checkpointer:
            stored = dict(_flat(_metadata_tree(checkpointer, folder)))
    except CheckpointError:
        return False
    told = {name: (layouts[name].shape, info.dtype) for name, info in arrays.items() if name in layouts}
    found = {name: (tuple(leaf.shape), np.dtype(leaf.dtype).name) for name, leaf in stored.items()}
    return has_arrays(specs, arrays) and found == told


def _save(tree: Mapping[str, Any], save_args: Mapping[str, Any], folder: Path) -> None:
    numpy_handler = _NumpyHandler()
    handler = _handler(numpy_handler, use_compression=False)
    with numpy_handler.all_written(), ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree, save_args=save_args))


def _save_args(layout: StoredLayout) -> ocp.SaveArgs:
    return ocp.SaveArgs(shard_axes=() if layout.axis is None else (layout.axis,))


def restore_weights(
    folder: Path,
    config: ModelConfig,
    dtype: jnp.dtype,
    shardings: LlamaParams | None = None,
    advance: Callable[[int], None] = lambda amount: None,
    *,
    quantizer: LayerQuantizer | None = None,
    pieces_at_once: int = PIECES_AT_ONCE,
    pieces_ahead: int = PIECES_AHEAD,
) -> LlamaParams:
    """Read parameters onto devices, each device the bytes of its own shards, several pieces at once.

    Args:
        config: of the model as it is stored.
        dtype: of every array but the norms, which are float32, and quantized weights, which stay what they are.
        shardings: a `LlamaParams` of `jax.sharding.Sharding`s; None: everything on the first device.
        advance: is told the bytes of the arrays that were read.
        quantizer: of the weights of a dense model's layers, each of which is quantized from the numbers that are stored,
            whatever `dtype` says, as soon as it is there; None: none are.
        pieces_at_once: each of which takes its size of the host's memory; where layers are quantized, of the devices' too.
        pieces_ahead: whose files the system reads into its cache, counted from the first that is not done; 0: none.

    Raises:
        CheckpointError: if a file is missing or damaged, or the arrays do not fit the config.
        ValueError: if a sharding does not divide its array.
    """
    specs = param_specs(config)
    if shardings is None:
        first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        by_name, places = by_piece(specs), by_piece(jax.tree.map(lambda _: first, specs))
    else:
        by_name, places = by_piece(specs), by_piece(shardings)
        jax.tree.map(lambda spec, sharding: sharding.shard_shape(spec.shape), specs, shardings)  # raises ValueError

    # The largest first: what is worked on last has nothing to read beside it.
    order = sorted(by_name, key=lambda piece: -sum(spec.num_bytes(dtype) for spec in by_name[piece].values()))
    # Of a model that other processes share, the files hold what is read elsewhere.
    is_whole = all(place.is_fully_addressable for piece in places.values() for place in piece.values())
    ahead = [folder / piece for piece in order] if is_whole and pieces_ahead else []
    with reading_ahead(ahead, pieces_ahead) as done_with_one:

        def restore(piece: str) -> dict[str, jax.Array]:
            layer = layer_of_piece(piece)
            as_stored = () if quantizer is None or layer is None else quantizer.weights_of(layer)
            arrays = _restore_piece(folder / piece, by_name[piece], places[piece], config.num_heads, dtype, as_stored)
            advance(sum(spec.num_bytes(dtype) for spec in by_name[piece].values()))
            done_with_one()
            return arrays

        restored: dict[str, dict[str, Any]] = {}
        # What waits to be quantized takes memory of the devices, so that reading does not run ahead of it.
        at_once = len(order) if quantizer is None else pieces_at_once
        with _orbax_silent(), ThreadPoolExecutor(pieces_at_once) as threads:
            for piece, arrays in zip(order, _in_order(threads, restore, order, at_once), strict=True):
                layer = layer_of_piece(piece)
                restored[piece] = arrays
                if quantizer is not None and layer is not None:  # one by one: hosts that share a model must do it alike
                    restored[piece] = arrays | quantizer.quantized(layer, arrays, donate=True)
    extra = sorted(path.name for path in folder.iterdir() if path.name not in by_name)
    if extra:
        raise CheckpointError(f"{folder}: {extra[0]!r} is not part of this model: convert the model again")
    return from_pieces(restored, specs)


def _in_order(
    threads: ThreadPoolExecutor, work: Callable[[str], dict[str, jax.Array]], pieces: Sequence[str], at_once: int
) -> Iterator[dict[str, jax.Array]]:
    """What the work gives for each piece, in turn; it is begun for so many at once, until what they gave is done with."""
    left = iter(pieces)
    begun = deque(threads.submit(work, piece) for piece in itertools.islice(left, at_once))
    while begun:
        yield begun.popleft().result()
        begun.extend(threads.submit(work, piece) for piece in itertools.islice(left, 1))


def read_piece(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of a piece as they are stored, on the host. An axis may be split: see `StoredLayout`.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """
    with _orbax_silent(), _damage_reported(folder), ocp.Checkpointer(_handler(_NumpyHandler())) as checkpointer:
        tree = _metadata_tree(checkpointer, folder)
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        args = ocp.args.PyTreeRestore(restore_args=restore_args)
        return dict(_flat(checkpointer.restore(folder.absolute(), args=args)))


def _restore_piece(
    folder: Path,
    specs: Specs,
    shardings: Mapping[str, jax.sharding.Sharding],
    num_heads: int,
    dtype: jnp.dtype,
    as_stored: Collection[str],
) -> dict[str, jax.Array]:
    """
    Args:
        as_stored: names of the arrays that keep the dtype that they have in the files, or the widest that jax has.
    """
    layouts = {name: stored_layout(spec.shape, spec.logical_axes, num_heads) for name, spec in specs.items()}
    places = {name: _stored_sharding(name, spec.shape, layouts[name], shardings[name]) for name, spec in specs.items()}
    with _damage_reported(folder), ocp.Checkpointer(_handler(_NumpyHandler())) as checkpointer:
        stored = dict(_flat(_metadata_tree(checkpointer, folder)))
        _check_shapes({name: tuple(leaf.shape) for name, leaf in stored.items()}, layouts, folder)
        targets = {
            name: jax.ShapeDtypeStruct(
                layouts[name].shape,
                jax.dtypes.canonicalize_dtype(stored[name].dtype) if name in as_stored else element_type(spec, dtype),
                sharding=places[name],
            )
            for name, spec in specs.items()
        }
        tree = _nested(targets)
        args = ocp.args.PyTreeRestore(item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
        restored = dict(_flat(checkpointer.restore(folder.absolute(), args=args)))
    return {name: _merged(restored[name], spec.shape, shardings[name]) for name, spec in specs.items()}


class _EndsTogether(ocp.type_handlers.TypeHandler):
    """Reads that end only when all of them have, for a handler to inherit before its own: see `all_ended`."""

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        read = super().metadata
        return await all_ended(read([info]) for info in infos)

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        read = super().deserialize
        pairs = zip(infos, args or [ocp.RestoreArgs()] * len(infos), strict=True)
        return await all_ended(read([info], [arg]) for info, arg in pairs)


class _NumpyHandler(_EndsTogether, ocp.type_handlers.NumpyHandler):
    def __init__(self) -> None:
        # Nobody changes the arrays meanwhile. Versions before 0.12.8, which a script may find where jaxserve is not
        # installed, cannot be told so: they take a copy of a piece.
        if "deepcopy_host_arrays" in inspect.signature(super().__init__).parameters:
            super().__init__(deepcopy_host_arrays=False)
        else:
            super().__init__()
        self._writes: list[Any] = []
        self._one_at_a_time = threading.Lock()

    async def _open_and_write(self, value: np.ndarray, tspec: dict[str, Any], ts_context: Any) -> None:
        """Some chunks after others, each on the disk before the next: the store holds a copy of what it writes till then.

        Orbax writes the arrays of a piece at once, and all of each.
        """
        store = await tensorstore.open(tensorstore.Spec(tspec), create=True, open=True, context=ts_context)
        for part in _parts_of_chunks(value.shape, value.itemsize, store.chunk_layout.write_chunk.shape):
            with self._one_at_a_time:  # each array has a thread and an event loop of its own
                await store[part].write(value[part], can_reference_source_data_indefinitely=True)

    async def serialize(
        self, values: Sequence[np.ndarray], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Each array in a thread of its own: several in one would not end together either."""
        writes: list[Any] = []
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(infos), strict=True):
            writes += await super().serialize([value], [info], [arg])
        self._writes += writes
        return writes

    @contextmanager
    def all_written(self) -> Iterator[None]:
        """Ends when every write has: Orbax goes on at the first that fails."""
        try:
            yield
        finally:
            for write in self._writes:
                with suppress(Exception):  # Orbax has raised the first, and others are of the same kind
                    write.result()


def _parts_of_chunks(
    shape: tuple[int, ...], itemsize: int, chunk: Sequence[int | None] | None
) -> Iterator[tuple[slice, ...]]:
    """Parts of an array that hold whole chunks of it, which follow each other along one axis: `_BYTES_AT_ONCE` of them.

    Args:
        chunk: the sizes of one; None: a scalar's.
    """
    cut = next(((axis, size) for axis, size in enumerate(chunk or ()) if size is not None and size < shape[axis]), None)
    if cut is None:
        yield (slice(None),) * len(shape)
        return
    axis, size = cut
    chunk_bytes = math.prod(shape) // shape[axis] * size * itemsize
    step = max(1, _BYTES_AT_ONCE // chunk_bytes) * size
    for start in range(0, shape[axis], step):
        yield (*(slice(None),) * axis, slice(start, min(start + step, shape[axis])))


class _ArrayHandler(_EndsTogether, ocp.type_handlers.ArrayHandler):
    pass


async def all_ended(reads: Iterable[Awaitable[Sequence[Any]]]) -> list[Any]:
    """What Orbax reads, array by array, all at once; the first error is raised when every read has ended.

    Orbax raises it at once and closes its event loop, while TensorStore's threads still read other arrays and report to that
    loop when they are done: an error in a thread of theirs, which may end the process.
    """
    arrays: list[Any] = []
    for result in await asyncio.gather(*reads, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        arrays += result
    return arrays


def _handler(numpy_handler: _NumpyHandler, *, use_compression: bool = True) -> ocp.PyTreeCheckpointHandler:
    handlers = (np.ndarray, numpy_handler), (jax.Array, _ArrayHandler())
    registry = ocp.type_handlers.create_type_handler_registry(*handlers)
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=use_compression, type_handler_registry=registry)


@contextmanager
def _orbax_silent() -> Iterator[None]:
    """What fails Orbax logs beside raising it, with a traceback for each of its threads."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def element_type(spec: ParamSpec, dtype: jnp.dtype) -> jnp.dtype:
    """Of an array in a model whose weights have `dtype`: norms are float32, and quantized weights what they are."""
    return spec.element_type(dtype)


def _stored_sharding(
    name: str, shape: tuple[int, ...], layout: StoredLayout, sharding: jax.sharding.Sharding
) -> jax.sharding.Sharding:
    """The sharding of an array as it is stored, that puts the bytes where `sharding` has them."""
    if layout.shape == shape or layout.axis is None or not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    axes = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    axes.insert(layout.axis + 1, None)
    split = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*axes))
    try:
        split.shard_shape(layout.shape)
    except ValueError as error:
        raise ValueError(
            f"{name}: {sharding.spec} does not evenly divide the {layout.shape[layout.axis]} chunks along axis "
            f"{layout.axis} of {shape}"
        ) from error
    return split


def _merged(array: jax.Array, shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> jax.Array:
    """The array with its split axis made one again, each device on its own."""
    if array.shape == shape:
        return array
    local = sharding.shard_shape(shape)
    shards = [shard.data.reshape(local) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _metadata_tree(checkpointer: ocp.Checkpointer, folder: Path) -> Mapping[str, Any]:
    metadata = checkpointer.metadata(folder.absolute()).item_metadata
    if metadata is None:  # Orbax logs why and raises nothing
        raise CheckpointError(f"{folder} is damaged or incomplete (its list of arrays is not readable): convert again")
    return metadata.tree


@contextmanager
def _damage_reported(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds for missing and damaged files
        raise CheckpointError(
            f"{folder} is damaged or incomplete ({error_line(error)[:300]}): convert the model again"
        ) from error


def _check_shapes(stored: Mapping[str, tuple[int, ...]], layouts: Mapping[str, StoredLayout], folder: Path) -> None:
    for name in sorted(stored.keys() | layouts.keys()):
        wanted = layouts[name].shape if name in layouts else None
        if stored.get(name) != wanted:
            raise CheckpointError(
                f"{folder}: array {name!r} has shape {stored.get(name)}, its config says {wanted}: convert the model again"
            )


def _nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Names with slashes as dictionaries in dictionaries."""
    tree: dict[str, Any] = {}
    for name, value in arrays.items():
        *outer, last = name.split("/")
        level = tree
        for key in outer:
            level = level.setdefault(key, {})
        level[last] = value
    return tree


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The inverse of `_nested`."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value
