"""Which steps a head that reads hidden states is shown: those from which drafts are worth it. Host only."""

from __future__ import annotations

import math

from jaxserve.engine.draft_lengths import DraftLengths
from jaxserve.engine.draft_showing import DraftShowing, PromptPieces, ShowingSeconds

_TRIAL_STEPS = 8  # in which a head is shown all again, to see what its drafts bring by now
_TRIAL_COST = 0.005  # of all time, that this may take
_REST = 64  # steps without showing at least before the next trial


class HeadShowing:
    """Shows a head every step while its drafts are worth that, and else now and then a few.

    Showing costs about what a layer of the model does, in every step. What a head was not shown it can never see, since
    hidden states are gone after their step: its cache has a gap there for good. A step that is shown makes it ready to draft
    all the same, with a text of which it has not seen all; how much worse its drafts are for that shows in how many are
    kept, and nothing else depends on it.

    Steps with prompts bring no drafts but take longer where they are shown: what drafts save in the others must be more, as
    `DraftShowing` weighs it for drafters that read prompts.

    Args:
        seconds: that showing steps with prompts takes.
    """

    def __init__(self, lengths: DraftLengths, seconds: ShowingSeconds) -> None:
        self._lengths = lengths
        self._account = DraftShowing(lengths, seconds)
        self._is_shown = True  # and so was the step before
        self._num_steps = 0  # since that changed

    def shows_prompts(self, num_decode: int, num_chunks: int, pieces: PromptPieces) -> bool:
        """Whether a step with these prompts is shown; it is taken into account."""
        pays = self._account.shows_prompts(num_decode, num_chunks, pieces)
        self._decide(pays=pays, may_try=False)
        return self._is_shown

    def shows_decoding(self, num_rows: int) -> tuple[bool, bool]:
        """Whether a step without prompts may bring drafts, and whether it is shown."""
        was_shown = self._is_shown
        share = self._lengths.showing_share(num_rows)
        rest = max(_REST, math.ceil(_TRIAL_STEPS * share / _TRIAL_COST))
        may_try = self._lengths.may_draft(num_rows) and self._num_steps >= rest
        self._decide(pays=self._account.pays(num_rows), may_try=may_try)
        return was_shown and self._is_shown, self._is_shown

    def is_known_to_pay(self, num_rows: int) -> bool:
        """As `DraftShowing.is_known_to_pay`."""
        return self._account.is_known_to_pay(num_rows)

    def count_decoding(self, num_rows: int, tokens: float) -> None:
        """As `DraftShowing.count_decoding`."""
        self._account.count_decoding(num_rows, tokens)

    def _decide(self, *, pays: bool, may_try: bool) -> None:
        is_shown = pays or (self._num_steps < _TRIAL_STEPS if self._is_shown else may_try)
        self._num_steps = self._num_steps + 1 if is_shown == self._is_shown else 0
        self._is_shown = is_shown
