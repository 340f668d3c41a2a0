"""Constraints on what a request's output may be, as the engine sees them: sets of token ids, and no text."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class ConstraintError(RuntimeError):
    """A constraint cannot go on: it became too complex on the way. It ends its own choice alone."""


class TokenConstraint(Protocol):
    """How far the output of one choice is. Used by one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """Whether the output may end here."""
        ...

    @property
    def is_final(self) -> bool:
        """Whether it must: it is complete, and nothing may follow."""
        ...

    def accept(self, token_id: int) -> None:
        """Takes in the next token.

        Raises:
            ConstraintError: the token may not stand there, or what follows it is too complex.
        """
        ...

    def write_mask(self, mask: np.ndarray) -> None:
        """Sets the bits of the tokens that may follow in `mask` [words], int32 zeros; ends are not among them.

        Raises:
            ConstraintError: they cannot be found.
        """
        ...

    def forced_run(self, most: int) -> tuple[int, ...]:
        """The next tokens, as far as there is no choice: each is the only one that may stand there, and no end may.

        Nothing is taken in.

        Args:
            most: tokens that are told at most.
        """
        ...


class Constraint(Protocol):
    """What a request demands of its outputs; may be used by several requests and threads."""

    def start(self) -> TokenConstraint:
        """The constraint at the start of one output."""
        ...
