"""Compiles every program of a runner, in parallel, or loads it from disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.engine.buckets import Buckets
from jaxserve.engine.device_batch import Bucket
from jaxserve.engine.executors import ForwardCompiler, ForwardExecutor
from jaxserve.engine.processor_state import ProcessorState, slot_processors_like
from jaxserve.engine.programs import without_layers
from jaxserve.engine.token_masks import num_words
from jaxserve.progress import Progress
from jaxserve.sampling_params import SamplingMode
from jaxserve.sharding.placement import replicated


class SampleProgram(NamedTuple):
    """Which compiled sampling program: for so many rows of logits, of that kind, with masks or without."""

    rows: int
    mode: SamplingMode
    masked: bool


@dataclass(frozen=True)
class CompiledPrograms:
    """All that a runner launches, but for what its drafter and its page copier bring themselves."""

    forward: dict[Bucket, ForwardExecutor]
    sample: dict[SampleProgram, Any]
    set_slot: Any
    prompt_logprobs: Any


@dataclass(frozen=True)
class ProgramCompiler:
    """Makes `CompiledPrograms`; arrays give shapes and placement only.

    Attributes:
        layerwise: run the forward pass layer by layer (see `jaxserve.engine.executors`).
    """

    forward: ForwardCompiler
    processors: ProcessorState
    buckets: Buckets
    layerwise: bool

    def compile_all(self, progress: Progress, others: Sequence[Callable[[], None]]) -> CompiledPrograms:
        """Compiles them all, and runs what else there is to compile beside them."""
        buckets = self.buckets.all()
        sampling = [
            SampleProgram(rows, mode, masked)
            for rows in self.buckets.sample_rows
            for masked, modes in ((False, self.buckets.sampling_modes), (True, self.buckets.masked_modes))
            for mode in modes
        ]
        with (
            progress.task("compiling", len(buckets) + len(sampling) + 2 + len(others), "programs") as advance,
            ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool,
        ):
            forward = {bucket: pool.submit(self._compile_forward, bucket) for bucket in buckets}
            sample = {program: pool.submit(self._compile_sample, program) for program in sampling}
            set_slot, prompt_logprobs = pool.submit(self._compile_set_slot), pool.submit(self._compile_prompt_logprobs)
            jobs: list[Future[Any]] = [pool.submit(job) for job in others]
            for future in as_completed([*forward.values(), *sample.values(), set_slot, prompt_logprobs, *jobs]):
                future.result()
                advance(1)
            return CompiledPrograms(
                forward={bucket: future.result() for bucket, future in forward.items()},
                sample={program: future.result() for program, future in sample.items()},
                set_slot=set_slot.result(),
                prompt_logprobs=prompt_logprobs.result(),
            )

    def _compile_forward(self, bucket: Bucket) -> ForwardExecutor:
        compile_one = self.forward.layerwise if self.layerwise else self.forward.whole
        return compile_one(bucket, self.buckets.sample_rows_for(bucket))

    def _compile_sample(self, program: SampleProgram) -> Any:
        rows, mode, masked = program
        factory, vocab_size = self.forward.factory, self.forward.factory.config.vocab_size
        inputs = [self._like((rows, vocab_size), jnp.float32), self._like((rows,), jnp.int32)]
        if masked:
            inputs.append(self._like((rows, num_words(vocab_size)), jnp.int32))

        def lower() -> jax.stages.Lowered:
            if mode == "full":
                full = factory.sample_masked_full() if masked else factory.sample_full()
                return jax.jit(full, donate_argnums=(0, 1)).lower(self.forward.state, self.processors, *inputs)
            function = factory.sample_masked(mode) if masked else factory.sample(mode)
            return jax.jit(function, donate_argnums=(0,)).lower(self.forward.state, *inputs)

        name = f"sample {mode} {rows}" + (" masked" if masked else "")
        return self.forward.programs.load_or_compile(name, lower)

    def _compile_set_slot(self) -> Any:
        function = jax.jit(self.forward.factory.set_slot(), donate_argnums=(0,))
        example = slot_processors_like(self.forward.factory.sizes.longest, self._like)
        return self.forward.programs.load_or_compile("set slot", lambda: function.lower(self.processors, *example))

    def _compile_prompt_logprobs(self) -> Any:
        factory, params = self.forward.factory, self.forward.params
        function = jax.jit(factory.prompt_logprobs())
        hidden = self._like((factory.max_prefill_tokens, factory.config.hidden_size), params.embedding.dtype)
        ids, first = self._like((factory.max_prefill_tokens,), jnp.int32), self._like((), jnp.int32)
        return self.forward.programs.load_or_compile(
            f"prompt logprobs {hidden.shape}", lambda: function.lower(without_layers(params), hidden, ids, first)
        )

    def _like(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.forward.factory.mesh))
