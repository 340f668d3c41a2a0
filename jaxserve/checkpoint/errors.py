"""What goes wrong with files of models: one class, one line."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A model cannot be fetched, read, converted or loaded. The message is one line: what, where, and the remedy."""
