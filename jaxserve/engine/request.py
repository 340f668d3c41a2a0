"""What crosses between the engine and the text side: plain, picklable data. The engine knows token ids only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from jaxserve.engine.prefix_cache import CacheDomain
from jaxserve.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Request:
    """What a client asked: a prompt of token ids, and how to continue it.

    Attributes:
        request_id: the engine's own id, unique among live requests (never a client's).
        arrival_time: `time.monotonic()` seconds at submission.
        cache_salt: only requests with the same salt share KV pages; None: those without one do.
        priority: under the policy "priority", requests with a smaller one go first.
        is_counted: among what was asked of the engine, and its tokens; not what the engine asks of itself.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float
    cache_salt: str | None = None
    priority: int = 0
    is_counted: bool = True

    @cached_property
    def prompt_bytes(self) -> bytes:
        """The prompt's token ids, four bytes each; all choices cut their pages' keys out of it."""
        return token_bytes(self.prompt_token_ids)

    @cached_property
    def cache_domain(self) -> CacheDomain:
        return CacheDomain(salt=self.cache_salt)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities where one token stands: float32 log-softmax of the raw logits, whatever the sampling is set to.

    Attributes:
        logprob: of the token that stands there.
        top: (token id, log probability) of the most likely ones, as many as were asked for, most likely first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class RequestOutput(NamedTuple):  # and no dataclass: there is one for each token, and a tuple takes a third of the time
    """New tokens of one choice of a request, as one step produced them.

    Attributes:
        index: which choice (0 .. n-1).
        token_ids: the new ones only. A stop token that ended the choice is included as the last one.
        finish_reason: None while the choice goes on. "stop": an end-of-text or stop token; "length": max_tokens or context.
        stop_token_id: the token that ended it, if one did.
        num_cached_tokens: prompt tokens whose keys and values were there when the choice was first admitted.
        error: message, with finish_reason "error".
        is_retryable: with an error: it was the engine's fault, and the same request may well succeed with another.
        logprobs: of each of `token_ids`, if asked for.
        prompt_logprobs: of each prompt token, if asked for; the first is None, for nothing stands before it. Comes once,
            with the first output of choice 0.
        time: `time.monotonic()` seconds at which the engine had the tokens.
        scheduled_time: the same clock, when the choice first got into a step; 0 if it never did.
        is_constraint_failure: with an error: the request's constraint could not go on, which is no fault of the engine's.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    is_retryable: bool = False
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    time: float = 0.0
    scheduled_time: float = 0.0
    is_constraint_failure: bool = False


def token_bytes(token_ids: Tokens[int]) -> bytes:
    """Token ids as int32, one after the other: a key that is equal exactly when they are."""
    return array("i", token_ids).tobytes()


class RequestError(ValueError):
    """A request that can never be served as asked (too long, bad token id): the client's mistake.

    Attributes:
        parameter: the field at fault, if one is.
        code: OpenAI's error code, such as "context_length_exceeded".
    """

    def __init__(self, message: str, *, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


class QueueFullError(RuntimeError):
    """More requests wait than the engine may queue; try again later."""


class EngineStoppedError(RuntimeError):
    """The engine drains, has stopped, or failed; it takes no new requests."""
