"""Time the sampling of a step's tokens on a GPU: microseconds of all kernels, by rows and kind of sampling.

    python scripts/bench_sampling.py --rows 8,64 --vocab 128256

"cut N" is the search for the token that top-p keeps last, with N bits of it found in each pass over the vocabulary.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.bench.profile import traced_kernels
from jaxserve.engine.token_masks import num_words
from jaxserve.models.logit_processors import mask_logits
from jaxserve.models.sampling import SamplingArrays, row_keys, sample
from jaxserve.models.sampling import _search_cut as search_cut  # what is compared is not for others

RUNS = 8


def programs(rows: int, vocab: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    logits = jax.random.normal(jax.random.key(0), (rows, vocab), jnp.float32) * 4
    params = SamplingArrays(
        temperature=jnp.full((rows,), 0.7, jnp.float32),
        top_p=jnp.full((rows,), 0.9, jnp.float32),
        top_k=jnp.full((rows,), 50, jnp.int32),
        min_p=jnp.zeros((rows,), jnp.float32),
    )
    seeds, counters = jnp.ones((rows, 2), jnp.uint32), jnp.arange(rows, dtype=jnp.int32)
    words = jnp.full((rows, num_words(vocab)), -1, jnp.int32)
    weights = jnp.exp(-jnp.abs(logits))

    def draw(mode: Any, logits: jax.Array, seeds: jax.Array, counters: jax.Array) -> jax.Array:
        return sample(logits, params, row_keys(seeds, counters), mode=mode)

    def draw_masked(mode: Any, logits: jax.Array, words: jax.Array, seeds: jax.Array, counters: jax.Array) -> jax.Array:
        return draw(mode, mask_logits(logits, words), seeds, counters)

    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for mode in ("greedy", "random", "filtered"):
        found[mode] = functools.partial(draw, mode), (logits, seeds, counters)
        found[f"{mode}, masked"] = functools.partial(draw_masked, mode), (logits, words, seeds, counters)
    for bits in (1, 2, 3, 4, 5):
        goal = jnp.sum(weights, axis=-1) * 0.9
        found[f"cut {bits}"] = functools.partial(search_cut, bits_a_pass=bits), (jnp.abs(logits), weights, goal)
    return found


def time_kernels(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, float]:
    """Seconds of a run's kernels, and how many there are."""
    program = jax.jit(function).lower(*arguments).compile()
    for _ in range(2):
        jax.block_until_ready(program(*arguments))
    events = traced_kernels(lambda: [jax.block_until_ready(program(*arguments)) for _ in range(RUNS)])
    return sum(event.duration for event in events) / RUNS, len(events) / RUNS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="8,64", help="comma-separated")
    parser.add_argument("--vocab", type=int, default=128256)
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {arguments.vocab} tokens")
    print(f"{'rows':>5} {'sampling':>18} {'us':>8} kernels")
    for rows in map(int, arguments.rows.split(",")):
        for name, (function, inputs) in programs(rows, arguments.vocab).items():
            seconds, kernels = time_kernels(function, inputs)
            print(f"{rows:>5} {name:>18} {seconds * 1e6:>8.1f} {kernels:.0f}", flush=True)


if __name__ == "__main__":
    main()
