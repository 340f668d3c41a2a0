"""How well a model that runs in an engine foretells a text: what quantization costs."""

from __future__ import annotations

import math
import queue
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.engine.client import EngineClient
from jaxserve.engine.request import RequestOutput
from jaxserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log probability of a text's tokens.

    Attributes:
        num_tokens: that were foretold.
    """

    value: float
    num_tokens: int


def perplexity(engine: EngineClient, token_ids: Sequence[int], window: int, timeout: float = 600.0) -> Perplexity:
    """Perplexity of a text, cut into windows that each begin anew; the first token of a window is given.

    Goes the way of every prompt: through the KV cache, in its element type.

    Args:
        window: tokens; one more must fit the engine's longest sequence.
        timeout: seconds that one window may take.

    Raises:
        ValueError: a text of fewer than two tokens, or a window of fewer.
        RuntimeError: the engine failed.
    """
    if min(window, len(token_ids)) < 2:
        raise ValueError(f"{window=} and the text's {len(token_ids)} tokens must be at least 2")
    logprobs: list[float] = []
    for start in range(0, len(token_ids), window):
        part = token_ids[start : start + window]
        if len(part) > 1:
            logprobs += _logprobs(engine, part, timeout)
    return Perplexity(math.exp(-sum(logprobs) / len(logprobs)), len(logprobs))


def _logprobs(engine: EngineClient, token_ids: Sequence[int], timeout: float) -> list[float]:
    """Of each token but the first."""
    outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    engine.submit_with_callback(token_ids, sampling, outputs.put)
    output = outputs.get(timeout=timeout)
    if output.error is not None or output.prompt_logprobs is None:
        raise RuntimeError(f"the engine gave no log probabilities: {output.error}")
    return [entry.logprob for entry in output.prompt_logprobs if entry is not None]
