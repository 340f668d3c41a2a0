"""From a model's folder to a running engine: what happens in the engine's process, whichever that is."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from jax.sharding import Mesh

from jaxserve.checkpoint.draft_heads import load_draft_head
from jaxserve.checkpoint.manifest import TOKENIZER_FOLDER, read_manifest
from jaxserve.checkpoint.store import load_checkpoint
from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.build import (
    build_engine,
    check_model_fits,
    config_of_draft,
    make_engine_mesh,
    resolve_dtype,
    wanted_quantization,
)
from jaxserve.engine.build_drafting import Model, check_depth, check_draft_model
from jaxserve.engine.capacity import check_weights_fit
from jaxserve.engine.client import EngineClient, Replica
from jaxserve.engine.cluster import Follower, join_cluster
from jaxserve.engine.process_messages import HostedEngine
from jaxserve.engine.replicas import start_engine
from jaxserve.models.draft_head import DraftHead
from jaxserve.progress import Progress
from jaxserve.structured.compiler import GrammarCompiler
from jaxserve.text.tokenizer import load_tokenizer


def start_checkpoint_engine(
    folder: Path, draft_folder: Path | None, config: EngineConfig, progress: Progress
) -> HostedEngine:
    """An engine that runs a model which `jaxserve convert` has made, and what compiles grammars for it.

    Args:
        draft_folder: of the model or head that drafts; None: none does.

    Raises:
        CheckpointError: the model cannot be read or used.
        ValueError, OutOfMemoryError: sizes that do not go together, or do not fit the device.
        ClusterError: another host with which this one was to share the model is gone.
    """
    leader = join_cluster(config)
    if isinstance(leader, Follower):
        raise ValueError(f"node_rank={config.node_rank} follows host 0, and serves nothing: `launch_follower` runs it")

    def build(config: EngineConfig, replica: Replica) -> EngineClient:
        mesh = make_engine_mesh(config, replica.index)
        target = read_manifest(folder).model_config
        check_depth(config.speculative_config, target)
        # What is wrong with a head, or a draft model, is told before the large weights are read.
        draft = None if draft_folder is None else load_draft(draft_folder, config, target, progress, mesh)
        check_draft_model(config.speculative_config, target, draft)
        check = partial(check_model_fits, config=config, mesh=mesh, replica=replica)
        quantization = partial(wanted_quantization, config=config)
        checkpoint = load_checkpoint(folder, config.dtype, progress, mesh=mesh, check=check, quantization=quantization)
        return build_engine(checkpoint.model_config, checkpoint.params, config, progress, replica, draft, leader)

    grammars = GrammarCompiler(lambda: load_tokenizer(folder / TOKENIZER_FOLDER))
    return HostedEngine(start_engine(config, build), grammars.future, grammars.close, grammars.drop)


def load_draft(
    folder: Path, config: EngineConfig, target: ModelConfig, progress: Progress, mesh: Mesh
) -> Model | DraftHead:
    """The model or head that drafts, to be placed beside the one that is served.

    Raises:
        CheckpointError: a head that is damaged, or of another model.
        OutOfMemoryError: a model that the devices have no room for beside the one that is served.
    """
    method = None if config.speculative_config is None else config.speculative_config.method
    if method == "eagle" or method == "eagle3" or method == "medusa":
        return load_draft_head(folder, method, target)
    check = partial(check_weights_fit, config=config, mesh=mesh, dtype=resolve_dtype(config, mesh))
    quantization = partial(wanted_quantization, config=config_of_draft(config))
    checkpoint = load_checkpoint(folder, config.dtype, progress, mesh=mesh, check=check, quantization=quantization)
    return Model(checkpoint.model_config, checkpoint.params)
