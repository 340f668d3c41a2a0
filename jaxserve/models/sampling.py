"""Drawing tokens on the device: greedy, temperature, top-k, top-p, min-p, with a random stream per request."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxserve.sampling_params import SamplingMode

_INFINITY_BITS = 0x7F800000
_DISTANCE_BITS = 31  # of a float32 without its sign
_MIN_TEMPERATURE = 1e-5  # below this a row is greedy: what is drawn is the most likely token in any case


@struct.dataclass
class SamplingArrays:
    """Sampling parameters of each row."""

    temperature: Float[Array, " rows"]  # 0: greedy
    top_p: Float[Array, " rows"]  # 1: off
    top_k: Int32[Array, " rows"]  # 0 or less: off
    min_p: Float[Array, " rows"]  # 0: off


def row_keys(seeds: UInt32[Array, "rows 2"], counters: Int32[Array, " rows"]) -> Array:
    """One random key a row, from its request's seed and how many tokens it has drawn: nothing else of the batch enters."""
    keys = jax.random.wrap_key_data(seeds, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(keys, counters)


def sample(
    logits: Float[Array, "rows vocab"], params: SamplingArrays, keys: Array, *, mode: SamplingMode
) -> Int32[Array, " rows"]:
    """One token a row.

    Draws by the Gumbel maximum: argmax(logits / temperature + noise), with noise that depends on the row's key alone.

    Args:
        mode: what the batch needs at most. "greedy": every row is greedy; "random": no row has top_k, top_p or min_p;
            "filtered": any of those; "full": the same, for callers that process logits before and report log
            probabilities after. A row gives the same token under each mode that serves it.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if mode == "greedy":
        return greedy
    below_top, takes_top = _filtered(logits, params, mode)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
    drawn = jnp.argmax(noise - below_top, axis=-1).astype(jnp.int32)
    return jnp.where(takes_top, greedy, drawn)


def log_probabilities(
    logits: Float[Array, "rows vocab"], params: SamplingArrays, *, mode: SamplingMode
) -> Float[Array, "rows vocab"]:
    """Log of the distribution that `sample` draws from under the same mode; minus infinity for what it never draws."""
    greedy = jnp.argmax(logits, axis=-1)
    only_top = jnp.where(jnp.arange(logits.shape[1])[None, :] == greedy[:, None], jnp.float32(0), -jnp.inf)
    if mode == "greedy":
        return only_top
    below_top, takes_top = _filtered(logits, params, mode)
    return jnp.where(takes_top[:, None], only_top, jax.nn.log_softmax(-below_top, axis=-1))


def _filtered(
    logits: Float[Array, "rows vocab"], params: SamplingArrays, mode: SamplingMode
) -> tuple[Float[Array, "rows vocab"], Bool[Array, " rows"]]:
    """How far each token lies below the top one, over the temperature (infinite: filtered); and which rows take the top."""
    logits = logits.astype(jnp.float32)
    temperature = jnp.maximum(params.temperature, _MIN_TEMPERATURE)[:, None]
    below_top = (jnp.max(logits, axis=-1, keepdims=True) - logits) / temperature  # 0 for the top token
    takes_top = params.temperature < _MIN_TEMPERATURE
    if mode in ("filtered", "full"):
        kept = below_top <= _cut(below_top, params)[:, None]
        below_top = jnp.where(kept, below_top, jnp.inf)
        # Filters that leave one token leave the greedy one, of tied ones too. A top token has at least 1 / vocab.
        takes_top |= (params.top_k == 1) | (params.top_p * logits.shape[-1] <= 1.0)
    return below_top, takes_top


def _cut(below_top: Float[Array, "rows vocab"], params: SamplingArrays) -> Float[Array, " rows"]:
    """How far below the top token a token may lie: the tightest of top-k, then top-p among those, and min-p.

    Tokens tied with the last one that is kept are kept too, so that the result does not depend on their order (but see
    `sample` where one is to be left).
    """
    infinity = jnp.full(below_top.shape[:1], jnp.inf, jnp.float32)
    by_count = _smallest_cut(
        below_top, jnp.ones_like(below_top), jnp.maximum(params.top_k, 1).astype(jnp.float32)
    )  # counts up to 2^24 are exact in float32
    top_k_cut = jnp.where(params.top_k > 0, by_count, infinity)
    weights = jnp.where(below_top <= top_k_cut[:, None], jnp.exp(-below_top), 0.0)
    by_mass = _smallest_cut(below_top, weights, params.top_p * jnp.sum(weights, axis=-1))
    top_p_cut = jnp.where(params.top_p < 1.0, by_mass, infinity)
    min_p_cut = jnp.where(params.min_p > 0.0, -jnp.log(jnp.maximum(params.min_p, 1e-38)), infinity)
    return jnp.minimum(jnp.minimum(top_k_cut, top_p_cut), min_p_cut)


def _smallest_cut(
    distances: Float[Array, "rows vocab"], weights: Float[Array, "rows vocab"], goal: Float[Array, " rows"]
) -> Float[Array, " rows"]:
    """The smallest distance within which a row's weights sum to its goal.

    Exact and free of sorting: distances are not negative, so that their bit patterns are ordered as they are, and the cut's
    is found some bits at a time. If the goal is never reached (rounding), the cut is infinite.
    """
    # Measured on an H200: with 8 rows two bits a pass are fastest, with 64 rows three are a little faster.
    return lax.platform_dependent(
        distances, weights, goal, cpu=partial(_search_cut, bits_a_pass=1), default=partial(_search_cut, bits_a_pass=2)
    )


# A program within programs: for the same shapes it is traced once in a process, and not eight times in one that drafts.
@partial(jax.jit, static_argnames="bits_a_pass")
def _search_cut(
    distances: Float[Array, "rows vocab"],
    weights: Float[Array, "rows vocab"],
    goal: Float[Array, " rows"],
    *,
    bits_a_pass: int,
) -> Float[Array, " rows"]:
    def narrow(shift: int | Array, low: Int32[Array, " rows"], num_parts: int) -> Int32[Array, " rows"]:
        """The answer lies in one of so many parts of 2^shift from low on: the start of that part."""
        parts_before = jnp.zeros_like(low)
        for part in range(1, num_parts):
            last = low + ((jnp.int32(part) << shift) - 1)
            cut = lax.bitcast_convert_type(jnp.minimum(last, _INFINITY_BITS), jnp.float32)[:, None]
            reached = jnp.sum(jnp.where(distances <= cut, weights, 0.0), axis=-1) >= goal
            parts_before += jnp.logical_not(reached).astype(jnp.int32)
        return low + (parts_before << shift)

    low = jnp.zeros(distances.shape[:1], jnp.int32)
    if bits_a_pass == 1:
        low = lax.fori_loop(0, _DISTANCE_BITS, lambda index, low: narrow(_DISTANCE_BITS - 1 - index, low, 2), low)
    else:
        for shift in reversed(range(0, _DISTANCE_BITS, bits_a_pass)):
            low = narrow(shift, low, 1 << min(bits_a_pass, _DISTANCE_BITS - shift))
    return lax.bitcast_convert_type(jnp.minimum(low, _INFINITY_BITS), jnp.float32)
