"""What goes wrong with files of models: one class, one line."""

from __future__ import annotations

_LONGEST = 2000  # characters of a message: values in it come out of files


class CheckpointError(RuntimeError):
    """A model cannot be fetched, read, converted or loaded. The message is one line: what, where, and the remedy."""

    def __init__(self, message: str) -> None:
        short = message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ..."
        super().__init__(on_one_line(short))


def on_one_line(text: str) -> str:
    """Text out of a file, with escapes for ends of lines and for what tells a terminal to do something."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in text)
