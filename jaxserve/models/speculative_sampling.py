"""Which drafts the target keeps, and what it says after them: on the device, for a whole batch at once.

Two rules, and both leave every token distributed exactly as the target alone would draw it:

* Equality: at each position the target draws its own token with the noise that belongs to that position of that request,
  and a draft is kept while it is that very token. What comes out is then the text without speculation, token by token,
  whatever was drafted. For greedy rows it is the only rule; for seeded ones it keeps the promise of the seed; and for
  drafters without probabilities it accepts as often as rejection sampling would.
* Rejection sampling (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023,
  https://arxiv.org/abs/2211.17192, and Chen et al., 2023, https://arxiv.org/abs/2302.01318): draft d, drawn with
  probability q(d), is kept with probability min(1, p(d) / q(d)); after the first that is not, a token is drawn in
  proportion to max(p - q, 0). It keeps more, but which text comes out depends on how far was drafted.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxserve.models.sampling import SamplingArrays, log_probabilities, row_keys, sample
from jaxserve.sampling_params import SamplingMode

# What is folded into a position's key for the further draws there; the token's own noise comes of the key itself.
_ACCEPTANCE, _RESIDUAL, _SYNTHETIC = 1, 2, 3


@struct.dataclass
class Drafts:
    """Tokens that may follow each row's last token.

    Attributes:
        counts: how many of a row's drafts there are; the others are padding.
        log_probabilities: that each was drawn with, of the whole vocabulary; None: the drafter gives none, and the equality
            rule serves every row.
    """

    token_ids: Int32[Array, "rows drafts"]
    counts: Int32[Array, " rows"]
    log_probabilities: Float[Array, "rows drafts vocab"] | None = None


@struct.dataclass
class Verified:
    """What each row goes on with: the drafts that were kept, then one token of the target's own.

    Attributes:
        counts: how many of a row's tokens count, at least 1.
    """

    token_ids: Int32[Array, "rows drafts_plus_1"]
    counts: Int32[Array, " rows"]


def repeat_rows(array: Array, times: int) -> Array:
    """Every row `times` times in a row: what rows share, for each of their positions."""
    return jnp.repeat(array, times, axis=0)


def position_counters(counters: Int32[Array, " rows"], width: int) -> Int32[Array, " rows_times_width"]:
    """Random counters of `width` positions of each row, one row after the other."""
    return (counters[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]).reshape(-1)


def verify(
    logits: Float[Array, "rows_times_width vocab"],
    drafts: Drafts,
    params: SamplingArrays,
    seeds: UInt32[Array, "rows 2"],
    counters: Int32[Array, " rows"],
    rejects: Bool[Array, " rows"] | None = None,
    *,
    mode: SamplingMode,
    synthetic_acceptance: float | None = None,
) -> Verified:
    """Keeps as many of each row's drafts as the rules allow.

    Args:
        logits: of the target, processed, after the last token and after each draft: `drafts + 1` positions a row, one row
            after the other. What lies past a row's drafts is not looked at.
        params, seeds, counters: of each row, as for drawing its next token.
        rejects: rows that rejection sampling serves, where the drafts have probabilities; the others, and all rows if
            None, go by equality.
        mode: as in `sample`.
        synthetic_acceptance: the probability that a draft is kept whatever the target thinks of it, unless it is impossible;
            None: the rules decide.
    """
    rows, num_drafts = drafts.token_ids.shape
    width = num_drafts + 1
    every = jax.tree.map(lambda array: repeat_rows(array, width), params)
    keys = row_keys(repeat_rows(seeds, width), position_counters(counters, width))
    drawn = sample(logits, every, keys, mode=mode).reshape(rows, width)
    is_draft = jnp.arange(num_drafts, dtype=jnp.int32)[None, :] < drafts.counts[:, None]
    kept = drafts.token_ids == drawn[:, :-1]
    last = drawn  # the target's own token, wherever the drafts end
    if rejects is not None and drafts.log_probabilities is not None and mode != "greedy":
        target = log_probabilities(logits, every, mode=mode).reshape(rows, width, -1)
        kept_too = _rejection_keeps(target, drafts, keys.reshape(rows, width))
        kept = jnp.where(rejects[:, None], kept_too, kept)
    if synthetic_acceptance is not None:
        of_drafts = jnp.take_along_axis(logits.reshape(rows, width, -1)[:, :-1], drafts.token_ids[:, :, None], axis=2)
        kept = _uniform(keys, _SYNTHETIC).reshape(rows, width)[:, :-1] < synthetic_acceptance
        kept &= of_drafts[:, :, 0] > -jnp.inf  # but for what a constraint forbids
    num_kept = jnp.sum(jnp.cumprod((kept & is_draft).astype(jnp.int32), axis=1), axis=1).astype(jnp.int32)
    if rejects is not None and drafts.log_probabilities is not None and mode != "greedy":
        own = _draw_residual(target, drafts, num_kept, keys.reshape(rows, width))
        last = jnp.where(rejects[:, None], own[:, None], drawn)
    padded = jnp.pad(drafts.token_ids, ((0, 0), (0, 1)))
    is_kept = jnp.arange(width, dtype=jnp.int32)[None, :] < num_kept[:, None]
    return Verified(token_ids=jnp.where(is_kept, padded, last), counts=num_kept + 1)


def _rejection_keeps(
    target: Float[Array, "rows width vocab"], drafts: Drafts, keys: Array
) -> Bool[Array, "rows drafts"]:
    """Whether each draft is kept by itself: a uniform draw lies below p / q."""
    chosen = drafts.token_ids[:, :, None]
    log_p = jnp.take_along_axis(target[:, :-1], chosen, axis=2)[:, :, 0]
    log_q = jnp.take_along_axis(drafts.log_probabilities, chosen, axis=2)[:, :, 0]  # pyright: ignore[reportArgumentType]
    uniform = _uniform(keys[:, :-1].reshape(-1), _ACCEPTANCE).reshape(log_p.shape)
    return jnp.log(uniform) < log_p - log_q


def _draw_residual(
    target: Float[Array, "rows width vocab"], drafts: Drafts, num_kept: Int32[Array, " rows"], keys: Array
) -> Int32[Array, " rows"]:
    """The token after the kept drafts: of max(p - q, 0) where a draft was refused, of p where none was left."""
    rows, num_drafts = drafts.token_ids.shape
    places = num_kept[:, None, None]
    p = jnp.exp(jnp.take_along_axis(target, places, axis=1)[:, 0])  # [rows, vocab]
    log_q = drafts.log_probabilities
    q = jnp.exp(jnp.take_along_axis(log_q, jnp.minimum(places, num_drafts - 1), axis=1)[:, 0])  # pyright: ignore[reportArgumentType]
    was_refused = num_kept < drafts.counts
    rest = jnp.where(was_refused[:, None], jnp.maximum(p - q, 0.0), p)
    # Where p and q are alike up to rounding nothing may be left; a refusal is then as good as impossible.
    rest = jnp.where(jnp.max(rest, axis=1, keepdims=True) > 0.0, rest, p)
    own_keys = jax.vmap(jax.random.fold_in)(
        jnp.take_along_axis(keys, num_kept[:, None], axis=1)[:, 0], jnp.full((rows,), _RESIDUAL, jnp.int32)
    )
    noise = jax.vmap(lambda key: jax.random.gumbel(key, p.shape[1:], jnp.float32))(own_keys)
    return jnp.argmax(jnp.log(rest) + noise, axis=1).astype(jnp.int32)


def _uniform(keys: Array, purpose: int) -> Float[Array, " keys"]:
    """One draw in (0, 1) for each key, apart from the key's own noise."""
    apart = jax.vmap(jax.random.fold_in)(keys, jnp.full(keys.shape, purpose, jnp.int32))
    return jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32, jnp.finfo(jnp.float32).tiny))(apart)
