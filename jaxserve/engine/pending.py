"""Steps on their way through the device, and what the host reads of them when they are done."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.engine.device_batch import Bucket
from jaxserve.engine.schedule import DraftedTokens, LogprobRows, SampledTokens, ScheduledBatch
from jaxserve.models.logit_processors import Logprobs
from jaxserve.models.speculative_sampling import Drafts
from jaxserve.sampling_params import SamplingMode

_SAMPLING_COST: dict[SamplingMode, int] = {"greedy": 0, "random": 1, "filtered": 2, "full": 3}


@dataclass(frozen=True)
class PendingLogits:
    """A launched forward pass; the arrays are on the device and may not be ready."""

    batch: ScheduledBatch
    bucket: Bucket
    logits: jax.Array  # [rows, vocab]
    slots: jax.Array  # [rows]
    hidden: jax.Array  # [prefill_tokens, hidden], for log probabilities of prompts
    packed: jax.Array  # the step, as the device has it
    drafts: Drafts | None = None  # that the step brings to be verified; then there are logits of every one's position
    features: jax.Array | None = None  # as in `ForwardResult`


@dataclass(frozen=True)
class PendingTokens:
    """Launched sampling; `tokens` is on its way to the host."""

    batch: ScheduledBatch
    bucket: Bucket
    tokens: jax.Array  # [rows]; with drafts, as `pack_verified` has them
    logprobs: Logprobs | None  # of the tokens, where a row wants them
    prompt_logprobs: tuple[Logprobs, ...]  # of the prefill tokens, block by block, where a chunk wants them


def cheapest_mode(batch: ScheduledBatch, modes: tuple[SamplingMode, ...]) -> SamplingMode:
    """The cheapest compiled kind of sampling that serves every row of a step that samples."""
    wanted: set[SamplingMode] = {row.sequence.request.sampling.mode for row in batch.decode}
    wanted.update(chunk.sequence.request.sampling.mode for chunk in batch.prefill if chunk.samples)
    needed = max((_SAMPLING_COST[mode] for mode in wanted), default=0)
    return next(mode for mode in modes if _SAMPLING_COST[mode] >= needed)


def read_drafts(pending: PendingLogits) -> DraftedTokens:
    """A step's drafts on the host; waits for them.

    Raises:
        ValueError: it has none.
    """
    if pending.drafts is None:
        raise ValueError("the step was launched without drafts")
    rows = len(pending.batch.decode)
    return DraftedTokens(np.asarray(pending.drafts.token_ids)[:rows], np.asarray(pending.drafts.counts)[:rows])


def read_tokens(pending: PendingTokens) -> SampledTokens:
    """A step's tokens on the host; waits for them."""
    tokens = np.asarray(pending.tokens)
    if pending.bucket.num_drafts:
        return _verified_tokens(pending, tokens)
    decode, prefill = pending.batch.decode, pending.batch.prefill
    first = pending.bucket.decode_rows
    rows = np.concatenate([np.arange(len(decode)), np.arange(first, first + len(prefill))])
    counts = [1] * len(decode) + [int(chunk.samples) for chunk in prefill]
    return SampledTokens(
        token_ids=tokens[rows][:, None],
        counts=np.asarray(counts, np.int32),
        logprobs=None if pending.logprobs is None else _logprob_rows((pending.logprobs,), rows),
        prompt_logprobs=_logprob_rows(pending.prompt_logprobs) if pending.prompt_logprobs else None,
    )


def _verified_tokens(pending: PendingTokens, packed: np.ndarray) -> SampledTokens:
    """What `pack_verified` made of a step with drafts."""
    rows = packed[: len(pending.batch.decode)]
    width = rows.shape[1] - 2
    return SampledTokens(
        token_ids=rows[:, :width],
        counts=rows[:, width],
        num_drafts=rows[:, width + 1],
        logprobs=None if pending.logprobs is None else _logprob_rows((pending.logprobs,), np.arange(len(rows) * width)),
    )


def _logprob_rows(blocks: tuple[Logprobs, ...], rows: np.ndarray | None = None) -> LogprobRows:
    """Log probabilities on the host: of the given rows, or of every row, blocks one after the other."""
    tokens, top_ids, top = (
        np.concatenate([np.asarray(getattr(block, name)) for block in blocks]) for name in ("tokens", "top_ids", "top")
    )
    if rows is not None:
        tokens, top_ids, top = tokens[rows], top_ids[rows], top[rows]
    return LogprobRows(tokens=tokens, top_ids=top_ids, top=top)
