"""`jaxserve serve`: a model by its name, over HTTP."""

from __future__ import annotations

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.progress import Progress
from jaxserve.protocol.launch import launch
from jaxserve.protocol.service import OpenAIService
from jaxserve.server.lifecycle import run


def serve(model: str, engine_config: EngineConfig, server_config: ServerConfig, progress: Progress) -> int:
    """Loads and serves a model until a signal ends it.

    Args:
        model: a known name, a local folder or file, or "hf:ORG/NAME".

    Returns:
        The process's exit code: 0 after a clean drain, 3 if answers had to be cut short, 1 if the engine failed.

    Raises:
        RuntimeError: it cannot listen on the address, or use the TLS files.
        CheckpointError: the model cannot be found, read or used.
    """

    def load() -> OpenAIService:
        return launch(
            model,
            engine_config,
            progress,
            server_config.served_model_name,
            allow_special_tokens_in_content=server_config.allow_special_tokens_in_content,
            tool_call_parser=server_config.tool_call_parser,
            pinned_prompt=server_config.pinned_prompt,
        )

    return run(load, server_config)
