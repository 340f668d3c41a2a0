"""What a client asks of sampling: frozen and validated."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_CHOICES = 128  # OpenAI's limit of `n`
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens of one request are drawn, and when it ends.

    Attributes:
        max_tokens: output tokens at most; None: as many as the context has room for.
        temperature: 0 is greedy; logits are divided by it.
        top_p: smallest set of most likely tokens whose mass reaches it (https://arxiv.org/abs/1904.09751); 0 keeps one.
        top_k: that many most likely tokens; 0 or -1: all.
        min_p: tokens at least this many times as likely as the most likely one (https://arxiv.org/abs/2407.01082).
        seed: signed 64-bit; the same seed gives the same tokens whatever else runs; None: random.
        n: choices for one prompt; choice i draws from a stream of its own, choice 0 from the one that n=1 has.
        stop_token_ids: end the output with finish_reason "stop", also under ignore_eos.
        ignore_eos: the model's own end-of-text ids do not end the output.

    Raises:
        ValueError: names the field, its value and the range.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        self._check_range("temperature", 0.0, 2.0)
        self._check_range("top_p", 0.0, 1.0)
        self._check_range("min_p", 0.0, 1.0)
        if self.top_k < -1:
            raise ValueError(f"top_k={self.top_k} must be -1 or 0 (off) or positive")
        if self.seed is not None and not SEED_MIN <= self.seed <= SEED_MAX:
            raise ValueError(f"seed={self.seed} must fit a signed 64-bit integer")
        if not 1 <= self.n <= MAX_CHOICES:
            raise ValueError(f"n={self.n} must lie in 1..{MAX_CHOICES}")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids={list(self.stop_token_ids)} must not be negative")

    def _check_range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not math.isfinite(value) or not low <= value <= high:
            raise ValueError(f"{name}={value} must lie in {low:g}..{high:g}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
