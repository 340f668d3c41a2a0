"""What ends a sequence. Host only."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import NamedTuple

from jaxserve.constraint import ConstraintError, TokenConstraint
from jaxserve.engine.request import FinishReason
from jaxserve.engine.sequence import Sequence


class Ending(NamedTuple):
    """Why a sequence ends; no reason: it does not.

    Attributes:
        stop_token: the token that ended it, if one did.
        error: what is wrong, with reason "error".
    """

    reason: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None


GOES_ON = Ending()


def ending_of(sequence: Sequence, token: int) -> Ending:
    """Whether a sequence ends with a token, which was appended to it; its constraint takes that in."""
    constraint = sequence.constraint
    if token in sequence.stop_token_ids and (constraint is None or constraint.is_complete):
        return Ending("stop", stop_token=token)
    if constraint is not None:
        error = _accept(constraint, token)
        if error is not None:
            return Ending("error", error=error)
        if constraint.is_final:
            return Ending("stop")
    return Ending("length") if sequence.num_output_tokens >= sequence.max_output_tokens else GOES_ON


def take_tokens(sequence: Sequence, tokens: Tokens[int]) -> tuple[tuple[int, ...], Ending]:
    """Appends tokens to a sequence up to its end: what comes after that is discarded. The tokens, and the end."""
    end = GOES_ON
    taken = 0
    while end.reason is None and taken < len(tokens):
        token = tokens[taken]
        taken += 1
        sequence.token_ids.append(token)
        end = ending_of(sequence, token)
    return tuple(tokens[:taken]), end


def _accept(constraint: TokenConstraint, token: int) -> str | None:
    """Takes the next token into a constraint; what is wrong, if it cannot."""
    try:
        constraint.accept(token)
    except ConstraintError as error:
        return str(error)
    return None
