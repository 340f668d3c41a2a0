"""When a drafter is shown what it does not draft in: as long as what drafts save is worth it. Host only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.engine.draft_lengths import DraftLengths, size_class

# Seconds that it takes to show a drafter a step with this many decode rows and this many tokens in chunks.
ShowingSeconds = Callable[[int, int], float]

_MEMORY = 0.999  # of what is known of a number of sequences, that a step later still counts
_TRIAL_STEPS = 16  # with prompts, that are shown before it is known what drafts save
_GROUPS_AT_ONCE = (
    2  # that are caught up on in a step: with more it takes twice as long, with fewer drafts begin too late
)
_RETURN = 1.25  # times what showing takes drafts must save to begin again: going back and forth has a price of its own


class PromptPieces(NamedTuple):
    """A step's prompts as the drafter would be shown them.

    Attributes:
        tokens: of a piece. It is larger than the step's where that is only so small because no drafts come between.
        share: of such a piece, that the step has.
        seconds: that the step's tokens take longer in such pieces.
    """

    tokens: int
    share: float = 1.0
    seconds: float = 0.0


@dataclass
class _Account:
    """Of steps with one number of sequences, the latest counting most.

    Attributes:
        decoded: tokens of each row in steps without prompts, which could have brought drafts.
        showing: seconds that it takes to show the drafter the other steps, shown or not, and what it had to catch up on;
            and what larger pieces of prompts take more.
        num_prompt_steps: that there were before it was known what drafts save.
        pays: what was decided last.
    """

    decoded: float = 0.0
    showing: float = 0.0
    num_prompt_steps: int = 0
    pays: bool = True

    def forget(self) -> None:
        self.decoded *= _MEMORY
        self.showing *= _MEMORY


class DraftShowing:
    """Decides whether a drafter that reads prompts sees a step, and what it may catch up on.

    Steps with prompts bring no drafts, and take longer where the drafter is shown them. So drafts must save more than that
    in the steps between them. What they save with a token of such a step `DraftLengths` knows; how many tokens there are
    for each second of showing follows from the steps of late. Both are counted where nothing is shown as well, so that the
    choice changes when the load does. They are counted as they would be with drafts: prompts come in larger pieces then, so
    that fewer steps have some.

    What was not shown is caught up on where drafts pay again. How long a sequence goes on nobody knows, so that its drafts
    may cost no more in advance than what they would have saved while it waited for them.

    To begin again, drafts must also be worth what all sequences then catch up on. That is paid once and is no sign that they
    are not.

    Args:
        seconds: see `ShowingSeconds`.
        behind_seconds: that it takes to show the drafter all that it has missed of the sequences that decode.
    """

    def __init__(
        self, lengths: DraftLengths, seconds: ShowingSeconds, behind_seconds: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.seconds = seconds
        self._behind_seconds = behind_seconds
        self._paid = 0.0  # seconds of catching up that were counted when drafts began again
        self._lengths = lengths
        self._accounts: dict[int, _Account] = {}
        self._forgone = 0.0  # seconds that drafts would have saved those who wait for them

    @property
    def may_spend(self) -> float:
        """Seconds that rows without drafts may take to catch up."""
        return self._forgone if self._lengths.is_adaptive else float("inf")

    def may_spend_at_once(self, most_tokens: int) -> float:
        """The same in one step, which is held up for long by no more than so many groups of `most_tokens`."""
        return min(self.may_spend, _GROUPS_AT_ONCE * self.seconds(0, most_tokens))

    def shows_prompts(self, num_decode: int, num_chunks: int, pieces: PromptPieces) -> bool:
        """Whether a step with these prompts is shown; it is taken into account."""
        account = self._account(num_decode + num_chunks)
        account.forget()
        account.num_prompt_steps += 1
        account.showing += max(0.0, pieces.share * self.seconds(num_decode, pieces.tokens) + pieces.seconds)
        account.decoded += 1.0 - pieces.share  # the rest of this step would have been one without prompts
        return self.pays(num_decode + num_chunks)

    def pays(self, num_rows: int) -> bool:
        """Whether drafts are worth what showing takes, with so many sequences."""
        if not self._lengths.is_adaptive:
            return True
        account, saving = self._account(num_rows), self._lengths.saving(num_rows)
        if saving is None:
            return account.num_prompt_steps <= _TRIAL_STEPS
        saved = saving * account.decoded
        if account.pays:
            account.pays = saving > 0.0 and saved >= account.showing
        elif saving > 0.0 and saved >= _RETURN * account.showing:
            behind = self._behind_seconds()
            account.pays = saved >= account.showing + behind
            if account.pays:
                self._paid = self._forgone = behind
        return account.pays

    def is_known_to_pay(self, num_rows: int) -> bool:
        """Whether drafts were seen to be worth what showing takes: steps with prompts are shown for their sake."""
        if not self._lengths.is_adaptive:
            return self._lengths.may_draft(num_rows)
        return self.pays(num_rows) and self._lengths.saving(num_rows) is not None

    def count_decoding(self, num_rows: int, tokens: float) -> None:
        """Takes a step without prompts into account that gave each row so many tokens."""
        account = self._account(num_rows)
        account.forget()
        account.decoded += tokens

    def wait(self, num_rows: int, num_waiting: int, most: float) -> None:
        """Counts what rows would have saved that bring no drafts to a step, since the drafter has not seen enough of them.

        Args:
            most: seconds that they take to catch up.
        """
        if not num_waiting or not self.pays(num_rows):
            self._forgone = self._paid = 0.0
            return
        saving = self._lengths.saving(num_rows)
        self._forgone = min(most, self._forgone + max(0.0, saving or 0.0) * num_waiting / num_rows)

    def spend(self, num_rows: int, seconds: float) -> None:
        """Takes into account what rows take to catch up."""
        self._forgone = max(0.0, self._forgone - seconds)
        paid = min(self._paid, seconds)
        self._paid -= paid
        self._account(num_rows).showing += seconds - paid

    def _account(self, num_rows: int) -> _Account:
        return self._accounts.setdefault(size_class(num_rows), _Account())
