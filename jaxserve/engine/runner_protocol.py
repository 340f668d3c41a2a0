"""Who launches steps, as the engine loop sees them."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from jaxserve.engine.schedule import DraftedTokens, SampledTokens, ScheduledBatch


class Runner(Protocol):
    """What the engine loop needs of a runner; tests have one without a device."""

    def launch_forward(self, batch: ScheduledBatch) -> Any: ...
    def fetch_drafts(self, logits: Any) -> DraftedTokens: ...
    def launch_sample(self, logits: Any, masks: np.ndarray | None = None) -> Any: ...
    def is_ready(self, pending: Any) -> bool: ...
    def fetch(self, pending: Any) -> SampledTokens: ...
    def close(self) -> None: ...
