"""What an engine takes of its devices, as measured; and what a device says that has no more, as people can use it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.engine.capacity import WHOLE, MemoryShare, usable_bytes
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.memory_plan import HostMemory, MemoryPlan, MemoryUse, OutOfMemoryError

_GIB = 1024**3
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ASKED = re.compile(rf"allocat\w+ ([\d.]+) ?({'|'.join(_UNITS)})")


def memory_plan(
    use: MemoryUse,
    config: EngineConfig,
    mesh: Mesh,
    limits: SchedulerLimits,
    host: HostMemory | None,
    share: MemoryShare = WHOLE,
) -> MemoryPlan:
    """Where the memory goes, which is known when all is compiled."""
    if host is not None and mesh.local_devices[0].platform == "cpu":
        use = dataclasses.replace(use, evicted=host.num_bytes // len(mesh.local_devices))
    usable, usable_as = usable_bytes(config, mesh, use, share)
    return MemoryPlan(mesh.devices.flat[0].device_kind, use, usable, usable_as, limits, host)


@contextmanager
def told_when_exhausted(limits: SchedulerLimits, page_bytes: int) -> Iterator[None]:
    """What compilers and allocators raise where a device has no memory left becomes an error for people.

    Args:
        page_bytes: of one device.

    Raises:
        OutOfMemoryError: it tells what was asked for, and how many pages leave room for that.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(_message(str(error), limits, page_bytes)) from error


def _message(error: str, limits: SchedulerLimits, page_bytes: int) -> str:
    asked = _ASKED.search(error)
    wanted = "more memory" if asked is None else f"{float(asked[1]) * _UNITS[asked[2]] / _GIB:.2f} GiB more"
    fitting = 0
    if asked is not None:
        fitting = limits.num_pages - int(-(-float(asked[1]) * _UNITS[asked[2]] // page_bytes))
    pages = f"--num-pages {fitting} or less" if fitting > 0 else f"fewer --num-pages than {limits.num_pages}"
    return (
        f"a device has no memory left: {wanted} was asked for beside the weights and {limits.num_pages} KV pages of "
        f"{page_bytes} bytes; use {pages}, less than --max-num-batched-tokens {limits.max_num_batched_tokens}, or less than "
        f"--max-num-seqs {limits.max_num_seqs}"
    )
