"""What goes wrong with files of models: one class, one line."""

from __future__ import annotations

_LONGEST = 2000  # characters of a message: values in it come out of files


class CheckpointError(RuntimeError):
    """A model cannot be fetched, read, converted or loaded. The message is one line: what, where, and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ...")
