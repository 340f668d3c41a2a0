"""Constraints on what a request's output may be, as the engine sees them: sets of token ids, and no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class ConstraintError(RuntimeError):
    """A constraint cannot go on: it became too complex on the way. It ends its own choice alone."""


class MaskBatch(Protocol):
    """Writes the masks of many outputs at once, for less than they cost one by one."""

    def write(self, states: Sequence[TokenConstraint], masks: np.ndarray, rows: Sequence[int]) -> dict[int, str]:
        """Sets masks[row] of each state to what its `write_mask` makes of zeros.

        Args:
            states: that have this as their `batch`.
            masks: [rows, words] int32.
            rows: one for each state.

        Returns:
            By place among the states, why a mask cannot be found.
        """
        ...


class TokenConstraint(Protocol):
    """How far the output of one choice is. Used by one thread at a time."""

    @property
    def batch(self) -> MaskBatch | None:
        """What writes the masks of this and others together; None: there is no such thing."""
        ...

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

    def look_ahead(self, drafts: Sequence[int], masks: np.ndarray) -> list[bool]:
        """Writes what may follow each of some drafted tokens, if those before it are taken; none of them is.

        It ends before the first draft that may not stand there, and before one after which nothing may follow.

        Args:
            masks: [drafts, words], int32 zeros; each is set as `write_mask` does.

        Returns:
            Of each draft whose mask is written, whether the output may end after it.
        """
        ...


class Constraint(Protocol):
    """What a request demands of its outputs; may be used by several requests and threads."""

    def start(self) -> TokenConstraint:
        """The constraint at the start of one output."""
        ...
