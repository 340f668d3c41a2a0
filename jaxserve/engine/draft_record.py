"""How often drafts were right. Host only."""

from __future__ import annotations

from dataclasses import dataclass

_PRIOR_WEIGHT = 4.0  # drafts that a guess counts for


@dataclass
class DraftRecord:
    """How often drafts were right, the latest counting most: those before the first wrong one, and that.

    Attributes:
        tried, kept: decaying counts.
    """

    tried: float = 0.0
    kept: float = 0.0

    def add(self, drafted: int, kept: int, memory: float) -> None:
        """A draft that was not found counts as a wrong one: it saved nothing either."""
        self.tried = self.tried * memory + kept + (kept < drafted or not drafted)
        self.kept = self.kept * memory + kept

    def acceptance(self, prior: float) -> float:
        """Probability that the next draft is right."""
        return (self.kept + _PRIOR_WEIGHT * prior) / (self.tried + _PRIOR_WEIGHT)
