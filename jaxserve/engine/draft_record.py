"""How often drafts were right. Host only."""

from __future__ import annotations

from dataclasses import dataclass

_PRIOR_WEIGHT = 6.0  # drafts that a guess counts for: with fewer, chance ends drafts that pay a little


@dataclass
class DraftRecord:
    """How often drafts were right, the latest counting most: those before the first wrong one, and that.

    Attributes:
        tried, kept: decaying counts.
        missing: of those tried, the ones that were looked for and not found.
    """

    tried: float = 0.0
    kept: float = 0.0
    missing: float = 0.0

    def add(self, drafted: int, kept: int, memory: float) -> None:
        """A draft that was not found counts as a wrong one: it saved nothing either."""
        self.tried = self.tried * memory + kept + (kept < drafted or not drafted)
        self.kept = self.kept * memory + kept
        self.missing = self.missing * memory + (not drafted)

    def acceptance(self, prior: float) -> float:
        """Probability that the next draft is right."""
        return (self.kept + _PRIOR_WEIGHT * prior) / (self.tried + _PRIOR_WEIGHT)

    def found_acceptance(self) -> float:
        """The same of one that is found, going by these drafts alone: a guess that it may be right counts for one."""
        return (self.kept + 0.5) / (self.tried - self.missing + 1)
