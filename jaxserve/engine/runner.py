"""Launches steps on the device. The only caller of jit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import ModelConfig
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.decode_state import DecodeState, empty_state
from jaxserve.engine.device_batch import Bucket, Sizes, pack
from jaxserve.engine.executable_cache import ExecutableCache
from jaxserve.engine.executors import ForwardCompiler, ForwardExecutor, ResultPlaces
from jaxserve.engine.kv_offload import OffloadSizes, PageCopier
from jaxserve.engine.memory_plan import MemoryUse
from jaxserve.engine.pending import PendingLogits, PendingTokens, cheapest_mode, read_drafts, read_tokens
from jaxserve.engine.processor_state import (
    ProcessorState,
    empty_processors,
    slot_processors,
    slot_processors_like,
)
from jaxserve.engine.program_choice import added_by_prompts, fastest_programs, seconds_of_run, times_in_rounds
from jaxserve.engine.program_compiler import ProgramCompiler, SampleProgram
from jaxserve.engine.program_times import program_table
from jaxserve.engine.programs import PROMPT_LOGPROBS_BLOCK, ProgramFactory, without_layers
from jaxserve.engine.schedule import DraftedTokens, SampledTokens, ScheduledBatch
from jaxserve.engine.speculator import Drafting, Speculator
from jaxserve.engine.token_masks import is_constrained, num_words
from jaxserve.kernels.peer_memory import PeerMemory
from jaxserve.models.kv_cache import KVCache, kv_cache_specs
from jaxserve.models.logit_processors import Logprobs
from jaxserve.models.params import LlamaParams
from jaxserve.models.speculative_sampling import Drafts
from jaxserve.progress import Progress
from jaxserve.sampling_params import SamplingMode
from jaxserve.sharding.placement import named_shardings, put_replicated, replicated

logger = logging.getLogger(__name__)

# Runs of a program before it takes what it always takes: the first loads its code, the second makes its launch graph.
_SETTING_UP = 2


class ModelRunner:
    """Owns the device arrays of one model: params, cache, decode state. Used by one thread.

    Args:
        layerwise: run the forward pass layer by layer (see `jaxserve.engine.executors`).
        program_folder: where compiled programs are kept between starts; None: nowhere.
        drafting: what drafts tokens; None: the engine does not speculate.
        offload: host memory for pages of the KV cache; None: none is taken.
        peers: memory that the devices of the mesh exchange their sums through; None: XLA's collectives make them.
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
        drafting: Drafting | None = None,
        offload: OffloadSizes | None = None,
        peers: PeerMemory | None = None,
    ) -> None:
        self._params = params
        self._sizes = sizes
        self._buckets = buckets
        self._layerwise = layerwise
        self._replicated = replicated(mesh)
        reader = None if drafting is None else drafting.reader
        self._factory = ProgramFactory(
            config,
            sizes,
            mesh,
            buckets.prefill_tokens[-1],
            None if reader is None else reader.tap_layers,
            has_peers=peers is not None,
        )
        self._peers = peers
        dtype = params.final_norm.dtype, params.embedding.dtype, cache_dtype
        self._programs = ExecutableCache(
            program_folder,
            tuple(mesh.devices.flat),
            f"{config} {sizes} {dict(mesh.shape)} {dtype} {self._factory.max_prefill_tokens}"
            + (f" {drafting.description}" if drafting else "")
            + (f" {peers.layout}" if peers else ""),
        )
        self._places = ResultPlaces(self._replicated)
        self._speculator = None if drafting is None else Speculator(drafting, self._factory, buckets, self._places)
        self._vocab_size = config.vocab_size
        self._mask_words = num_words(config.vocab_size)
        self._cache = zero_cache(config, sizes, mesh, cache_dtype)
        # One program each: outside of any, every array would be one.
        empty = partial(empty_state, sizes, speculates=drafting is not None)
        self._state: DecodeState = jax.jit(empty, out_shardings=self._replicated)()
        self.page_copier = None if offload is None else PageCopier(offload, self._cache, mesh)
        empty = partial(empty_processors, sizes.max_num_seqs, config.vocab_size)
        self._processors: ProcessorState = jax.jit(empty, out_shardings=self._replicated)()
        self._outer = without_layers(params)
        self._forward: dict[Bucket, ForwardExecutor] = {}
        self._serving: dict[Bucket, Bucket] = {}  # whose program runs a bucket's steps; others: their own
        self._sample: dict[SampleProgram, Any] = {}
        self._set_slot: Any = None
        self._prompt_logprobs: Any = None
        # Seconds that prompt tokens add to a step, as `StepPace` takes them, as far as they were measured.
        self.prompt_seconds: dict[int, dict[int, float]] = {}
        # As `ShowingTimes` has them, as far as they were measured; None: nothing is ever shown.
        shows_prompts = drafting is not None and (drafting.drafter.reads_prompts or reader is not None)
        self.showing_seconds: dict[Bucket, float] | None = {} if shows_prompts else None

    def warm_up(
        self, progress: Progress, *, compares: bool = True, check: Callable[[MemoryUse], None] = lambda use: None
    ) -> None:
        """Compiles every program, in parallel; nothing is compiled after it.

        Args:
            compares: measure what programs take here, to choose by it; False where other hosts must choose the same.
            check: told what everything takes before a program is run, which may take a device's last memory; may raise.
        """
        speculating: list[Callable[[], None]] = []
        if self._speculator is not None:
            speculating = self._speculator.jobs(self._programs, self._cache, self._state, self._processors)
        arrays = self._params, self._cache, self._state
        forward = ForwardCompiler(self._factory, self._programs, *arrays, self._places, self._peers)
        compiler = ProgramCompiler(forward, self._processors, self._buckets, self._layerwise)
        compiled = compiler.compile_all(progress, speculating)
        self._forward, self._sample = compiled.forward, compiled.sample
        self._set_slot, self._prompt_logprobs = compiled.set_slot, compiled.prompt_logprobs
        if self.page_copier is not None:
            self.page_copier.compile(self._programs, self._cache)
        self._programs.remove_unused()
        logger.info("%s", program_table(self._programs.times))
        check(self.memory_use())
        if not self._layerwise:
            with progress.task("trying out", len(self._forward), "programs") as advance:
                self._rehearse(advance)
            if compares:
                seconds = self._measured_seconds()
                self._serving = fastest_programs(seconds)
                self.prompt_seconds = added_by_prompts(seconds)
        if self._speculator is not None and self.showing_seconds is not None and compares:
            all_sizes = not self._layerwise
            self.showing_seconds = self._speculator.showing_seconds(self._programs, self._state, all_sizes=all_sizes)

    def _measured_seconds(self) -> dict[Bucket, float]:
        """What each program takes, those with drafts left out: they have no choice, and nothing rides along with them."""
        buckets = {str(bucket): bucket for bucket in self._forward if not bucket.num_drafts}
        names = sorted(buckets)
        measure = partial(times_in_rounds, lambda name: self._time(buckets[name]))
        seconds = self._programs.load_or_measure(f"steps of {', '.join(names)}", names, measure)
        return {bucket: seconds[name] for name, bucket in buckets.items()}

    def _time(self, bucket: Bucket) -> float:
        """Seconds of a step without anybody in it."""
        nobody = ScheduledBatch(decode=(), prefill=())
        packed = put_replicated(pack(nobody, bucket, self._sizes), self._replicated)
        return seconds_of_run(lambda: self._forward_step(nobody, bucket, None, packed), lambda: self._state)

    def _rehearse(self, advance: Callable[[int], None]) -> None:
        """Runs every program on an empty step: what a GPU sets up at a program's first runs is no request's wait."""
        nobody = ScheduledBatch(decode=(), prefill=())
        rehearsed: set[int] = set()  # rows of the sampling programs that have run
        for bucket in self._forward:
            packed = put_replicated(pack(nobody, bucket, self._sizes), self._replicated)
            if bucket.num_drafts:
                for _ in range(_SETTING_UP):
                    self._rehearse_verification(nobody, bucket, packed)
            else:
                self._rehearse_step(nobody, bucket, packed, rehearsed)
            advance(1)
        for _ in range(_SETTING_UP):
            self._rehearse_for_requests()
            if self._speculator is not None:
                self._state = self._speculator.rehearse_telling(self._state)
        if self.page_copier is not None:
            self._cache = self.page_copier.rehearse(self._cache)
        jax.block_until_ready((self._cache, self._state))

    def _rehearse_step(self, nobody: ScheduledBatch, bucket: Bucket, packed: jax.Array, rehearsed: set[int]) -> None:
        for _ in range(_SETTING_UP):  # one by one: nothing may be loaded while a device waits for another one
            result = self._forward_step(nobody, bucket, None, packed)
            jax.block_until_ready(self._state)
            self._show_drafter(result, result.slots)
            jax.block_until_ready(() if self._speculator is None else self._speculator.memory)
        if len(result.slots) in rehearsed:
            return
        rehearsed.add(len(result.slots))
        empty = np.zeros((0, self._mask_words), np.int32)
        nothing = self._padded_masks(empty, nobody, bucket, len(result.slots))
        for _ in range(_SETTING_UP):
            for mode in self._buckets.sampling_modes:
                self._run_sampling(mode, result.logits, result.slots, None)
            for mode in self._buckets.masked_modes:
                self._run_sampling(mode, result.logits, result.slots, nothing)

    def _rehearse_for_requests(self) -> None:
        """Programs that only begin with a request that changes logits, or wants log probabilities of its prompt."""
        _, *row = slot_processors_like(self._sizes.longest, np.zeros)
        slot = np.int32(self._sizes.max_num_seqs)  # which there is not
        self._processors = self._set_slot(self._processors, *put_replicated((slot, *row), self._replicated))
        tokens = self._factory.max_prefill_tokens
        hidden = np.zeros((tokens, self._factory.config.hidden_size), self._outer.embedding.dtype)
        step = put_replicated((hidden, np.zeros(tokens, np.int32), np.int32(0)), self._replicated)
        jax.block_until_ready(self._prompt_logprobs(self._outer, *step))

    def _rehearse_verification(self, nobody: ScheduledBatch, bucket: Bucket, packed: jax.Array) -> None:
        masks = np.full((bucket.rows, self._mask_words), -1, np.int32)
        for mode, masked in self._buckets.verifications(bucket):
            logits = self._forward_step(nobody, bucket, mode, packed)
            tokens, _ = self._run_verification(mode, logits, masks if masked else None)
            self._show_drafter(logits, tokens)

    def memory_use(self) -> MemoryUse:
        """What everything takes of one device; after `warm_up`."""
        programs = [program for forward in self._forward.values() for program in forward.programs]
        programs += [*self._sample.values(), self._set_slot, self._prompt_logprobs]
        drafter_params, drafter_memory = (), ()
        if self._speculator is not None:
            programs += self._speculator.programs
            drafter_params, drafter_memory = self._speculator.params, self._speculator.memory
        staging = 0
        if self.page_copier is not None:
            programs += self.page_copier.programs
            staging = self.page_copier.staging_bytes
        return MemoryUse(
            weights=device_bytes((self._params, drafter_params)),
            kv_cache=device_bytes((self._cache, drafter_memory)),
            staging=staging,
            slots=device_bytes((self._state, self._processors)),
            work_space=max(_work_space(program) for program in programs),
            results=device_bytes((self._places.arrays, self._peers)),
        )

    def launch_forward(self, batch: ScheduledBatch) -> PendingLogits:
        """Starts a step's forward pass, after the copies of pages that it needs, and returns at once."""
        if batch.copies:
            if self.page_copier is None:
                raise ValueError(
                    f"{len(batch.copies)} pages are to be copied, and the runner has no host memory for them"
                )
            self._cache = self.page_copier.run(self._cache, batch.copies)
        mode: SamplingMode | None = None
        is_rare = False
        if self._speculator is not None:
            self._state = self._speculator.begin(batch, self._state)
            masked = is_constrained(batch)
            mode = cheapest_mode(batch, self._buckets.masked_modes if masked else self._buckets.verify_modes)
            is_rare = self._buckets.is_rare(mode, masked)
        bucket = self._buckets.for_batch(batch, is_rare=is_rare)
        bucket = self._serving.get(bucket, bucket)
        packed = put_replicated(pack(batch, bucket, self._sizes), self._replicated)
        logits = self._forward_step(batch, bucket, mode, packed)
        if logits.drafts is not None and is_constrained(batch):  # their masks go by what is drafted
            for array in (logits.drafts.token_ids, logits.drafts.counts):
                array.copy_to_host_async()
        return logits

    def fetch_drafts(self, logits: PendingLogits) -> DraftedTokens:
        """Waits for the drafts of a launched step, but not for its forward pass."""
        return read_drafts(logits)

    def _forward_step(
        self, batch: ScheduledBatch, bucket: Bucket, mode: SamplingMode | None, packed: jax.Array
    ) -> PendingLogits:
        """Starts the drafting, if the step has any, and the forward pass.

        Args:
            mode: of sampling, that the step needs; only who drafts wants to know.
        """
        drafts: Drafts | None = None
        if self._speculator is not None and mode is not None:
            self._cache, drafts = self._speculator.draft(
                batch, bucket, mode, self._cache, self._state, self._processors, packed
            )
        more = () if drafts is None else (Drafts(token_ids=drafts.token_ids, counts=drafts.counts),)
        result = self._forward[bucket](self._params, self._cache, self._state, packed, *more)
        self._cache, self._state = result.cache, result.state
        return PendingLogits(batch, bucket, result.logits, result.slots, result.hidden, packed, drafts, result.features)

    def launch_sample(self, logits: PendingLogits, masks: np.ndarray | None = None) -> PendingTokens:
        """Starts the sampling of a launched forward pass and the tokens' way to the host, and returns at once.

        Args:
            masks: the tokens that each row may draw, as `StepMasks` has them; None: all.
        """
        modes = self._buckets.sampling_modes if logits.drafts is None else self._buckets.verify_modes
        if masks is not None:
            modes = self._buckets.masked_modes
        mode = cheapest_mode(logits.batch, modes)
        if mode == "full":
            self._begin_processing(logits.batch)
        if masks is not None:
            masks = self._padded_masks(masks, logits.batch, logits.bucket, logits.logits.shape[0])
        if logits.drafts is not None:
            tokens, logprobs = self._run_verification(mode, logits, masks)
        else:
            tokens, logprobs = self._run_sampling(mode, logits.logits, logits.slots, masks)
        self._show_drafter(logits, tokens)
        prompt = self._launch_prompt_logprobs(logits)
        for array in jax.tree.leaves((tokens, logprobs, prompt)):
            array.copy_to_host_async()
        return PendingTokens(logits.batch, logits.bucket, tokens, logprobs, prompt)

    def _show_drafter(self, logits: PendingLogits, tokens: jax.Array) -> None:
        """Lets a drafter that reads hidden states see a step whose tokens are drawn."""
        if self._speculator is not None:
            self._speculator.observe(logits.batch, logits.bucket, self._state, logits.packed, logits.features, tokens)

    def _run_sampling(
        self, mode: SamplingMode, logits: jax.Array, slots: jax.Array, masks: np.ndarray | None
    ) -> tuple[jax.Array, Logprobs | None]:
        compiled = self._sample[SampleProgram(logits.shape[0], mode, masks is not None)]
        more = () if masks is None else (put_replicated(masks, self._replicated),)
        if mode != "full":
            self._state, tokens = compiled(self._state, logits, slots, *more)
            return tokens, None
        self._state, self._processors, tokens, logprobs = compiled(self._state, self._processors, logits, slots, *more)
        return tokens, logprobs

    def _run_verification(
        self, mode: SamplingMode, logits: PendingLogits, masks: np.ndarray | None
    ) -> tuple[jax.Array, Logprobs | None]:
        if self._speculator is None or logits.drafts is None:
            raise ValueError("there are no drafts to verify")
        arrays = logits.logits, logits.slots, logits.drafts
        self._state, self._processors, tokens, logprobs = self._speculator.verify(
            logits.bucket, mode, self._state, self._processors, *arrays, masks
        )
        return tokens, logprobs

    def _padded_masks(self, masks: np.ndarray, batch: ScheduledBatch, bucket: Bucket, num_rows: int) -> np.ndarray:
        """A copy of the masks of a batch's rows, at the rows of logits that are theirs."""
        padded = np.full((num_rows, self._mask_words), -1, np.int32)
        num_decode = len(batch.decode) * (bucket.num_drafts + 1)
        padded[:num_decode] = masks[:num_decode]
        padded[bucket.decode_tokens : bucket.decode_tokens + len(batch.prefill)] = masks[num_decode:]
        return padded

    def is_ready(self, pending: PendingTokens) -> bool:
        """Whether the device is done with a step."""
        return pending.tokens.is_ready()  # pyright: ignore[reportAttributeAccessIssue] - jax.Array has it

    def fetch(self, pending: PendingTokens) -> SampledTokens:
        """Waits for a step's tokens: nothing else waits for the device but `fetch_drafts`."""
        return read_tokens(pending)

    def close(self) -> None:
        """Ends the threads that it has; it cannot be used any more."""
        if self.page_copier is not None:
            self.page_copier.close()

    def _begin_processing(self, batch: ScheduledBatch) -> None:
        """Writes the penalties and biases of sequences that begin to decode with this step."""
        for chunk in batch.prefill:
            if chunk.samples and chunk.sequence.request.sampling.changes_logits:
                row = slot_processors(chunk.sequence, chunk.slot, self._sizes.longest, self._vocab_size)
                self._processors = self._set_slot(self._processors, *put_replicated(row.arrays(), self._replicated))

    def _launch_prompt_logprobs(self, logits: PendingLogits) -> tuple[Logprobs, ...]:
        """Log probabilities of what follows each prefill token, if a chunk's request wants them."""
        if not any(chunk.sequence.wants_prompt_logprobs for chunk in logits.batch.prefill):
            return ()
        next_ids = np.zeros(self._factory.max_prefill_tokens, np.int32)
        end = 0
        for chunk in logits.batch.prefill:
            following = chunk.sequence.token_ids[chunk.start + 1 : chunk.start + 1 + len(chunk.token_ids)]
            next_ids[end : end + len(following)] = following
            end += len(chunk.token_ids)
        ids = put_replicated(next_ids, self._replicated)
        size = min(PROMPT_LOGPROBS_BLOCK, len(next_ids))
        # The last block may reach past the padded rows: it begins earlier then, and `fetch` drops what it repeats.
        firsts = [min(first, len(next_ids) - size) for first in range(0, end, size)]
        return tuple(
            self._prompt_logprobs(self._outer, logits.hidden, ids, put_replicated(np.int32(first), self._replicated))
            for first in firsts
        )


def device_bytes(arrays: Any) -> int:
    """Bytes that arrays take of one device."""
    return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(arrays))


def _work_space(program: Any) -> int:
    """Bytes of one device that a compiled program takes beside its arguments, as XLA has planned it."""
    memory = program.memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def zero_cache(config: ModelConfig, sizes: Sizes, mesh: Mesh, dtype: jnp.dtype) -> KVCache:
    specs = kv_cache_specs(config, sizes.num_pages, sizes.page_size)
    shardings = named_shardings(specs, mesh)

    def zeros() -> KVCache:
        return KVCache(k_pages=jnp.zeros(specs.k_pages.shape, dtype), v_pages=jnp.zeros(specs.v_pages.shape, dtype))

    return jax.jit(zeros, out_shardings=shardings)()
