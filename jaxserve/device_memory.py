"""How much of a GPU's memory JAX takes for itself: it asks for it all at once, when it first looks for devices."""

from __future__ import annotations

import os

_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
_OLD_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX takes either, and refuses both together
_DEFAULT_SHARE = 0.75  # JAX's own, where nothing is said
_FILLED = 0.97  # of what JAX has that can be planned with: what lies between arrays is lost


def claim_device_memory(share: float, num_devices: int = 1) -> None:
    """Has JAX take this share of a GPU's memory, unless the environment says how much. Before anything uses JAX.

    Several devices that share a model are left JAX's own share: NCCL takes memory beside it, and one start of a model on
    two cards ran out of that with 90%.
    """
    if num_devices == 1 and not _told():
        os.environ[_VARIABLE] = f"{share:g}"


def usable_device_bytes(limit: int, share: float) -> int:
    """Bytes of a GPU that may be planned with.

    Args:
        limit: what JAX has taken of it.
        share: of the whole memory that may be used.
    """
    return int(min(limit / _claimed() * share, limit * _FILLED))


def usable_in_words(share: float) -> str:
    """What `usable_device_bytes` are, and how they are made more."""
    claimed = _claimed()
    if share <= claimed:
        return f"--gpu-memory-utilization {share:g} of the device's"
    return f"the {claimed:g} of the device's that JAX has taken, of --gpu-memory-utilization {share:g}: {_VARIABLE} sets it"


def _claimed() -> float:
    """The share of the memory that JAX takes."""
    return float(_told() or _DEFAULT_SHARE)


def _told() -> str:
    """The share that the environment says; empty: it says none."""
    return os.environ.get(_VARIABLE, "") or os.environ.get(_OLD_VARIABLE, "")
