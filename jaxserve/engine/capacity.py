"""Sizes that the configuration leaves open, from the device and the memory that it has; and whether those asked for fit."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.device_memory import usable_device_bytes, usable_in_words
from jaxserve.engine.host_memory import available_host_bytes
from jaxserve.engine.kv_offload import OffloadSizes, check_offload, plan_offload
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.memory_plan import MemoryUse, OutOfMemoryError
from jaxserve.models.kv_cache import kv_bytes_per_token
from jaxserve.models.shard_layout import ShardLayout

logger = logging.getLogger(__name__)

_GIB = 1024**3
_CPU_CACHE_BYTES = _GIB  # for the KV cache on a CPU whose memory others use too, unless a context is asked for
# Left of a GPU's memory where more pages would serve the prefix cache alone: a step may take more work space than expected.
_SPARE_BYTES = 3 * _GIB
_MOST_CONTEXTS = 16  # for each sequence that runs: of a small model a card would hold millions of pages
_SEQUENCES_OF_MODE = {"local": 4, "interactive": 1}
_LOCAL_CONTEXT = 8192  # tokens
_USUAL_PAGE = EngineConfig().page_size


@dataclass(frozen=True)
class DeviceDefaults:
    """Sizes for a kind of device where the configuration leaves them open."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_rows: int


@dataclass(frozen=True)
class MemoryShare:
    """What of a CPU's free memory one engine may plan with: it is the memory of all of the process's engines.

    Attributes:
        num_engines: that are still to plan, this one included, and get as much each. Those before have taken theirs.
        placed: bytes of each device that this one has taken already.
    """

    num_engines: int = 1
    placed: int = 0

    def of(self, free: int) -> int:
        """What it may still take of the bytes that are free."""
        return (free + self.placed) // self.num_engines - self.placed


WHOLE = MemoryShare()
_CPU_DEFAULTS = DeviceDefaults(max_num_seqs=8, max_num_batched_tokens=256, max_prefill_rows=4)
_GPU_DEFAULTS = DeviceDefaults(max_num_seqs=64, max_num_batched_tokens=2048, max_prefill_rows=16)


def plan_limits(
    model_config: ModelConfig,
    config: EngineConfig,
    mesh: Mesh,
    cache_dtype: jnp.dtype,
    draft_bytes_per_token: int = 0,
    *,
    offload: OffloadSizes | None = None,
    share: MemoryShare = WHOLE,
) -> SchedulerLimits:
    """Sizes that the configuration leaves open, from the device and its free memory.

    Args:
        draft_bytes_per_token: that a draft model keeps of each token beside the model, over all devices.
        offload: what host memory is to hold beside it; None: nothing.

    Raises:
        OutOfMemoryError, ValueError: as `build_engine`.
    """
    max_num_seqs, max_num_batched_tokens = _step_sizes(config, mesh)
    wanted = _wanted_context(model_config, config)
    if wanted > model_config.max_position_embeddings:
        logger.warning(
            "max_model_len=%d is beyond the %d tokens that the model was made for: what it answers there may be of no use",
            wanted,
            model_config.max_position_embeddings,
        )
    token_bytes = kv_bytes_per_token(model_config, cache_dtype) + draft_bytes_per_token
    free = free_cache_bytes(model_config, config, mesh, share)
    num_pages = _planned_pages(model_config, config, mesh, free, token_bytes, offload, share)
    room = num_pages * config.page_size
    if room < wanted:
        logger.warning("the context is cut from %d to the %d tokens that the KV cache holds", wanted, room)
    return SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_rows=min(_defaults(mesh).max_prefill_rows, max_num_seqs),
        max_model_len=min(wanted, room),
        page_size=config.page_size,
        num_pages=num_pages,
        static_batching=config.static_batching,
    )


def _planned_pages(
    model_config: ModelConfig,
    config: EngineConfig,
    mesh: Mesh,
    free: int,
    token_bytes: int,
    offload: OffloadSizes | None,
    share: MemoryShare,
) -> int:
    """How many KV pages there are to be.

    Args:
        free: bytes of each device for them, and for what else the arguments ask for.
        token_bytes: what one token takes over all devices.

    Raises:
        OutOfMemoryError: the pages or the context that are asked for do not fit, or beside them the host memory.
    """
    page_bytes = config.page_size * token_bytes // mesh.size
    free -= 0 if offload is None else offload.staging_bytes
    _check_room(model_config, config, mesh, free, page_bytes)
    num_pages = _fitting_pages(model_config, config, mesh, free, page_bytes)
    room = num_pages * config.page_size
    if config.max_model_len is not None and room < config.max_model_len and config.num_pages is None:
        raise OutOfMemoryError(
            f"the KV cache has room for {room} tokens, less than max_model_len={config.max_model_len}; use "
            f"--max-model-len {room} or less, or {_more_memory(mesh)}"
        )
    if offload is None:
        return num_pages
    if not _is_cpu(mesh):  # where host memory is none of the device's
        check_offload(offload, config, available_host_bytes() // share.num_engines, "of host memory that are free")
        return num_pages
    num_devices = len(mesh.local_devices)
    for_host = num_devices * (free - _least_for_pages(config, page_bytes))
    check_offload(offload, config, for_host, "that weights, steps and KV pages leave of this machine's memory")
    return _fitting_pages(model_config, config, mesh, free - offload.num_bytes // num_devices, page_bytes)


def _fitting_pages(model_config: ModelConfig, config: EngineConfig, mesh: Mesh, free: int, page_bytes: int) -> int:
    """As many as are asked for, or as many of those that are of use as fit the free bytes of a device."""
    if config.num_pages is not None:
        return config.num_pages
    max_num_seqs, _ = _step_sizes(config, mesh)
    pages_of_context = -(-_wanted_context(model_config, config) // config.page_size)
    num_longest = 1 if config.mode in _SEQUENCES_OF_MODE else max_num_seqs  # that the cache is to hold
    pages_wanted = num_longest * pages_of_context
    fitting = _rounded(_most_for_pages(free, mesh) // page_bytes)
    if _is_cpu(mesh):
        is_asked_for = config.mode == "interactive" or config.max_model_len is not None
        shared = _rounded(min(_CPU_CACHE_BYTES, free // 4) // page_bytes)
        fitting = max(shared, min(fitting, pages_of_context if is_asked_for else 1))
    elif config.mode == "server" and config.enable_prefix_caching:
        spare = _rounded((free - _SPARE_BYTES) // page_bytes)
        pages_wanted = max(pages_wanted, min(_MOST_CONTEXTS * pages_wanted, spare))
    return min(pages_wanted, fitting)


def _least_for_pages(config: EngineConfig, page_bytes: int) -> int:
    """Free bytes of a CPU's device of which the pages are planned that are asked for, or the context, or one page."""
    if config.num_pages is not None:
        return config.num_pages * page_bytes
    num_pages = -(-(config.max_model_len or 1) // config.page_size)
    step = _step_of_pages(num_pages)
    return -(-4 * (-(-num_pages // step) * step) * page_bytes // 3)


def check_weights_fit(
    model_config: ModelConfig, config: EngineConfig, mesh: Mesh, dtype: jnp.dtype, share: MemoryShare = WHOLE
) -> None:
    """Before weights are loaded or made, which takes minutes and may take a machine's last memory.

    Args:
        model_config: as its weights come.
        dtype: of weights that are not quantized.

    Raises:
        OutOfMemoryError: they are more than the devices have room for.
    """
    needed, there = ShardLayout(model_config, mesh.size).device_bytes(dtype), _free_bytes(config, mesh, share)
    if needed <= there:
        return
    remedies = ["a smaller model"]
    if model_config.quantization is None:
        # One that is quantized as it is loaded must have this room too, though layers are quantized one after the other.
        remedies.append(
            "--quantization" if config.load_format == "dummy" else "one of `jaxserve convert --quantization`"
        )
    if dtype.itemsize > 2:
        remedies.append("--dtype bfloat16")
    if not _is_cpu(mesh):
        remedies.append("a larger --tensor-parallel-size")
    raise OutOfMemoryError(
        f"the weights take {needed / _GIB:.1f} GiB of each device, and {there / _GIB:.1f} GiB are there: use "
        f"{', '.join(remedies)}, or {_more_memory(mesh)}"
    )


def check_steps_fit(
    model_config: ModelConfig,
    config: EngineConfig,
    mesh: Mesh,
    dtype: jnp.dtype,
    cache_dtype: jnp.dtype,
    share: MemoryShare = WHOLE,
) -> None:
    """Before weights are loaded or made: what `plan_limits` would refuse once they are there.

    Args:
        model_config: as the model runs, perhaps quantized.

    Raises:
        OutOfMemoryError: beside the weights there is no room for the step, the pages, the context or the host memory that
            are asked for.
    """
    layout = ShardLayout(model_config, mesh.size)
    free = free_cache_bytes(layout.device_config, config, mesh, share) - layout.device_bytes(dtype)
    token_bytes = kv_bytes_per_token(layout.device_config, cache_dtype)
    offload = plan_offload(layout.device_config, config, mesh, cache_dtype)
    _planned_pages(layout.device_config, config, mesh, free, token_bytes, offload, share)


def longest_context(model_config: ModelConfig, config: EngineConfig) -> int:
    """Tokens that a sequence may have at most, whatever memory there is."""
    wanted = _wanted_context(model_config, config)
    return wanted if config.num_pages is None else min(wanted, config.num_pages * config.page_size)


def usable_bytes(config: EngineConfig, mesh: Mesh, use: MemoryUse, share: MemoryShare = WHOLE) -> tuple[int, str]:
    """Bytes of one device that the engine may take in all, and what they are.

    Args:
        use: what it takes; all but what only steps and evicted pages need is taken already.
    """
    if _is_cpu(mesh):
        taken = use.total - use.work_space - use.staging - use.evicted
        part = "" if share.num_engines == 1 else f"one of {share.num_engines} parts of "
        usable = (_free_bytes(config, mesh, WHOLE) + taken) // share.num_engines
        return usable, f"{part}what other programs leave of the machine's memory"
    utilization = config.gpu_memory_utilization
    limit = mesh.local_devices[0].memory_stats()["bytes_limit"]
    return usable_device_bytes(limit, utilization), usable_in_words(utilization)


def free_cache_bytes(model_config: ModelConfig, config: EngineConfig, mesh: Mesh, share: MemoryShare = WHOLE) -> int:
    """Bytes of one device that the KV cache may take, beside what is there and the largest step's work space."""
    return _free_bytes(config, mesh, share) - _work_space_bytes(model_config, config, mesh)


def _free_bytes(config: EngineConfig, mesh: Mesh, share: MemoryShare) -> int:
    """Bytes of one device that the engine may still take."""
    if _is_cpu(mesh):
        return share.of(available_host_bytes() // len(mesh.local_devices))
    stats = mesh.local_devices[0].memory_stats()
    return usable_device_bytes(stats["bytes_limit"], config.gpu_memory_utilization) - stats["bytes_in_use"]


def _work_space_bytes(model_config: ModelConfig, config: EngineConfig, mesh: Mesh) -> int:
    """What the largest step takes at most, as far as that is known before it is compiled."""
    max_num_seqs, max_num_batched_tokens = _step_sizes(config, mesh)
    per_token, per_sequence = _step_bytes(model_config, mesh)
    fixed = 0 if _is_cpu(mesh) else _GIB
    return per_token * max_num_batched_tokens + per_sequence * max_num_seqs + fixed


def _step_bytes(model_config: ModelConfig, mesh: Mesh) -> tuple[int, int]:
    """What a step takes at most of one device for each of its tokens, and for each sequence with what is kept of it."""
    per_token = 4 * (4 * model_config.intermediate_size + 8 * model_config.hidden_size)
    # Two layers of Llama-3.2-1B's shapes took 24 bytes a word of the vocabulary for each of 8 sequences on a CPU, and 32 for
    # each of 32. On a GPU a GiB is left besides.
    return per_token, (40 if _is_cpu(mesh) else 16) * model_config.vocab_size


def _step_sizes(config: EngineConfig, mesh: Mesh) -> tuple[int, int]:
    """Sequences at once, and tokens of a step."""
    defaults = _defaults(mesh)
    at_once = _SEQUENCES_OF_MODE.get(config.mode, defaults.max_num_seqs)
    max_num_seqs = config.max_num_seqs or min(at_once, config.max_num_batched_tokens or at_once)
    return max_num_seqs, config.max_num_batched_tokens or max(defaults.max_num_batched_tokens, max_num_seqs)


def _defaults(mesh: Mesh) -> DeviceDefaults:
    return _CPU_DEFAULTS if _is_cpu(mesh) else _GPU_DEFAULTS


def _wanted_context(model_config: ModelConfig, config: EngineConfig) -> int:
    if config.max_model_len is not None:
        return config.max_model_len
    longest = model_config.max_position_embeddings
    return min(longest, _LOCAL_CONTEXT) if config.mode == "local" else longest


def _most_for_pages(free: int, mesh: Mesh) -> int:
    """Of free bytes; other programs on a CPU's machine want more of its memory in time, and get none that is taken."""
    return 3 * free // 4 if _is_cpu(mesh) else free


def _rounded(num_pages: int) -> int:
    """Down to seven binary digits: programs are compiled for a number of pages, and what is free varies between starts."""
    step = _step_of_pages(num_pages)
    return num_pages // step * step


def _step_of_pages(num_pages: int) -> int:
    return 1 << max(0, num_pages.bit_length() - 7)


def _check_room(model_config: ModelConfig, config: EngineConfig, mesh: Mesh, free: int, page_bytes: int) -> None:
    """Raises:
    OutOfMemoryError: a page, or as many as are asked for, do not fit what is free beside the largest step's work space.
    """
    if config.num_pages is None:
        if _most_for_pages(free, mesh) < page_bytes:
            raise _no_room(model_config, config, mesh, free, page_bytes)
        return
    # What a GPU's steps need is an estimate on the safe side, and checked when it is measured; a CPU's machine has no
    # bound but that it ends programs.
    most = free if _is_cpu(mesh) else free + _work_space_bytes(model_config, config, mesh)
    needed = config.num_pages * page_bytes
    if needed <= most:
        return
    planned = _most_for_pages(free, mesh)
    if planned < page_bytes:
        raise _no_room(model_config, config, mesh, free, page_bytes)
    to_others = ", which leaves other programs a quarter of that," if _is_cpu(mesh) else ""
    raise OutOfMemoryError(
        f"{config.num_pages} KV pages need {needed / _GIB:.2f} GiB, and {free / _GIB:.2f} GiB are there beside what steps "
        f"need: use --num-pages {planned // page_bytes} at most{to_others or ','} or {_more_memory(mesh)}"
    )


def _no_room(
    model_config: ModelConfig, config: EngineConfig, mesh: Mesh, free: int, page_bytes: int
) -> OutOfMemoryError:
    """Of a device that has no room for a page beside a step's work space: what to do about it."""
    most = _most_for_pages(free, mesh)
    work_space = _work_space_bytes(model_config, config, mesh)
    problem = (
        f"no memory is left for the KV cache: the largest step needs {work_space / _GIB:.2f} GiB beside the weights, a page "
        f"{page_bytes} bytes, and {max(0, free + work_space) / _GIB:.2f} GiB are there; "
    )
    page_size = most * config.page_size // page_bytes
    if config.page_size > _USUAL_PAGE and page_size >= _USUAL_PAGE:
        return OutOfMemoryError(f"{problem}use --page-size {page_size} or less")
    max_num_seqs, max_num_batched_tokens = _step_sizes(config, mesh)
    per_token, per_sequence = _step_bytes(model_config, mesh)
    without_step = free + per_token * max_num_batched_tokens + per_sequence * max_num_seqs
    for_pages = -(-4 * page_bytes // 3) if _is_cpu(mesh) else page_bytes
    if config.num_pages is not None and config.num_pages * page_bytes < without_step:
        for_pages = config.num_pages * page_bytes  # if they are too many themselves, that is told next
    left = without_step - for_pages
    tokens = (left - per_sequence * max_num_seqs) // per_token
    sequences = left // (per_token + per_sequence)
    more = _more_memory(mesh)
    if tokens >= max_num_seqs:
        return OutOfMemoryError(f"{problem}use --max-num-batched-tokens {tokens} or less, or {more}")
    if sequences >= 1:
        return OutOfMemoryError(
            f"{problem}use --max-num-seqs and --max-num-batched-tokens {sequences} or less, or {more}"
        )
    devices = "" if _is_cpu(mesh) else " or more devices"
    return OutOfMemoryError(f"{problem}{more}, or use --quantization, a smaller model{devices}")


def _more_memory(mesh: Mesh) -> str:
    """What a user can do to have more of it."""
    return "free memory of this machine" if _is_cpu(mesh) else "raise --gpu-memory-utilization"


def _is_cpu(mesh: Mesh) -> bool:
    return mesh.local_devices[0].platform == "cpu"
