"""What every op asks before it takes its Hopper kernel."""

from __future__ import annotations

import functools
import logging

import jax

logger = logging.getLogger(__name__)


def missing_device() -> str | None:
    """Why this process's default device can't run a Hopper kernel, or None if it can."""
    if jax.default_backend() != "gpu":
        return f"the default device is a {jax.default_backend()}, not a GPU"
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability != "9.0":
        return f"it needs compute capability 9.0, the device has {capability}"
    if jax.__version_info__ < (0, 11):
        return f"it needs jax 0.11 or newer, this is {jax.__version__}"
    return None


@functools.cache
def warn_of_fall_back(op: str, reason: str) -> None:
    """Says once for each op and reason that a GPU runs plain XLA in a kernel's place."""
    logger.warning("%s falls back to plain XLA on this GPU, which is slower: %s", op, reason)
