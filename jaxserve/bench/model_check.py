"""What is wrong with a model, or with requests for it, as headers tell: before weights are read and programs compiled."""

from __future__ import annotations

from pathlib import Path

from jaxserve.bench.workload import Workload
from jaxserve.models.presets import is_preset, preset_config, preset_names


def check_model(model: str, workload: Workload, max_model_len: int | None) -> None:
    """Starts no JAX backend.

    Args:
        max_model_len: that the engine is given; None: what the model was made for.

    Raises:
        ValueError: there is no such model, or no request of the workload fits it.
        CheckpointError: a local folder or file holds none.
    """
    context = _context_of(model)
    longest = max_model_len or context
    if longest is not None:
        workload.fitting(longest)


def _context_of(model: str) -> int | None:
    """Tokens that the model was made for; None where it may have to be fetched first."""
    if is_preset(model):
        return preset_config(model).max_position_embeddings
    # Here and not at the top: they bring jax, which an architecture's name does not need.
    from jaxserve.checkpoint.inspection import inspect_checkpoint
    from jaxserve.checkpoint.source import KNOWN_MODELS, is_fetched

    if is_fetched(model):
        return None
    path = Path(model).expanduser()
    if not path.exists():
        names = ", ".join((*preset_names(), *KNOWN_MODELS))
        raise ValueError(f"unknown model {model!r}: give one of {names}, a JSON file, a local folder, or hf:ORG/NAME")
    return inspect_checkpoint(path).config.max_position_embeddings
