"""Whether an op takes its Hopper kernel or its plain XLA twin."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import jax

logger = logging.getLogger(__name__)


def check_implementation(implementation: str | None) -> None:
    """Raises:
    ValueError: it is no name of an implementation.
    """
    if implementation not in (None, "mosaic_gpu", "xla"):
        raise ValueError(f"{implementation=} must be 'mosaic_gpu', 'xla' or None")


def takes_kernel(
    op: str, implementation: str | None, unsupported_reason: Callable[[], str | None], *, is_expected: bool = True
) -> bool:
    """Whether an op runs its Hopper kernel, as asked for, or where nothing is asked, if it can.

    Args:
        op: its name, for messages.
        unsupported_reason: why the kernel can't take the op's arguments, None if it can; not called where XLA is asked for.
        is_expected: whether a GPU that falls back to plain XLA logs why, once, at WARNING.

    Raises:
        ValueError: `implementation` is no name of one.
        NotImplementedError: "mosaic_gpu" is asked for and can't run.
    """
    check_implementation(implementation)
    if implementation == "xla":
        return False
    reason = missing_device() or unsupported_reason()
    if reason is None:
        return True
    if implementation == "mosaic_gpu":
        raise NotImplementedError(f"the Hopper kernel of {op} can't run here: {reason}")
    if is_expected and jax.default_backend() == "gpu":
        _warn_of_fall_back(op, reason)
    return False


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
def _warn_of_fall_back(op: str, reason: str) -> None:
    """Says once for each op and reason that a GPU runs plain XLA in a kernel's place."""
    logger.warning("%s falls back to plain XLA on this GPU, which is slower: %s", op, reason)
