"""Whether an engine gets a process of its own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pkgutil

from jaxserve.config import EngineConfig, EngineProcess


def has_own_process(choice: EngineProcess, config: EngineConfig) -> bool:
    """Whether the engine is to run in another process than the server.

    "auto" is off where the model runs on the CPU, which the two would share anyway. Which device that will be is told
    without asking jax, which would take hold of it in this process.
    """
    return _finds_accelerator(config) if choice == "auto" else choice == "on"


def _finds_accelerator(config: EngineConfig) -> bool:
    if config.device != "auto":
        return config.device != "cpu"
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms.split(",")[0].strip() != "cpu"
    return bool(importlib.metadata.entry_points(group="jax_plugins")) or _has_plugin_folder() or _has("libtpu")


def _has_plugin_folder() -> bool:
    """jax's plugins for devices are found by a folder that they share, too."""
    spec = importlib.util.find_spec("jax_plugins")
    return spec is not None and any(pkgutil.iter_modules(spec.submodule_search_locations or ()))


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
