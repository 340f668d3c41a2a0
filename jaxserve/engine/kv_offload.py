"""Moves KV pages between the devices and host memory, as the scheduler has decided (`jaxserve.engine.host_pages`)."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.executable_cache import ExecutableCache
from jaxserve.engine.host_pages import PageCopy
from jaxserve.engine.memory_plan import OutOfMemoryError
from jaxserve.models.kv_cache import KVCache, kv_bytes_per_token
from jaxserve.sharding.placement import put_replicated, replicated
from jaxserve.sharding.rules import partition_spec

_GIB = 1024**3
_PAGE_AXES = ("pages", "keys_and_values", "layers", "page_size", "kv_heads", "head_dim")
_COPY_SIZES = (4, 16)  # pages that one program copies; each size is compiled
_MAX_STAGED_BYTES = 1 << 28  # of one device, on their way to host memory
_MAX_RESTORES = 4  # programs that were launched and not waited for; each has its pages on the device twice


@dataclass(frozen=True)
class OffloadSizes:
    """How much host memory KV pages take.

    Attributes:
        page_bytes: of one page's keys and values, over all devices of this process.
        device_page_bytes: those of one device.
        num_places: pages that host memory holds.
    """

    page_bytes: int
    device_page_bytes: int
    num_places: int

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * self.num_places

    @property
    def max_storing(self) -> int:
        """Pages that may be on their way to host memory."""
        return max(2 * _COPY_SIZES[-1], min(128, _MAX_STAGED_BYTES // self.device_page_bytes))

    @property
    def staging_bytes(self) -> int:
        """Of one device, for pages on their way in either direction."""
        return (self.max_storing + _MAX_RESTORES * _COPY_SIZES[-1]) * self.device_page_bytes


def plan_offload(model_config: ModelConfig, config: EngineConfig, mesh: Mesh, dtype: jnp.dtype) -> OffloadSizes | None:
    """What `kv_offload_gib` is good for; None: nothing is asked for.

    Raises:
        OutOfMemoryError: it is not enough for one page.
    """
    if not config.kv_offload_gib:
        return None
    wanted = int(config.kv_offload_gib * _GIB)
    device_page_bytes = config.page_size * kv_bytes_per_token(model_config, dtype) // mesh.size
    page_bytes = device_page_bytes * len(mesh.local_devices)
    if wanted < page_bytes:
        raise OutOfMemoryError(
            f"--kv-offload-gib {config.kv_offload_gib:g} has no room for one KV page of {page_bytes} bytes: use "
            f"{math.ceil(page_bytes / _GIB * 1e6) / 1e6:.6f} or more"
        )
    return OffloadSizes(page_bytes, device_page_bytes, wanted // page_bytes)


def check_offload(sizes: OffloadSizes, config: EngineConfig, room: int, room_in_words: str) -> None:
    """Refuses more host memory than there is, with the most that there is.

    Args:
        room: bytes that it may take.
        room_in_words: what those are, after their number.

    Raises:
        OutOfMemoryError: `sizes` are more.
    """
    if sizes.num_bytes <= room:
        return
    room = max(0, room)
    places = 100 if room >= _GIB else 1_000_000
    most = math.floor(room / _GIB * places) / places
    remedy = f"use {most:g} at most, less what other programs need"
    if most * _GIB < sizes.page_bytes:
        remedy = "leave it out, or free memory of this machine"
    replicas = f" for each of {config.data_parallel_size} replicas" if config.data_parallel_size > 1 else ""
    raise OutOfMemoryError(
        f"--kv-offload-gib {config.kv_offload_gib:g} is more than the {most:g} GiB {room_in_words}{replicas}: {remedy}"
    )


class PageCopier:
    """Copies pages between the KV cache and host memory. Used by the engine's thread.

    Pages that leave are gathered on the device by a program that is launched before the step that overwrites them, so that
    no step waits; a thread of its own fetches them. Pages that come back are scattered into the cache by a program that is
    launched before the step that reads them. Each device's part of a page is kept by itself.

    Args:
        sizes: how much host memory to take; it is touched only as pages come.
    """

    def __init__(self, sizes: OffloadSizes, cache: KVCache, mesh: Mesh) -> None:
        layers, num_pages, *rest = cache.k_pages.shape
        self._num_pages = num_pages
        self._sizes = sizes
        self._replicated = replicated(mesh)
        self._dtype = cache.k_pages.dtype
        self._page_shape = (2, layers, *rest)  # keys and values, layers, page_size, kv_heads, head_dim
        self._sharding = NamedSharding(mesh, partition_spec(_PAGE_AXES))
        shard = self._sharding.shard_shape((1, *self._page_shape))[1:]
        self._devices = mesh.local_devices
        self._host = [np.empty((sizes.num_places, *shard), self._dtype) for _ in self._devices]
        self._gather: dict[int, Any] = {}
        self._scatter: dict[int, Any] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-kv-offload")
        self._storing: deque[tuple[Future[None], tuple[int, ...]]] = deque()  # with the places that each writes
        self._num_storing = 0
        self._written_by: dict[int, Future[None]] = {}  # by place
        self._restoring: deque[jax.Array] = deque()

    def compile(self, programs: ExecutableCache, cache: KVCache) -> None:
        """Makes the programs; nothing is compiled after it."""
        mesh, content, whole = self._sharding.mesh, self._sharding.spec, PartitionSpec()
        specs = jax.tree.map(lambda array: array.sharding.spec, cache)
        gather = jax.jit(jax.shard_map(gather_pages, mesh=mesh, in_specs=(specs, whole), out_specs=content))
        scatter = jax.jit(
            jax.shard_map(scatter_pages, mesh=mesh, in_specs=(specs, content, whole), out_specs=(specs, whole)),
            donate_argnums=(0,),
        )
        for size in _COPY_SIZES:
            pages = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self._replicated)
            data = jax.ShapeDtypeStruct((size, *self._page_shape), self._dtype, sharding=self._sharding)
            load = programs.load_or_compile
            self._gather[size] = load(f"gather pages {size}", lambda pages=pages: gather.lower(cache, pages))
            self._scatter[size] = load(
                f"scatter pages {size}", lambda data=data, pages=pages: scatter.lower(cache, data, pages)
            )

    @property
    def programs(self) -> tuple[Any, ...]:
        """The compiled ones."""
        return (*self._gather.values(), *self._scatter.values())

    @property
    def num_places(self) -> int:
        """Pages that host memory holds."""
        return self._sizes.num_places

    @property
    def staging_bytes(self) -> int:
        """Of one device, for pages on their way."""
        return self._sizes.staging_bytes

    def room(self) -> int:
        """Pages that may be sent to host memory now, without anybody waiting for those that were sent before.

        Raises whatever went wrong with those.
        """
        while self._storing and self._storing[0][0].done():
            self._settle_oldest()
        return self._sizes.max_storing - self._num_storing

    def run(self, cache: KVCache, copies: Sequence[PageCopy]) -> KVCache:
        """Launches copies in their order, and returns the cache that the next step is to use; `cache` may be donated."""
        for to_host, group in itertools.groupby(copies, lambda copy: copy.to_host):
            alike = list(group)
            for first in range(0, len(alike), _COPY_SIZES[-1]):
                part = alike[first : first + _COPY_SIZES[-1]]
                pages, places = [copy.page for copy in part], [copy.place for copy in part]
                if to_host:
                    self._store(cache, pages, places)
                else:
                    cache = self._restore(cache, pages, places)
        return cache

    def rehearse(self, cache: KVCache) -> KVCache:
        """Runs every program once, without a page; the caller goes on with the cache that it returns."""
        for size in _COPY_SIZES:
            nothing = self._page_indices([], size)
            cache, _ = self._scatter[size](cache, self._gather[size](cache, nothing), nothing)
        return cache

    def close(self) -> None:
        """Ends the thread, when what it has begun is done, and gives the host memory back."""
        self._thread.shutdown(cancel_futures=True)
        self._host = []

    def _store(self, cache: KVCache, pages: list[int], places: list[int]) -> None:
        while self._num_storing + len(pages) > self._sizes.max_storing and self._storing:
            self._settle_oldest()
        size = _padded(len(pages))
        data = self._gather[size](cache, self._page_indices(pages, size))
        for shard in data.addressable_shards:
            shard.data.copy_to_host_async()
        future = self._thread.submit(self._keep, data, places)
        self._storing.append((future, tuple(places)))
        self._num_storing += len(places)
        self._written_by.update(dict.fromkeys(places, future))

    def _keep(self, data: jax.Array, places: list[int]) -> None:
        """The thread's part: waits for gathered pages and writes them to their places."""
        parts = {shard.device: shard.data for shard in data.addressable_shards}
        for device, host in zip(self._devices, self._host, strict=True):
            fetched = np.asarray(parts[device])
            for row, place in enumerate(places):
                host[place].view(np.uint8)[...] = fetched[row].view(np.uint8)

    def _settle_oldest(self) -> None:
        """Waits for the pages that were sent first."""
        future, places = self._storing.popleft()
        future.result()
        self._num_storing -= len(places)
        for place in set(places):  # one that was given up and taken again before the step is there twice
            if self._written_by[place] is future:
                del self._written_by[place]

    def _restore(self, cache: KVCache, pages: list[int], places: list[int]) -> KVCache:
        for place in places:
            if place in self._written_by:
                self._written_by[place].result()
        while len(self._restoring) >= _MAX_RESTORES:
            jax.block_until_ready(self._restoring.popleft())
        size = _padded(len(pages))
        parts = [
            self._staged(host, places, size, device) for device, host in zip(self._devices, self._host, strict=True)
        ]
        data = jax.make_array_from_single_device_arrays((size, *self._page_shape), self._sharding, parts)
        cache, done = self._scatter[size](cache, data, self._page_indices(pages, size))
        self._restoring.append(done)
        return cache

    def _staged(self, host: np.ndarray, places: list[int], size: int, device: Any) -> jax.Array:
        """One device's part of some pages, padded. A copy, since the places may be written while it is on its way."""
        staged = np.empty((size, *host.shape[1:]), host.dtype)
        np.take(host.view(np.uint8), places, axis=0, out=staged[: len(places)].view(np.uint8), mode="clip")
        return jax.device_put(staged, device)

    def _page_indices(self, pages: list[int], size: int) -> jax.Array:
        """Padded with pages that are not there: those are dropped when they are written."""
        return put_replicated(np.array(pages + [self._num_pages] * (size - len(pages)), np.int32), self._replicated)


def gather_pages(cache: KVCache, pages: Int32[Array, " n"]) -> Array:
    """One device's keys and values of some pages: [n, 2, layers, page_size, kv_heads, head_dim].

    For a page that is not there it has those of another one.
    """
    with jax.named_scope("gather_pages"):
        both = [jnp.take(array, pages, axis=1, mode="clip") for array in (cache.k_pages, cache.v_pages)]
        return jnp.moveaxis(jnp.stack(both), 2, 0)


def scatter_pages(cache: KVCache, content: Array, pages: Int32[Array, " n"]) -> tuple[KVCache, Int32[Array, " n"]]:
    """The cache with what `gather_pages` gave at other pages, and something to wait for.

    For a page that is not there the content is dropped.
    """
    with jax.named_scope("scatter_pages"):
        keys, values = jnp.moveaxis(content, 0, 2)
        cache = KVCache(
            k_pages=cache.k_pages.at[:, pages].set(keys, mode="drop"),
            v_pages=cache.v_pages.at[:, pages].set(values, mode="drop"),
        )
        return cache, pages + 1


def _padded(count: int) -> int:
    return next(size for size in _COPY_SIZES if size >= count)
