"""`jaxserve serve`: a model by its name, over HTTP."""

from __future__ import annotations

import logging
import os
import sys

import jax

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.engine_process import ProcessSetup
from jaxserve.engine.process_choice import has_own_process
from jaxserve.progress import Progress
from jaxserve.protocol.launch import launch, launch_follower
from jaxserve.protocol.service import OpenAIService
from jaxserve.server.lifecycle import EXIT_FAILED, EXIT_OK, run


def serve(
    model: str, engine_config: EngineConfig, server_config: ServerConfig, progress: Progress, setup: ProcessSetup
) -> int:
    """Loads and serves a model until a signal ends it; where this host follows another one, until that one ends.

    Args:
        model: a known name, a local folder or file, or "hf:ORG/NAME".
        setup: how the engine's process speaks to people, if it gets one.

    Returns:
        The process's exit code: 0 after a clean drain, 3 if answers had to be cut short, 1 if the engine failed.

    Raises:
        RuntimeError: it cannot listen on the address, or use the TLS files.
        CheckpointError: the model cannot be found, read or used.
        ClusterError: this host follows another one, which is gone.
        EngineProcessError: the engine's process ended while it loaded.
    """
    if engine_config.nnodes > 1 and server_config.restart_engine:
        raise ValueError(
            f"restart_engine does not go with nnodes={engine_config.nnodes}: all hosts must be started again"
        )
    if engine_config.node_rank > 0:
        launch_follower(model, engine_config, progress)
        return EXIT_OK

    own_process = has_own_process(server_config.engine_process, engine_config)
    if own_process:
        # Conversion may use jax. The accelerator is the engine's: whoever else has jax look for it takes its memory.
        jax.config.update("jax_platforms", "cpu")

    def load() -> OpenAIService:
        service = launch(
            model,
            engine_config,
            progress,
            server_config.served_model_name,
            allow_special_tokens_in_content=server_config.allow_special_tokens_in_content,
            tool_call_parser=server_config.tool_call_parser,
            pinned_prompt=server_config.pinned_prompt,
            pinned_prompt_name=server_config.pinned_prompt_name,
            engine_process=setup if own_process else None,
        )
        service.prepare_grammars()
        return service

    exit_code = run(load, server_config)
    if engine_config.nnodes > 1 and exit_code == EXIT_FAILED:
        # At an orderly exit jax waits for the hosts that are gone, and aborts when they do not come.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code
