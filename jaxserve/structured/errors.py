"""What can be wrong with a grammar that a client sends."""

from __future__ import annotations


class GrammarError(ValueError):
    """A grammar that cannot be enforced as it is written. The message is fit for a client.

    Attributes:
        path: the part at fault inside the grammar, such as "properties.age.not"; "" for the whole.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path
