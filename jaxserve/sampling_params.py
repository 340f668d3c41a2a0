"""What a client asks of sampling: frozen and validated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from jaxserve.constraint import Constraint

MAX_CHOICES = 128  # OpenAI's limit of `n`
MAX_LOGPROBS = 20  # OpenAI's limit of `top_logprobs`
MAX_LOGIT_BIAS = 1024  # entries
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1

# Kinds of sampling; each also does what those before it do.
SamplingMode = Literal["greedy", "random", "filtered", "full"]


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
        presence_penalty: subtracted from the logit of every token that the output holds.
        frequency_penalty: subtracted as many times as the output holds the token.
        repetition_penalty: positive logits of tokens that prompt or output hold are divided by it, negative ones
            multiplied (https://arxiv.org/abs/1909.05858); 1: off.
        logit_bias: (token id, bias) pairs; added to the logits.
        min_tokens: output tokens before which no end-of-text or stop token is drawn.
        logprobs: alternatives that are reported beside each output token's log probability; None: nothing is.
        prompt_logprobs: the same for the prompt's tokens.
        constraint: what every choice must follow; it ends where that is complete, and there alone but for max_tokens. Log
            probabilities stay those of the raw logits.

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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None

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
        self._check_processors()

    def _check_processors(self) -> None:
        self._check_range("presence_penalty", -2.0, 2.0)
        self._check_range("frequency_penalty", -2.0, 2.0)
        if not math.isfinite(self.repetition_penalty) or self.repetition_penalty <= 0.0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be positive and finite (1: off)")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries, more than {MAX_LOGIT_BIAS}")
        for token, bias in self.logit_bias:
            if token < 0:
                raise ValueError(f"logit_bias: token id {token} must not be negative")
            if not math.isfinite(bias) or not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias: {bias} of token {token} must lie in -100..100")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens={self.min_tokens} must not be negative")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise ValueError(f"{name}={value} must lie in 0..{MAX_LOGPROBS}")

    def _check_range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not math.isfinite(value) or not low <= value <= high:
            raise ValueError(f"{name}={value} must lie in {low:g}..{high:g}")

    @property
    def changes_logits(self) -> bool:
        """Whether penalties, biases or min_tokens change what is drawn from."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.min_tokens
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @cached_property  # it is asked for at every step
    def mode(self) -> SamplingMode:
        """The cheapest kind of sampling that does all that is asked."""
        if self.changes_logits or self.logprobs is not None:
            return "full"
        if self.greedy:
            return "greedy"
        if self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0:
            return "filtered"
        return "random"
