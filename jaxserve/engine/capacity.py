"""Sizes that the configuration leaves open, from the device and the memory that it has."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.device_memory import usable_device_bytes, usable_in_words
from jaxserve.engine.host_memory import available_host_bytes, total_host_bytes
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.memory_plan import OutOfMemoryError
from jaxserve.models.kv_cache import kv_bytes_per_token

logger = logging.getLogger(__name__)

_GIB = 1024**3
_CPU_CACHE_BYTES = _GIB  # at most, for the KV cache on a CPU whose memory others use too
# Left of a GPU's memory where more pages would serve the prefix cache alone: a step may take more work space than expected.
_SPARE_BYTES = 3 * _GIB
_MOST_CONTEXTS = 16  # for each sequence that runs: of a small model a card would hold millions of pages
_SEQUENCES_OF_MODE = {"local": 4, "interactive": 1}
_LOCAL_CONTEXT = 8192  # tokens


@dataclass(frozen=True)
class DeviceDefaults:
    """Sizes for a kind of device where the configuration leaves them open."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_rows: int


_CPU_DEFAULTS = DeviceDefaults(max_num_seqs=8, max_num_batched_tokens=256, max_prefill_rows=4)
_GPU_DEFAULTS = DeviceDefaults(max_num_seqs=64, max_num_batched_tokens=2048, max_prefill_rows=16)


def plan_limits(
    model_config: ModelConfig,
    config: EngineConfig,
    mesh: Mesh,
    cache_dtype: jnp.dtype,
    draft_bytes_per_token: int = 0,
    *,
    reserved: int = 0,
) -> SchedulerLimits:
    """Sizes that the configuration leaves open, from the device and its free memory.

    Args:
        draft_bytes_per_token: that a draft model keeps of each token beside the model, over all devices.
        reserved: bytes of each device that are needed for something else.

    Raises:
        OutOfMemoryError, ValueError: as `build_engine`.
    """
    defaults = _CPU_DEFAULTS if mesh.local_devices[0].platform == "cpu" else _GPU_DEFAULTS
    at_once = _SEQUENCES_OF_MODE.get(config.mode, defaults.max_num_seqs)
    max_num_seqs = config.max_num_seqs or min(at_once, config.max_num_batched_tokens or at_once)
    max_num_batched_tokens = config.max_num_batched_tokens or max(defaults.max_num_batched_tokens, max_num_seqs)
    wanted = _wanted_context(model_config, config)
    if wanted > model_config.max_position_embeddings:
        logger.warning(
            "max_model_len=%d is beyond the %d tokens that the model was made for: what it answers there may be of no use",
            wanted,
            model_config.max_position_embeddings,
        )
    num_longest = 1 if config.mode in _SEQUENCES_OF_MODE else max_num_seqs  # that the cache is to hold
    pages_wanted = num_longest * -(-wanted // config.page_size)
    token_bytes = kv_bytes_per_token(model_config, cache_dtype) + draft_bytes_per_token
    page_bytes = config.page_size * token_bytes // mesh.size
    if config.num_pages is not None:
        num_pages = config.num_pages
        _check_pages(num_pages, page_bytes, mesh)
    else:
        free = free_cache_bytes(model_config, config, mesh, max_num_batched_tokens, max_num_seqs) - reserved
        if config.mode == "server" and config.enable_prefix_caching and mesh.local_devices[0].platform != "cpu":
            spare = _rounded((free - _SPARE_BYTES) // page_bytes)
            pages_wanted = max(pages_wanted, min(_MOST_CONTEXTS * pages_wanted, spare))
        num_pages = min(pages_wanted, _rounded(free // page_bytes))
        if num_pages < 1:
            per_token, per_sequence = _work_space_bytes(model_config)
            left = free - page_bytes + per_token * max_num_batched_tokens + per_sequence * max_num_seqs
            raise OutOfMemoryError(
                f"no memory is left for the KV cache: {free / _GIB:.2f} GiB free, a page takes {page_bytes} bytes; "
                + _remedy(left, per_token, per_sequence, max_num_seqs)
            )
    room = num_pages * config.page_size
    if config.max_model_len is not None and room < config.max_model_len and config.num_pages is None:
        raise OutOfMemoryError(
            f"the KV cache has room for {room} tokens, less than max_model_len={config.max_model_len}; use "
            f"--max-model-len {room} or less, or raise --gpu-memory-utilization"
        )
    if room < wanted:
        logger.warning("the context is cut from %d to the %d tokens that the KV cache holds", wanted, room)
    return SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_rows=min(defaults.max_prefill_rows, max_num_seqs),
        max_model_len=min(wanted, room),
        page_size=config.page_size,
        num_pages=num_pages,
        static_batching=config.static_batching,
    )


def longest_context(model_config: ModelConfig, config: EngineConfig) -> int:
    """Tokens that a sequence may have at most, whatever memory there is."""
    wanted = _wanted_context(model_config, config)
    return wanted if config.num_pages is None else min(wanted, config.num_pages * config.page_size)


def _wanted_context(model_config: ModelConfig, config: EngineConfig) -> int:
    if config.max_model_len is not None:
        return config.max_model_len
    longest = model_config.max_position_embeddings
    return min(longest, _LOCAL_CONTEXT) if config.mode == "local" else longest


def _rounded(num_pages: int) -> int:
    """Down to seven binary digits: programs are compiled for a number of pages, and what is free varies between starts."""
    step = 1 << max(0, num_pages.bit_length() - 7)
    return num_pages // step * step


def _check_pages(num_pages: int, page_bytes: int, mesh: Mesh) -> None:
    """Raises:
    OutOfMemoryError: so many pages do not fit, even without work space.
    """
    device = mesh.local_devices[0]
    if device.platform == "cpu":
        free = total_host_bytes()
    else:
        stats = device.memory_stats()
        free = stats["bytes_limit"] - stats["bytes_in_use"]
    if num_pages * page_bytes > free:
        raise OutOfMemoryError(
            f"{num_pages} KV pages need {num_pages * page_bytes / _GIB:.2f} GiB, and {free / _GIB:.2f} GiB are there: "
            f"use --num-pages {free // page_bytes} at most, less what steps need to work"
        )


def usable_bytes(config: EngineConfig, mesh: Mesh) -> tuple[int, str]:
    """Bytes of one device that the engine may take in all, and what they are."""
    device = mesh.local_devices[0]
    if device.platform == "cpu":
        return total_host_bytes(), "the machine's memory"
    share = config.gpu_memory_utilization
    return usable_device_bytes(device.memory_stats()["bytes_limit"], share), usable_in_words(share)


def check_weights_fit(num_bytes: int, config: EngineConfig, mesh: Mesh) -> None:
    """Before weights are made, which takes minutes and may take a machine's last memory.

    Args:
        num_bytes: of the whole model.

    Raises:
        OutOfMemoryError: they are more than the devices have room for.
    """
    if mesh.local_devices[0].platform == "cpu":
        needed, there = num_bytes, available_host_bytes()
    else:
        needed, there = num_bytes // mesh.size, usable_bytes(config, mesh)[0]
    if needed > there:
        raise OutOfMemoryError(
            f"the weights take {needed / _GIB:.1f} GiB of each device, and {there / _GIB:.1f} GiB are there: use a smaller "
            "model, --quantization, or a larger --tensor-parallel-size"
        )


def free_cache_bytes(
    model_config: ModelConfig, config: EngineConfig, mesh: Mesh, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """Bytes of one device that the KV cache may take, after weights and the largest step's work space."""
    device = mesh.local_devices[0]
    if device.platform == "cpu":
        return min(_CPU_CACHE_BYTES, available_host_bytes() // 4)
    stats = device.memory_stats()
    per_token, per_sequence = _work_space_bytes(model_config)
    work_space = per_token * max_num_batched_tokens + per_sequence * max_num_seqs + _GIB
    usable = usable_device_bytes(stats["bytes_limit"], config.gpu_memory_utilization)
    return usable - stats["bytes_in_use"] - work_space


def _work_space_bytes(model_config: ModelConfig) -> tuple[int, int]:
    """What a step takes at most of one GPU for each of its tokens, and for each sequence."""
    return 4 * (4 * model_config.intermediate_size + 8 * model_config.hidden_size), 16 * model_config.vocab_size


def _remedy(left: int, per_token: int, per_sequence: int, max_num_seqs: int) -> str:
    """What to do where a step's work space leaves no page.

    Args:
        left: bytes for that work space, if there is to be one page.
    """
    tokens = (left - per_sequence * max_num_seqs) // per_token
    if tokens >= max_num_seqs:
        return f"use --max-num-batched-tokens {tokens} or less, or raise --gpu-memory-utilization"
    sequences = left // (per_token + per_sequence)
    if sequences >= 1:
        return f"use --max-num-seqs and --max-num-batched-tokens {sequences} or less, or raise --gpu-memory-utilization"
    return "raise --gpu-memory-utilization, or use --quantization, a smaller model or more devices"
