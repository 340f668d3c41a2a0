"""Runs the programs of speculation: owns the drafter's arrays and what is compiled for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.buckets import Buckets
from jaxserve.engine.decode_state import DecodeState
from jaxserve.engine.device_batch import Bucket, pack, packed_size
from jaxserve.engine.drafters import Drafter
from jaxserve.engine.executable_cache import ExecutableCache
from jaxserve.engine.executors import ResultPlaces, Results
from jaxserve.engine.head_drafters import HeadDrafter
from jaxserve.engine.processor_state import ProcessorState
from jaxserve.engine.program_choice import seconds_of_run, times_in_rounds
from jaxserve.engine.programs import ProgramFactory
from jaxserve.engine.schedule import PrefillChunk, ScheduledBatch
from jaxserve.engine.showing_times import num_shown
from jaxserve.engine.speculative_programs import SpeculativePrograms, resize_features
from jaxserve.engine.token_masks import num_words
from jaxserve.models.kv_cache import KVCache
from jaxserve.models.logit_processors import Logprobs
from jaxserve.models.speculative_sampling import Drafts
from jaxserve.sampling_params import SamplingMode
from jaxserve.sharding.placement import put_replicated, replicated


@dataclass(frozen=True)
class Drafting:
    """A drafter with its arrays, placed on the engine's devices.

    Attributes:
        params: arrays that it only reads.
        memory: arrays that its programs take and give back; not looked at where it uses the target's KV cache.
        description: tells one drafter's compiled programs from another's.
        synthetic_acceptance: as in `SpeculativeConfig`.
        reader: the drafter, where it reads hidden states of the target; `params` are `HeadArrays` then.
    """

    drafter: Drafter
    params: Any
    memory: Any
    description: str
    synthetic_acceptance: float | None = None
    reader: HeadDrafter | None = None


class DraftProgram(NamedTuple):
    """Which compiled program drafts."""

    bucket: Bucket
    mode: SamplingMode


class VerifyProgram(NamedTuple):
    """Which compiled program verifies."""

    bucket: Bucket
    mode: SamplingMode
    masked: bool


class Speculator:
    """Drafts and verifies for a `ModelRunner`; used by its thread."""

    def __init__(self, drafting: Drafting, factory: ProgramFactory, buckets: Buckets, places: ResultPlaces) -> None:
        self._drafting = drafting
        self._drafter = drafting.drafter
        self._memory = drafting.memory
        self._factory = factory
        self._functions = SpeculativePrograms(
            drafting.drafter, factory.sizes, factory.mesh, drafting.synthetic_acceptance
        )
        self._buckets = buckets
        self._replicated = replicated(factory.mesh)
        self._places = places
        self._draft: dict[DraftProgram, tuple[Any, Results]] = {}
        self._feed: dict[Bucket, Any] = {}
        self._observe: dict[Bucket, Any] = {}
        self._resize: dict[Bucket, Any] = {}
        self._verify: dict[VerifyProgram, Any] = {}
        self._set_history: Any = None

    @property
    def memory(self) -> Any:
        """The drafter's own donated arrays, as they are now."""
        return self._memory

    @property
    def params(self) -> Any:
        """The drafter's own arrays; none where they are the target's."""
        if self._drafting.reader is not None:
            return self._drafting.params.head
        return () if self._drafter.uses_target_cache else self._drafting.params

    @property
    def programs(self) -> list[Any]:
        """Everything that was compiled."""
        several = self._feed, self._observe, self._resize, self._verify
        every = [program for program, _ in self._draft.values()]
        every += [program for programs in several for program in programs.values()]
        return every if self._set_history is None else [*every, self._set_history]

    def jobs(
        self, programs: ExecutableCache, cache: KVCache, state: DecodeState, processors: ProcessorState
    ) -> list[Callable[[], None]]:
        """What is to be compiled, in any order, by any threads; the arrays give shapes and placement only."""
        steps = self._buckets.all()
        drafted = [bucket for bucket in steps if bucket.num_drafts]
        shown = {bucket: self._buckets.shown_for(bucket) for bucket in steps}
        reads, observes = self._drafter.reads_prompts, self._drafting.reader is not None
        fed = dict.fromkeys(shown[bucket] for bucket in steps if bucket.prefill_rows and reads)
        observed = dict.fromkeys(shown[bucket] for bucket in steps if observes)
        resized = [bucket for bucket in steps if observes and shown[bucket] != bucket]
        drafting_modes: tuple[SamplingMode, ...] = ("greedy",)
        if self._drafter.has_probabilities:
            drafting_modes = tuple(mode for mode in ("greedy", "full") if mode in self._buckets.verify_modes)
        compiler = _Compiler(self, programs, cache, state, processors)
        return [
            *((compiler.set_history,) if self._drafter.looks_back else ()),
            *(partial(compiler.feed, bucket) for bucket in fed),
            *(partial(compiler.observe, bucket) for bucket in observed),
            *(partial(compiler.draft, DraftProgram(bucket, mode)) for bucket in drafted for mode in drafting_modes),
            *(partial(compiler.resize, bucket) for bucket in resized),
            *(
                partial(compiler.verify, VerifyProgram(bucket, *kind))
                for bucket in drafted
                for kind in self._buckets.verifications(bucket)
            ),
        ]

    def begin(self, batch: ScheduledBatch, state: DecodeState) -> DecodeState:
        """Tells the device all tokens of the sequences that begin to decode with this step; `state` is donated.

        One that does not look back needs none of them, and they are a launch and two transfers for each prompt.
        """
        if not self._drafter.looks_back:
            return state
        for chunk in batch.prefill:
            if chunk.samples:
                end = chunk.start + len(chunk.token_ids)
                state = self._tell(state, chunk.slot, chunk.sequence.token_ids[:end])
        return state

    def rehearse_telling(self, state: DecodeState) -> DecodeState:
        """As `begin`, of a slot that there is not."""
        return self._tell(state, self._factory.sizes.max_num_seqs, []) if self._drafter.looks_back else state

    def _tell(self, state: DecodeState, slot: int, token_ids: Sequence[int]) -> DecodeState:
        tokens = np.zeros(self._factory.sizes.longest, np.int32)
        tokens[: len(token_ids)] = token_ids
        return self._set_history(state, *put_replicated((np.int32(slot), tokens), self._replicated))

    def draft(
        self,
        batch: ScheduledBatch,
        bucket: Bucket,
        mode: SamplingMode,
        cache: KVCache,
        state: DecodeState,
        processors: ProcessorState,
        packed: jax.Array,
    ) -> tuple[KVCache, Drafts | None]:
        """Starts what the step has for the drafter: what it is to catch up on, the drafting, or prompts that it is shown.

        Args:
            mode: of sampling, that the step needs.
            cache: the target's; donated where the drafter uses it.
        """
        uses_cache = self._drafter.uses_target_cache
        memory = cache if uses_cache else self._memory
        if self._drafter.reads_prompts:
            for group in batch.catch_up:
                self._show_missed(group, state)
            memory = self._memory
        if bucket.num_drafts:
            kind: SamplingMode = "full" if mode != "greedy" and self._drafter.has_probabilities else "greedy"
            more = () if kind == "greedy" else (processors,)
            compiled, results = self._draft[DraftProgram(bucket, kind)]
            places = self._places.take(results)
            memory, drafts = compiled(self._drafting.params, memory, state, packed, more, places)
            self._places.keep(results, drafts)
        elif bucket.prefill_rows and self._drafter.reads_prompts and batch.is_shown:
            shown, packed = self._shown(batch, bucket, packed)
            memory, drafts = self._feed[shown](self._drafting.params, memory, state, packed), None
        else:
            return cache, None
        if uses_cache:
            return memory, drafts
        self._memory = memory
        return cache, drafts

    def _shown(self, batch: ScheduledBatch, bucket: Bucket, packed: jax.Array) -> tuple[Bucket, jax.Array]:
        """A step in the size in which the drafter is shown it."""
        shown = self._buckets.shown_for(bucket)
        if shown == bucket:
            return bucket, packed
        return shown, put_replicated(pack(batch, shown, self._factory.sizes), self._replicated)

    def _show_missed(self, chunks: Sequence[PrefillChunk], state: DecodeState) -> None:
        """Shows the drafter tokens of sequences that decode, as it is shown prompts."""
        step = ScheduledBatch(decode=(), prefill=tuple(chunks))
        bucket = self._buckets.shown_for(self._buckets.for_batch(step))
        self._feed_step(step, bucket, state)

    def _feed_step(self, step: ScheduledBatch, bucket: Bucket, state: DecodeState) -> None:
        packed = put_replicated(pack(step, bucket, self._factory.sizes), self._replicated)
        self._memory = self._feed[bucket](self._drafting.params, self._memory, state, packed)

    def showing_seconds(self, programs: ExecutableCache, state: DecodeState, *, all_sizes: bool) -> dict[Bucket, float]:
        """What it takes to show the drafter a step with prompts, by its size as `Buckets.shown_for` has it; none: nothing.

        Args:
            all_sizes: False: of the smallest one alone, where padding costs as much as anything and measuring takes long.
        """
        buckets = {str(bucket): bucket for bucket in (*self._feed, *self._observe) if bucket.prefill_rows}
        names = sorted(buckets, key=lambda name: num_shown(buckets[name]))[: None if all_sizes else 1]
        measure = partial(times_in_rounds, lambda name: self._time_showing(buckets[name], state))
        for name in names:
            self._time_showing(buckets[name], state)
        seconds = programs.load_or_measure(f"showing of {', '.join(names)}", names, measure) if names else {}
        return {buckets[name]: found for name, found in seconds.items()}

    def _time_showing(self, bucket: Bucket, state: DecodeState) -> float:
        """Seconds that it takes to show a step without anybody in it."""
        nobody = ScheduledBatch(decode=(), prefill=())
        if self._drafting.reader is None:
            return seconds_of_run(lambda: self._feed_step(nobody, bucket, state), lambda: self._memory)
        like = self.features_like(bucket)
        step = pack(nobody, bucket, self._factory.sizes), np.zeros(like.shape, like.dtype)
        packed, features = put_replicated(step, self._replicated)

        def launch() -> None:
            self._observe_step(bucket, state, packed, features, np.zeros(bucket.prefill_rows, np.int32))

        return seconds_of_run(launch, lambda: self._memory)

    def features_like(self, bucket: Bucket) -> jax.ShapeDtypeStruct:
        """What a head reads of a step: of all its tokens."""
        shape = bucket.decode_tokens + bucket.prefill_tokens, self._factory.features_size
        return jax.ShapeDtypeStruct(shape, self._drafting.params.target.embedding.dtype, sharding=self._replicated)

    def observe(
        self,
        batch: ScheduledBatch,
        bucket: Bucket,
        state: DecodeState,
        packed: jax.Array,
        features: jax.Array | None,
        verified: jax.Array,
    ) -> None:
        """Shows a step whose tokens are drawn to the drafter, if it reads hidden states and is to see these.

        Args:
            state: after the step.
            packed: the step.
            features: of the step's `ForwardResult`.
            verified: as `pack_verified` has it; not looked at without drafts.
        """
        if self._drafting.reader is None or not batch.is_shown:
            return
        following = np.zeros(bucket.prefill_rows, np.int32)
        for row, chunk in enumerate(batch.prefill):
            end = chunk.start + len(chunk.token_ids)
            if end < len(chunk.sequence.token_ids):
                following[row] = chunk.sequence.token_ids[end]
        shown, packed = self._shown(batch, bucket, packed)
        if shown != bucket:
            features = self._resize[bucket](features)
        self._observe_step(shown, state, packed, features, following, *((verified,) if bucket.num_drafts else ()))

    def _observe_step(
        self,
        bucket: Bucket,
        state: DecodeState,
        packed: jax.Array,
        features: jax.Array | None,
        following: np.ndarray,
        *verified: jax.Array,
    ) -> None:
        seen = features, put_replicated(following, self._replicated), *verified
        self._memory = self._observe[bucket](self._drafting.params, self._memory, state, packed, *seen)

    def verify(
        self,
        bucket: Bucket,
        mode: SamplingMode,
        state: DecodeState,
        processors: ProcessorState,
        logits: jax.Array,
        slots: jax.Array,
        drafts: Drafts,
        masks: np.ndarray | None,
    ) -> tuple[DecodeState, ProcessorState, jax.Array, Logprobs | None]:
        """Starts a step's verification: state and processors (donated), `pack_verified`, log probabilities if any."""
        more = () if masks is None else (put_replicated(masks, self._replicated),)
        compiled = self._verify[VerifyProgram(bucket, mode, masks is not None)]
        if mode != "full":
            state, packed = compiled(state, logits, slots, drafts, *more)
            return state, processors, packed, None
        return compiled(state, processors, logits, slots, drafts, *more)


@dataclass(frozen=True)
class _Compiler:
    """Compiles one program at a time into its speculator."""

    owner: Speculator
    programs: ExecutableCache
    cache: KVCache
    state: DecodeState
    processors: ProcessorState

    def set_history(self) -> None:
        factory = self.owner._factory
        example = self._like(()), self._like((factory.sizes.longest,))
        function = jax.jit(factory.set_history(), donate_argnums=(0,))
        self.owner._set_history = self._load("set history", lambda: function.lower(self.state, *example))

    def draft(self, key: DraftProgram) -> None:
        draft = self.owner._functions.draft(*key)

        def in_place(params: Any, memory: Any, state: Any, packed: Any, more: Any, places: Any) -> tuple[Any, Drafts]:
            del places  # given away for the drafts
            return draft(params, memory, state, packed, *more)

        function = jax.jit(in_place, donate_argnums=(1, 5), keep_unused=True)
        more = () if key.mode == "greedy" else (self.processors,)
        results = self._drafts(key.bucket, key.mode)
        compiled = self._load(
            f"draft {key.mode} {key.bucket}",
            lambda: function.lower(*self._arguments(key.bucket), more, tuple(results.values())),
            key.bucket,
        )
        self.owner._draft[key] = compiled, results

    def feed(self, bucket: Bucket) -> None:
        function = jax.jit(self.owner._functions.feed(bucket), donate_argnums=(1,))
        self.owner._feed[bucket] = self._load(
            f"feed drafter {bucket}", lambda: function.lower(*self._arguments(bucket)), bucket
        )

    def observe(self, bucket: Bucket) -> None:
        owner, reader = self.owner, self.owner._drafting.reader
        if reader is None:
            raise ValueError("the drafter reads no hidden states")
        step = [owner.features_like(bucket), self._like((bucket.prefill_rows,))]
        if bucket.num_drafts:
            step.append(self._like((bucket.decode_rows, bucket.num_drafts + 3)))
        function = jax.jit(owner._functions.observe(reader, bucket), donate_argnums=(1,))
        owner._observe[bucket] = self._load(
            f"show drafter {bucket}", lambda: function.lower(*self._arguments(bucket), *step), bucket
        )

    def resize(self, bucket: Bucket) -> None:
        owner, reader = self.owner, self.owner._drafting.reader
        if reader is None:
            raise ValueError("the drafter reads no hidden states")
        function = jax.jit(resize_features(bucket, owner._buckets.shown_for(bucket)), out_shardings=owner._replicated)
        like = owner.features_like(bucket)
        owner._resize[bucket] = self._load(f"resize for drafter {bucket}", lambda: function.lower(like))

    def verify(self, key: VerifyProgram) -> None:
        bucket, vocab_size = key.bucket, self.owner._factory.config.vocab_size
        drafts = Drafts(**self._drafts(bucket, key.mode))
        step = [self._like((bucket.rows, vocab_size), jnp.float32), self._like((bucket.decode_rows,)), drafts]
        if key.masked:
            step.append(self._like((bucket.rows, num_words(vocab_size))))
        functions = self.owner._functions

        def lower() -> jax.stages.Lowered:
            if key.mode == "full":
                full = functions.verify_full(masked=key.masked)
                return jax.jit(full, donate_argnums=(0, 1)).lower(self.state, self.processors, *step)
            function = functions.verify(key.mode, masked=key.masked)
            return jax.jit(function, donate_argnums=(0,)).lower(self.state, *step)

        name = f"verify {key.mode} {bucket}" + (" masked" if key.masked else "")
        self.owner._verify[key] = self._load(name, lower)

    def _arguments(self, bucket: Bucket) -> tuple[Any, ...]:
        owner = self.owner
        memory = self.cache if owner._drafter.uses_target_cache else owner._memory
        return owner._drafting.params, memory, self.state, self._like((packed_size(bucket, owner._factory.sizes),))

    def _drafts(self, bucket: Bucket, mode: SamplingMode) -> dict[str, Any]:
        """Fields of `Drafts` that there are."""
        rows, count = bucket.decode_rows, bucket.num_drafts
        results = {"token_ids": self._like((rows, count)), "counts": self._like((rows,))}
        if self.owner._drafter.has_probabilities and mode != "greedy":
            vocab_size = self.owner._factory.config.vocab_size
            results["log_probabilities"] = self._like((rows, count, vocab_size), jnp.float32)
        return results

    def _like(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.owner._replicated)

    def _load(self, name: str, lower: Callable[[], jax.stages.Lowered], bucket: Bucket | None = None) -> Any:
        return self.programs.load_or_compile(name, lower, bucket=bucket)
