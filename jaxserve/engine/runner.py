"""Launches steps on the device. The only caller of jit."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import ModelConfig
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.decode_state import DecodeState, empty_state
from jaxserve.engine.device_batch import Bucket, Sizes, pack
from jaxserve.engine.executable_cache import ExecutableCache
from jaxserve.engine.executors import ForwardCompiler, ForwardExecutor
from jaxserve.engine.programs import ProgramFactory
from jaxserve.engine.schedule import SampledTokens, ScheduledBatch
from jaxserve.models.kv_cache import KVCache, kv_cache_specs
from jaxserve.models.params import LlamaParams
from jaxserve.models.sampling import SamplingMode
from jaxserve.progress import Progress
from jaxserve.sharding.placement import named_shardings, replicated

logger = logging.getLogger(__name__)

_MODES: tuple[SamplingMode, ...] = ("greedy", "random", "filtered")


@dataclass(frozen=True)
class PendingLogits:
    """A launched forward pass; the arrays are on the device and may not be ready."""

    batch: ScheduledBatch
    bucket: Bucket
    logits: jax.Array  # [rows, vocab]
    slots: jax.Array  # [rows]


@dataclass(frozen=True)
class PendingTokens:
    """Launched sampling; `tokens` is on its way to the host."""

    batch: ScheduledBatch
    bucket: Bucket
    tokens: jax.Array  # [rows]


class Runner(Protocol):
    """What the engine loop needs of a runner; tests have one without a device."""

    def launch_forward(self, batch: ScheduledBatch) -> Any: ...
    def launch_sample(self, logits: Any) -> Any: ...
    def is_ready(self, pending: Any) -> bool: ...
    def fetch(self, pending: Any) -> SampledTokens: ...


class ModelRunner:
    """Owns the device arrays of one model: params, cache, decode state. Used by one thread.

    Args:
        layerwise: run the forward pass layer by layer (see `jaxserve.engine.executors`).
        program_folder: where compiled programs are kept between starts; None: nowhere.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: LlamaParams,
        *,
        mesh: Mesh,
        sizes: Sizes,
        buckets: Buckets,
        cache_dtype: jnp.dtype,
        layerwise: bool,
        program_folder: Path | None = None,
    ) -> None:
        self._params = params
        self._sizes = sizes
        self._buckets = buckets
        self._layerwise = layerwise
        self._replicated = replicated(mesh)
        self._factory = ProgramFactory(config, sizes, mesh)
        dtype = params.final_norm.dtype, params.embedding.dtype, cache_dtype
        self._programs = ExecutableCache(
            program_folder, tuple(mesh.devices.flat), f"{config} {sizes} {dict(mesh.shape)} {dtype}"
        )
        self._vocab_size = config.vocab_size
        self._cache = zero_cache(config, sizes, mesh, cache_dtype)
        self._state: DecodeState = jax.device_put(empty_state(sizes), self._replicated)
        self._forward: dict[Bucket, ForwardExecutor] = {}
        self._sample: dict[tuple[int, SamplingMode], Any] = {}

    def warm_up(self, progress: Progress) -> None:
        """Compiles every program, in parallel; nothing is compiled after it."""
        buckets = self._buckets.all()
        sampling: list[tuple[int, SamplingMode]] = [
            (rows, mode) for rows in self._buckets.sample_rows for mode in _MODES
        ]
        with (
            progress.task("compiling", len(buckets) + len(sampling), "programs") as advance,
            ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool,
        ):
            forward = {pool.submit(self._compile_forward, bucket): bucket for bucket in buckets}
            sample = {pool.submit(self._compile_sample, rows, mode): (rows, mode) for rows, mode in sampling}
            for future in as_completed([*forward, *sample]):
                if future in forward:
                    self._forward[forward[future]] = future.result()
                else:
                    self._sample[sample[future]] = future.result()
                advance(1)
        self._programs.remove_unused()

    def launch_forward(self, batch: ScheduledBatch) -> PendingLogits:
        """Starts a step's forward pass and returns at once."""
        bucket = self._buckets.for_batch(batch)
        packed = jax.device_put(pack(batch, bucket, self._sizes), self._replicated)
        result = self._forward[bucket](self._params, self._cache, self._state, packed)
        self._cache, self._state = result.cache, result.state
        return PendingLogits(batch, bucket, result.logits, result.slots)

    def launch_sample(self, logits: PendingLogits) -> PendingTokens:
        """Starts the sampling of a launched forward pass and the tokens' way to the host, and returns at once."""
        compiled = self._sample[logits.logits.shape[0], _mode_for(logits.batch)]
        self._state, tokens = compiled(self._state, logits.logits, logits.slots)
        tokens.copy_to_host_async()
        return PendingTokens(logits.batch, logits.bucket, tokens)

    def is_ready(self, pending: PendingTokens) -> bool:
        """Whether the device is done with a step."""
        return pending.tokens.is_ready()  # pyright: ignore[reportAttributeAccessIssue] - jax.Array has it

    def fetch(self, pending: PendingTokens) -> SampledTokens:
        """Waits for a step's tokens: the one place that waits for the device."""
        tokens = np.asarray(pending.tokens)
        decode, prefill = pending.batch.decode, pending.batch.prefill
        first = pending.bucket.decode_rows
        rows = np.concatenate([tokens[: len(decode)], tokens[first : first + len(prefill)]])
        counts = [1] * len(decode) + [int(chunk.samples) for chunk in prefill]
        return SampledTokens(token_ids=rows[:, None], counts=np.asarray(counts, np.int32))

    def _compile_forward(self, bucket: Bucket) -> ForwardExecutor:
        started = time.perf_counter()
        compiler = ForwardCompiler(self._factory, self._programs, self._params, self._cache, self._state)
        compile_one = compiler.layerwise if self._layerwise else compiler.whole
        executor = compile_one(bucket, self._buckets.sample_rows_for(bucket))
        logger.info("forward, %s: ready after %.1f s", bucket, time.perf_counter() - started)
        return executor

    def _compile_sample(self, rows: int, mode: SamplingMode) -> Any:
        started = time.perf_counter()
        function = jax.jit(self._factory.sample(mode), donate_argnums=(0,))
        logits, slots = self._like((rows, self._vocab_size), jnp.float32), self._like((rows,), jnp.int32)
        compiled = self._programs.load_or_compile(
            f"sample {mode} {rows}", lambda: function.lower(self._state, logits, slots)
        )
        logger.info("sampling, %s, %d rows: ready after %.1f s", mode, rows, time.perf_counter() - started)
        return compiled

    def _like(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._replicated)


def zero_cache(config: ModelConfig, sizes: Sizes, mesh: Mesh, dtype: jnp.dtype) -> KVCache:
    specs = kv_cache_specs(config, sizes.num_pages, sizes.page_size)
    shardings = named_shardings(specs, mesh)

    def zeros() -> KVCache:
        return KVCache(k_pages=jnp.zeros(specs.k_pages.shape, dtype), v_pages=jnp.zeros(specs.v_pages.shape, dtype))

    return jax.jit(zeros, out_shardings=shardings)()


def _mode_for(batch: ScheduledBatch) -> SamplingMode:
    """The cheapest sampling program that serves every row of a step that samples."""
    mode: SamplingMode = "greedy"
    sequences = [row.sequence for row in batch.decode] + [chunk.sequence for chunk in batch.prefill if chunk.samples]
    for sequence in sequences:
        sampling = sequence.request.sampling
        if sampling.greedy:
            continue
        if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
            return "filtered"
        mode = "random"
    return mode
