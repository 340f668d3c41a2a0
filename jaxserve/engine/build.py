"""From a model and a configuration to a running engine: sizes, memory, compilation, thread."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, ModelConfig, QuantizationConfig
from jaxserve.engine.buckets import Buckets, make_buckets
from jaxserve.engine.build_devices import make_engine_mesh, platform_of, resolve_cache_dtype, resolve_dtype
from jaxserve.engine.build_drafting import (
    Model,
    check_depth,
    check_draft_model,
    check_vocabulary_size,
    draft_bytes_per_token,
    make_drafting,
)
from jaxserve.engine.build_heads import place_head, random_head
from jaxserve.engine.build_memory import memory_plan, told_when_exhausted
from jaxserve.engine.capacity import MemoryShare, check_steps_fit, check_weights_fit, plan_limits
from jaxserve.engine.client import ONLY_REPLICA, EngineClient, Replica
from jaxserve.engine.cluster import Follower, Leader
from jaxserve.engine.cluster_runner import LeadingRunner
from jaxserve.engine.device_batch import Sizes
from jaxserve.engine.draft_lengths import DraftLengths
from jaxserve.engine.executable_cache import ExecutableCache
from jaxserve.engine.host_pages import HostPages
from jaxserve.engine.kv_offload import plan_offload
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.memory_plan import HostMemory
from jaxserve.engine.prefill_sizes import BALANCED_TOKENS, PrefillSizes, balanced_tokens
from jaxserve.engine.runner import ModelRunner, device_bytes
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.showing_times import ShowingTimes
from jaxserve.engine.step_pace import StepPace
from jaxserve.engine.waiting_queue import SchedulingOrder
from jaxserve.kernels.all_reduce_add_rms_norm_mosaic_gpu import unsupported_reason
from jaxserve.kernels.peer_memory import ALIGNMENT, PeerLayout, PeerMemory, make_peer_memory
from jaxserve.models.draft_head import DraftHead
from jaxserve.models.kv_cache import kv_bytes_per_token
from jaxserve.models.params import LlamaParams, init_params
from jaxserve.models.presets import preset_config
from jaxserve.models.quantize_params import quantization_for, quantize_params
from jaxserve.models.rope import with_longest_sequence
from jaxserve.models.shard_layout import ShardLayout
from jaxserve.progress import Progress
from jaxserve.sharding.mesh import TENSOR_AXIS
from jaxserve.sharding.placement import put
from jaxserve.speculative_config import HEAD_METHODS, SpeculativeConfig

logger = logging.getLogger(__name__)


def wanted_quantization(model_config: ModelConfig, config: EngineConfig) -> QuantizationConfig | None:
    """What a dense model's weights are to be quantized into; None: they are to stay as they are.

    Raises:
        ValueError: the checkpoint is quantized in another way already.
    """
    if config.quantization is None:
        return None
    wanted, present = QuantizationConfig.named(config.quantization), model_config.quantization
    if present is None:
        return quantization_for(model_config, wanted)
    if (present.format, present.group_size) != (wanted.format, wanted.group_size):
        raise ValueError(
            f"quantization={config.quantization!r} was asked for, but the checkpoint is quantized as {present.name!r}: "
            "leave the option out, or use the checkpoint that was not quantized"
        )
    return None


def check_model_fits(
    model_config: ModelConfig, config: EngineConfig, mesh: Mesh, replica: Replica = ONLY_REPLICA
) -> None:
    """Before a model is loaded or made, from its sizes alone.

    Args:
        model_config: as its weights come.

    Raises:
        OutOfMemoryError: the devices have no room for it, or beside it for the sizes that are asked for.
        ValueError: sizes that do not divide over the mesh, or a checkpoint that is quantized in another way.
    """
    dtype = resolve_dtype(config, mesh)
    share = MemoryShare(replica.num_to_build)
    check_weights_fit(model_config, config, mesh, dtype, share)
    quantization = wanted_quantization(model_config, config)
    run = model_config if quantization is None else dataclasses.replace(model_config, quantization=quantization)
    check_steps_fit(run, config, mesh, dtype, resolve_cache_dtype(config, dtype), share)


def place_params(
    model_config: ModelConfig, params: LlamaParams, config: EngineConfig, mesh: Mesh, progress: Progress
) -> tuple[ModelConfig, LlamaParams]:
    """The model on its devices, quantized where the configuration asks for it; then with the config that says so.

    Args:
        params: as the checkpoint has them, on the host, or on devices by `ShardLayout.source_shardings`. Jax arrays that
            are quantized or laid out anew are deleted: there are never two models on a device.

    Raises:
        ValueError: sizes that do not divide over the mesh, or a checkpoint that is quantized in another way.
    """
    quantization = wanted_quantization(model_config, config)
    dense_config = model_config
    if quantization is not None:
        model_config = dataclasses.replace(model_config, quantization=quantization)
    layout = ShardLayout(model_config, mesh.size)
    placed = put(params, ShardLayout(dense_config, mesh.size).source_shardings(mesh))
    if quantization is not None:
        shardings = layout.source_shardings(mesh)
        with progress.task(f"quantizing to {quantization.name}", model_config.num_layers, "layers") as advance:
            placed = quantize_params(placed, dense_config, quantization, shardings, donate=True, advance=advance)
    return model_config, layout.arrange(placed, mesh)


@dataclass(frozen=True)
class BuiltRunner:
    """A runner that has compiled everything, and the sizes that it was made for."""

    runner: ModelRunner
    model_config: ModelConfig
    mesh: Mesh
    dtype: jnp.dtype
    limits: SchedulerLimits
    buckets: Buckets


def build_runner(
    model_config: ModelConfig,
    params: LlamaParams,
    config: EngineConfig,
    progress: Progress,
    replica: Replica = ONLY_REPLICA,
    draft: Model | DraftHead | None = None,
    cluster: Leader | Follower | None = None,
) -> BuiltRunner:
    """Plans memory and compiles every program, of one replica or of one host's part of it.

    Args:
        cluster: the hosts that share the model; None: this one has it to itself.
        draft: the model or head that drafts, where `config.speculative_config` asks for one, as its checkpoint has it.

    Raises:
        OutOfMemoryError: too little memory for the KV cache that is asked for.
        ValueError: sizes or models that do not go together.
    """
    check_draft_model(config.speculative_config, model_config, draft)
    if cluster is not None and config.speculative_config is not None:
        raise ValueError(f"speculative decoding does not run over several hosts yet, and nnodes={config.nnodes}")
    mesh = make_engine_mesh(config, replica.index)
    dtype = resolve_dtype(config, mesh)
    cache_dtype = resolve_cache_dtype(config, dtype)
    model_config, params = place_params(model_config, params, config, mesh, progress)
    device_config = ShardLayout(model_config, mesh.size).device_config
    draft = None if draft is None else _place_draft(draft, config, mesh, progress)
    offload = plan_offload(device_config, config, mesh, cache_dtype)
    draft_bytes = draft_bytes_per_token(draft, cache_dtype)
    share = MemoryShare(replica.num_to_build, device_bytes((params, None if draft is None else draft.params)))
    limits = plan_limits(device_config, config, mesh, cache_dtype, draft_bytes, offload=offload, share=share)
    if cluster is not None:
        limits = cluster.agree(limits)
    device_config = with_longest_sequence(device_config, limits.max_model_len)
    sizes = Sizes(
        max_num_seqs=limits.max_num_seqs,
        pages_per_seq=limits.pages_for(limits.longest_sequence),
        num_pages=limits.num_pages,
        page_size=limits.page_size,
    )
    buckets = _make_buckets(limits, config, model_config, mesh)
    drafting = None
    if config.speculative_config is not None:
        if isinstance(draft, Model):
            draft = Model(with_longest_sequence(draft.config, limits.max_model_len), draft.params)
        drafting = make_drafting(
            config.speculative_config, Model(device_config, params), draft, sizes, mesh, cache_dtype
        )
    host = None if offload is None else HostMemory(offload.num_bytes, offload.num_places)
    plan = partial(memory_plan, config=config, mesh=mesh, limits=limits, host=host, share=share)
    page_bytes = limits.page_size * (kv_bytes_per_token(device_config, cache_dtype) + draft_bytes) // mesh.size
    with told_when_exhausted(limits, page_bytes):
        with progress.task("making the KV cache", None, ""):
            runner = ModelRunner(
                device_config,
                params,
                mesh=mesh,
                sizes=sizes,
                buckets=buckets,
                cache_dtype=cache_dtype,
                layerwise=platform_of(mesh) == "cpu",
                program_folder=program_folder() if cluster is None else None,  # one of several hosts cannot be kept
                offload=offload,
                drafting=drafting,
                peers=None
                if config.disable_custom_all_reduce
                else peer_memory(device_config, mesh, dtype, limits.max_num_seqs),
            )
        runner.warm_up(progress, compares=cluster is None, check=lambda use: plan(use).check())
    measured = plan(runner.memory_use())  # with the places of results, which are there since programs have run
    measured.check()
    logger.info("%s", measured.table())
    return BuiltRunner(runner, model_config, mesh, dtype, limits, buckets)


def _make_buckets(limits: SchedulerLimits, config: EngineConfig, model_config: ModelConfig, mesh: Mesh) -> Buckets:
    drafting = config.speculative_config
    is_float8 = model_config.quantization is not None and model_config.quantization.format == "fp8"
    return make_buckets(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.max_prefill_rows,
        few_programs=platform_of(mesh) == "cpu",
        # Over two H200s a single row of Llama-3-8B took 3.45 ms and four 2.98; products of float8 are of 16 rows at least.
        has_single_row=mesh.size == 1 and not is_float8,
        num_speculative_tokens=0 if drafting is None else drafting.num_speculative_tokens,
    )


def peer_memory(model_config: ModelConfig, mesh: Mesh, dtype: jnp.dtype, max_num_seqs: int) -> PeerMemory | None:
    """Memory that devices exchange the sums of small steps through; None where they cannot, or have nothing to sum."""
    devices = list(mesh.devices.flat)
    if len(devices) == 1 or platform_of(mesh) != "gpu":
        return None
    reason: str | None = None
    if len(devices).bit_count() > 1:
        reason = f"{len(devices)} devices are no power of two"
    elif any(device.process_index != jax.process_index() for device in devices):
        reason = "the devices belong to several processes"
    else:
        rows = max(max_num_seqs, BALANCED_TOKENS)  # of a step that decodes, and takes on pieces of prompts
        slot_bytes = -(-4 * model_config.hidden_size // ALIGNMENT) * ALIGNMENT
        layout = PeerLayout(len(devices), rows, slot_bytes)
        row: Any = jax.ShapeDtypeStruct((1, model_config.hidden_size), dtype)
        reason = unsupported_reason(row, row.dtype, layout)
        if reason is None:
            return make_peer_memory(mesh, TENSOR_AXIS, layout)
    logger.warning("NCCL makes all sums over devices: %s", reason)
    return None


def build_engine(
    model_config: ModelConfig,
    params: LlamaParams,
    config: EngineConfig,
    progress: Progress,
    replica: Replica = ONLY_REPLICA,
    draft: Model | DraftHead | None = None,
    leader: Leader | None = None,
) -> EngineClient:
    """As `build_runner`; then starts the engine thread.

    Args:
        leader: of the hosts that share the model; None: this one has it to itself.
    """
    built = build_runner(model_config, params, config, progress, replica, draft, leader)
    runner, mesh, dtype, limits, buckets = built.runner, built.mesh, built.dtype, built.limits, built.buckets
    goal = None if config.max_tpot_ms is None else config.max_tpot_ms / 1e3
    client = EngineClient(
        config=dataclasses.replace(
            config,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_pages=limits.num_pages,
            dtype=dtype.name,  # pyright: ignore[reportArgumentType] - one of DType's names
        ),
        model_config=built.model_config,
        scheduler=Scheduler(
            limits,
            prefix_caching=config.enable_prefix_caching,
            host_pages=None
            if runner.page_copier is None
            else HostPages(runner.page_copier.num_places, runner.page_copier.room),
            order=SchedulingOrder(config.scheduling_policy),
            pace=StepPace(buckets.prefill_tokens, goal=goal, measured=runner.prompt_seconds),
            prefill_sizes=PrefillSizes.for_goal(buckets.prefill_tokens, _balanced_tokens(mesh), goal),
            drafting=None if config.speculative_config is None else _draft_lengths(config.speculative_config, buckets),
            showing_seconds=None if runner.showing_seconds is None else ShowingTimes(buckets, runner.showing_seconds),
        ),
        runner=runner if leader is None else LeadingRunner(runner, leader),
        device_kind=mesh.devices.flat[0].device_kind,
        replica=replica,
    )
    if leader is not None:
        leader.on_loss(client.fail)
    client.start()
    return client


def _balanced_tokens(mesh: Mesh) -> int | None:
    """As `PrefillSizes` takes it."""
    return None if platform_of(mesh) == "cpu" else balanced_tokens(mesh.devices.flat[0].device_kind)


def _draft_lengths(config: SpeculativeConfig, buckets: Buckets) -> DraftLengths:
    return DraftLengths(
        config.method,
        buckets.draft_lengths,
        buckets.drafting_rows[-1],
        adaptive=config.adaptive,
        reads_states=config.method in HEAD_METHODS,
    )


def _place_draft(draft: Model | DraftHead, config: EngineConfig, mesh: Mesh, progress: Progress) -> Model | DraftHead:
    """The draft model, or head, on the engine's devices, as they run it."""
    if isinstance(draft, DraftHead):
        return place_head(draft, resolve_dtype(config, mesh), mesh)
    draft_config, params = place_params(draft.config, draft.params, config_of_draft(config), mesh, progress)
    return Model(ShardLayout(draft_config, mesh.size).device_config, params)


def config_of_draft(config: EngineConfig) -> EngineConfig:
    """What the configuration says of the draft model's weights."""
    quantization = None if config.speculative_config is None else config.speculative_config.quantization
    return dataclasses.replace(config, quantization=quantization)  # pyright: ignore[reportArgumentType] - it checks that


def build_dummy_engine(
    model_config: ModelConfig, config: EngineConfig, progress: Progress, replica: Replica = ONLY_REPLICA
) -> EngineClient:
    """An engine with seeded random weights, made on the devices: for benchmarks.

    So is a draft model, of a named shape; a head has the shape that goes with the model, whatever it is called.

    Raises:
        ValueError: no such shape, or a draft model that does not go with the model; before any weights are made.
    """
    speculative = config.speculative_config
    check_depth(speculative, model_config)
    draft_config = None
    if speculative is not None and speculative.method == "draft_model":
        draft_config = preset_config(speculative.model or "")
        check_vocabulary_size(model_config, draft_config)
    target = _dummy_model(model_config, config, progress, replica)
    draft = None
    if draft_config is not None:
        draft = _dummy_model(draft_config, config_of_draft(config), progress, replica)
    elif speculative is not None and speculative.method in HEAD_METHODS:
        draft = random_head(speculative, model_config, config.seed or 0)
    return build_engine(target.config, target.params, config, progress, replica, draft)


def _dummy_model(model_config: ModelConfig, config: EngineConfig, progress: Progress, replica: Replica) -> Model:
    mesh = make_engine_mesh(config, replica.index)
    quantization = wanted_quantization(model_config, config)
    if quantization is not None:
        model_config = dataclasses.replace(model_config, quantization=quantization)
    dtype = resolve_dtype(config, mesh)
    check_model_fits(model_config, config, mesh, replica)
    with progress.task("making random weights", None, "arrays"):
        shardings = ShardLayout(model_config, mesh.size).source_shardings(mesh)
        programs = ExecutableCache(program_folder(), tuple(mesh.devices.flat), f"random weights {shardings}")
        seed = config.seed or 0
        return Model(model_config, init_params(model_config, seed, dtype, shardings, programs.load_or_compile))


def program_folder() -> Path | None:
    """Where compiled programs are kept between starts; None: in jax's own cache, where the user has configured that.

    Never in both: a CPU program that came out of jax's cache lacks some of its functions when it is serialized again.
    """
    if jax.config.jax_compilation_cache_dir is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    return Path(os.environ.get("JAXSERVE_HOME") or "~/.cache/jaxserve").expanduser() / "compiled"
