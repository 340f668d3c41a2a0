"""Prompt lookup: what followed the last tokens where they stood before is drafted to follow again."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32


def look_up(
    history: Int32[Array, "rows length"],
    lengths: Int32[Array, " rows"],
    *,
    num_drafts: int,
    longest: int,
    shortest: int,
) -> tuple[Int32[Array, "rows num_drafts"], Int32[Array, " rows"]]:
    """Drafts for sequences whose tokens are `history[row, :lengths[row]]`.

    The longest run of last tokens that stood before wins, of several such places the latest one (A. Saxena, "Prompt lookup
    decoding", 2023, takes the first one; later text is likelier to go on alike). Where what followed ends with the sequence
    itself, it is taken to go on as it did since: a repetition is drafted as far ahead as is wanted.

    Args:
        longest, shortest: last tokens that must be alike, at most and at least.

    Returns:
        The drafts, and how many each row has: all of them, or none.
    """
    rows, length = history.shape
    places = jnp.arange(length, dtype=jnp.int32)[None, :]  # where a run of tokens may end
    last = lengths[:, None] - 1
    alike = jnp.ones((rows, length), jnp.bool_)
    matched = jnp.zeros((rows, length), jnp.int32)
    for back in range(longest):
        wanted = jnp.take_along_axis(history, jnp.maximum(last - back, 0), axis=1)  # [rows, 1]
        # rolled[place] is the token `back` before the place; what comes round from the end is no such token
        rolled = jnp.roll(history, back, axis=1)
        alike &= (rolled == wanted) & (places >= back) & (last >= back)
        matched += alike.astype(jnp.int32)
    matched = jnp.where((places < last) & (matched >= shortest), matched, 0)
    # The longest run first, then the latest place. Both fit: `length` is far below 2^31 / longest.
    best = jnp.argmax(matched * length + jnp.where(matched > 0, places, 0), axis=1).astype(jnp.int32)[:, None]
    found = jnp.take_along_axis(matched, best, axis=1)[:, 0] > 0
    period = jnp.maximum(last - best, 1)
    ahead = jnp.arange(num_drafts, dtype=jnp.int32)[None, :] % period
    drafts = jnp.take_along_axis(history, jnp.minimum(best + 1 + ahead, length - 1), axis=1)
    return drafts, jnp.where(found, jnp.int32(num_drafts), jnp.int32(0))
