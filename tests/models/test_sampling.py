"""What is drawn follows the distribution that the parameters describe, in every mode and whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.sampling import SamplingArrays, _search_cut, row_keys, sample
from jaxserve.sampling_params import SamplingMode

VOCAB = 8
LOGITS = np.array([1.0, -0.5, 2.0, 0.3, -3.0, 1.6, 0.0, -1.2], np.float32)  # no two alike
ROWS = 4000  # of every call over the small vocabulary, so that few shapes are compiled
DRAWS = 5 * ROWS
# Chi-square values that a right sampler exceeds once in a million runs, by degrees of freedom.
CHI_SQUARE_LIMIT = {1: 23.9, 2: 27.6, 3: 30.7, 4: 33.4, 5: 35.9, 6: 38.3, 7: 40.5}


@partial(jax.jit, static_argnames="mode")
def _draw(
    logits: jax.Array, params: SamplingArrays, seeds: jax.Array, counters: jax.Array, *, mode: SamplingMode
) -> Any:
    return sample(logits, params, row_keys(seeds, counters), mode=mode)


def arrays(
    rows: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> SamplingArrays:
    return SamplingArrays(
        temperature=np.full(rows, temperature, np.float32),  # pyright: ignore[reportArgumentType]
        top_p=np.full(rows, top_p, np.float32),  # pyright: ignore[reportArgumentType]
        top_k=np.full(rows, top_k, np.int32),  # pyright: ignore[reportArgumentType]
        min_p=np.full(rows, min_p, np.float32),  # pyright: ignore[reportArgumentType]
    )


def halves(seeds: Sequence[int]) -> np.ndarray:
    return np.array([[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds], np.uint32)


def draw(logits: np.ndarray, params: SamplingArrays, *, mode: SamplingMode = "filtered", first: int = 0) -> np.ndarray:
    """One token a row; row i draws with seed 0 and counter `first + i`."""
    rows = len(logits)
    counters = np.arange(first, first + rows, dtype=np.int32)
    return np.asarray(_draw(logits, params, halves([0] * rows), counters, mode=mode))  # pyright: ignore


def draw_tokens(logits: np.ndarray, *, mode: SamplingMode = "filtered", draws: int = ROWS, **params: Any) -> np.ndarray:
    """Tokens drawn with one set of parameters for the same logits."""
    assert draws % ROWS == 0
    rows = np.tile(logits, (ROWS, 1))
    return np.concatenate(
        [draw(rows, arrays(ROWS, **params), mode=mode, first=first) for first in range(0, draws, ROWS)]
    )


def draw_counts(*, logits: np.ndarray = LOGITS, mode: SamplingMode = "filtered", **params: Any) -> np.ndarray:
    """How often each token is drawn in `DRAWS` draws."""
    return np.bincount(draw_tokens(logits, mode=mode, draws=DRAWS, **params), minlength=VOCAB)


def distribution(
    *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, logits: np.ndarray = LOGITS
) -> np.ndarray:
    """The definition, by sorting in float64: top-k, then top-p among those, and min-p against the most likely one."""
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    kept = order[: top_k if top_k > 0 else None]
    mass = np.cumsum(probabilities[kept]) / probabilities[kept].sum()
    if top_p < 1.0:
        kept = kept[: 1 + int(np.searchsorted(mass, top_p))]
    kept = kept[probabilities[kept] >= min_p * probabilities.max()]
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


def check_distribution(counts: np.ndarray, expected: np.ndarray) -> None:
    possible = expected > 0
    assert counts[~possible].sum() == 0, "an impossible token was drawn"
    if possible.sum() > 1:
        mean = expected[possible] * counts.sum()
        chi_square = float(((counts[possible] - mean) ** 2 / mean).sum())
        assert chi_square < CHI_SQUARE_LIMIT[int(possible.sum()) - 1]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_k": 1},
        {"top_k": -1},
        {"top_k": VOCAB + 5},
        {"top_k": 2**31 - 1},
        {"top_p": 0.7},
        {"top_p": 0.95},
        {"top_p": 0.999999},
        {"min_p": 0.2},
        {"min_p": 0.01},
        {"min_p": 1.0},
        {"top_k": 4, "top_p": 0.8},
        {"top_p": 0.9, "min_p": 0.3},
        {"temperature": 1.7, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
def test_draws_follow_the_definition(params: dict[str, Any]) -> None:
    check_distribution(draw_counts(**params), distribution(**params))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_without_filters_follow_the_softmax(temperature: float) -> None:
    check_distribution(draw_counts(mode="random", temperature=temperature), distribution(temperature=temperature))


def test_the_check_notices_a_wrong_distribution() -> None:
    with pytest.raises(AssertionError):
        check_distribution(draw_counts(temperature=1.1), distribution())


@pytest.mark.parametrize("is_bfloat16", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-5, 1e-4, 1e-3])
def test_small_temperatures_are_greedy(temperature: float, is_bfloat16: bool) -> None:
    logits = np.random.default_rng(0).normal(scale=20.0, size=(256, 64)).astype(np.float32)
    if is_bfloat16:
        logits = np.asarray(jnp.asarray(logits, jnp.bfloat16))
    exact = logits.astype(np.float32)
    rivals = np.sort(exact, axis=1)
    clear = rivals[:, -1] - rivals[:, -2] > 0.05  # 50 nats at the highest of these temperatures
    assert clear.sum() > 200
    for mode in ("random", "filtered"):
        tokens = draw(logits, arrays(256, temperature=temperature), mode=mode)
        np.testing.assert_array_equal(tokens[clear], exact.argmax(axis=1)[clear])


@pytest.mark.parametrize("params", [{"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}], ids=str)
def test_the_tightest_filters_are_greedy_among_ties_too(params: dict[str, Any]) -> None:
    logits = np.array([0.0, 3.0, 1.0, 3.0, 3.0, -1.0, 0.0, 0.0], np.float32)
    assert set(draw_tokens(logits, temperature=2.0, **params).tolist()) == {1}


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, VOCAB + 5])
def test_top_k_off_keeps_all(top_k: int) -> None:
    assert len(set(draw_tokens(LOGITS, top_k=top_k).tolist())) == VOCAB


@jax.jit
def _goal_cuts_and_sums(distances: jax.Array, share: jax.Array) -> list[jax.Array]:
    weights = jnp.exp(-distances)
    goal = share * jnp.sum(weights, axis=-1)
    cuts = [_search_cut(distances, weights, goal, bits_a_pass=bits) for bits in (1, 2, 3, 4, 5)]
    within, before = (
        jnp.sum(jnp.where(compare(distances, cuts[0][:, None]), weights, 0), axis=-1)
        for compare in (jnp.less_equal, jnp.less)
    )
    return [goal, *cuts, within, before]


@pytest.mark.parametrize("share", [1e-9, 0.1, 0.9, 1.1])
def test_the_cut_is_the_same_however_many_bits_of_it_a_pass_finds(share: float) -> None:
    scales = np.array([1e-30, 1e-3, 1.0, 10.0, 1e3, 0.0], np.float32)[:, None]
    distances = np.abs(np.random.default_rng(0).standard_normal((6, 500)).astype(np.float32)) * scales
    goal, *cuts, within, before = _goal_cuts_and_sums(distances, np.float32(share))
    for cut in cuts[1:]:
        np.testing.assert_array_equal(cut, cuts[0])
    if share > 1:
        assert np.isinf(cuts[0]).all()
    else:  # a token of each row lies at the cut, those within it have the goal, and those before it have not
        assert (np.min(np.abs(distances - np.asarray(cuts[0])[:, None]), axis=-1) == 0).all()
        assert (np.asarray(within) >= goal).all()
        assert (np.asarray(before) < goal).all()


def test_temperature_zero_wins_over_the_filters() -> None:
    assert set(draw_tokens(LOGITS, temperature=0.0, top_p=0.0, top_k=5, min_p=0.5).tolist()) == {2}


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (0, 0.6)])
def test_tokens_tied_with_the_last_one_are_kept(top_k: int, top_p: float) -> None:
    """Three share the second place: cutting between them would depend on their order in the vocabulary."""
    logits = np.array([-2.0, 1.0, 0.0, 1.0, 2.0, 1.0, -2.0, -2.0], np.float32)
    assert set(draw_tokens(logits, top_k=top_k, top_p=top_p).tolist()) == {1, 3, 4, 5}


def test_equal_logits_are_drawn_equally() -> None:
    logits = np.zeros(VOCAB, np.float32)
    check_distribution(draw_counts(logits=logits), np.full(VOCAB, 1 / VOCAB))
    assert set(draw_tokens(logits, temperature=0.0).tolist()) == {0}


@pytest.mark.parametrize("mode", ["greedy", "random", "filtered"])
def test_masked_tokens_are_never_drawn(mode: SamplingMode) -> None:
    params: dict[str, Any] = {"top_p": 0.9999, "top_k": 7} if mode == "filtered" else {}
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[3] = -1e30
    assert set(draw_tokens(logits, mode=mode, temperature=2.0, **params).tolist()) == {3}
    logits[6] = -1e30
    both = set(draw_tokens(logits, mode=mode, temperature=2.0, **params).tolist())
    assert both == ({3} if mode == "greedy" else {3, 6})


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e30])
def test_extreme_logits_give_tokens_of_the_vocabulary(scale: float) -> None:
    logits = (np.random.default_rng(1).normal(size=(256, 64)) * scale).astype(np.float32)
    for temperature in (1e-5, 1.0, 2.0):
        tokens = draw(logits, arrays(256, temperature=temperature, top_p=0.9, top_k=50, min_p=0.01))
        assert ((tokens >= 0) & (tokens < 64)).all()
        if scale >= 1e4:
            np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


def test_a_row_gives_the_same_token_under_each_mode_that_serves_it() -> None:
    logits = np.random.default_rng(2).normal(scale=2.0, size=(256, 64)).astype(np.float32)
    plain, greedy = arrays(256, temperature=0.8), arrays(256, temperature=0.0)
    np.testing.assert_array_equal(draw(logits, plain, mode="random"), draw(logits, plain, mode="filtered"))
    for mode in ("random", "filtered"):
        np.testing.assert_array_equal(draw(logits, greedy, mode=mode), draw(logits, greedy, mode="greedy"))


def test_a_row_does_not_see_the_rest_of_its_batch() -> None:
    """Alone, and in the midst of padding rows that hold whatever they hold."""
    rng = np.random.default_rng(3)
    logits = rng.normal(scale=2.0, size=(256, 64)).astype(np.float32)
    params = SamplingArrays(
        temperature=rng.uniform(0, 2, 256).astype(np.float32),  # pyright: ignore[reportArgumentType]
        top_p=rng.uniform(0.5, 1, 256).astype(np.float32),  # pyright: ignore[reportArgumentType]
        top_k=rng.integers(0, 20, 256).astype(np.int32),  # pyright: ignore[reportArgumentType]
        min_p=rng.uniform(0, 0.2, 256).astype(np.float32),  # pyright: ignore[reportArgumentType]
    )
    seeds, counters = halves(range(256)), np.arange(256, dtype=np.int32)
    together = np.asarray(_draw(logits, params, seeds, counters, mode="filtered"))  # pyright: ignore

    kept = np.arange(256) % 3 == 1
    poisoned = np.where(kept[:, None], logits, np.nan).astype(np.float32)
    padded = np.asarray(_draw(poisoned, params, seeds, counters, mode="filtered"))  # pyright: ignore
    np.testing.assert_array_equal(padded[kept], together[kept])

    for row in range(8):
        one = slice(row, row + 1)
        alone = jax.tree.map(lambda array, one=one: array[one], params)
        assert int(_draw(logits[one], alone, seeds[one], counters[one], mode="filtered")[0]) == together[row]  # pyright: ignore


def test_keys_depend_on_every_bit_of_the_seed_and_on_the_counter() -> None:
    numbers = [0, 1, 2**31, 2**32, 2**63, 2**64 - 1]
    counters = [0, 1, 2, 1000]
    seeds = halves([number for number in numbers for _ in counters])
    keys = row_keys(jnp.asarray(seeds), jnp.asarray(counters * len(numbers), jnp.int32))
    data = np.asarray(jax.random.key_data(keys))
    assert len({tuple(row) for row in data.tolist()}) == len(numbers) * len(counters)


def test_draws_of_one_seed_are_independent() -> None:
    """Pairs of successive draws follow the product of the distributions: the counter moves the whole stream."""
    tokens = draw_tokens(LOGITS, mode="random", draws=DRAWS) % 2
    pairs = np.bincount(2 * tokens[0::2] + tokens[1::2], minlength=4)
    odd = distribution()[1::2].sum()
    check_distribution(pairs, np.outer([1 - odd, odd], [1 - odd, odd]).ravel())
