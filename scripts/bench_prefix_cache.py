"""Time to first token of users who share a system prompt, with the prefix cache and without it.

    python scripts/bench_prefix_cache.py llama-3-8b --users 64 --shared 1000 --own 20 --in-flight 1 --in-flight 64

Both are measured on one engine, in turn: without the cache, every request has a salt of its own, so that it finds nothing.
The hit rate that the engine tells stands beside the one that the trace has. MODEL is an architecture with random weights
(llama-3-8b, or a JSON file with one), or whatever `jaxserve serve` takes.
"""

from __future__ import annotations

import argparse
import platform
import queue
import sys
import time
from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.build import build_dummy_engine
from jaxserve.engine.client import EngineClient
from jaxserve.engine.request import RequestOutput
from jaxserve.models.presets import preset_config
from jaxserve.progress import NoProgress
from jaxserve.protocol.launch import launch
from jaxserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class Figures:
    """Seconds to the first token of each user, and the share of prompt tokens that were found."""

    first_tokens: list[float]
    hit_rate: float


def measure(
    engine: EngineClient, prompts: list[list[int]], num_output: int, in_flight: int, *, shared: bool
) -> Figures:
    """Every prompt once, so many at a time."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    before = engine.stats()
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    first_tokens = [0.0] * len(prompts)

    def start(user: int) -> None:
        submitted = time.monotonic()

        def take(output: RequestOutput) -> None:
            if not first_tokens[user]:
                first_tokens[user] = output.time - submitted
            if output.finish_reason is not None:
                ended.put(user)

        engine.submit_with_callback(prompts[user], sampling, take, cache_salt=None if shared else f"user-{user}")

    for user in range(len(prompts)):
        if user >= in_flight:
            ended.get(timeout=600)
        start(user)
    for _ in range(min(in_flight, len(prompts))):
        ended.get(timeout=600)
    after = engine.stats()
    cached = after.cached_prompt_tokens - before.cached_prompt_tokens
    return Figures(first_tokens, cached / (after.prompt_tokens - before.prompt_tokens))


def load(model: str, config: EngineConfig) -> EngineClient:
    try:
        architecture = preset_config(model)
    except ValueError:  # no architecture: a model
        engine = launch(model, config, NoProgress()).engine
        if not isinstance(engine, EngineClient):
            raise TypeError(f"{type(engine).__name__} is no engine of this process") from None
        return engine
    return build_dummy_engine(architecture, config, NoProgress())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--shared", type=int, default=1000, help="tokens that all prompts begin with")
    parser.add_argument("--own", type=int, default=20, help="tokens of each prompt beside them")
    parser.add_argument("--output", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--in-flight", type=int, action="append", help="users at a time; may be given several times")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--users-without", type=int, help="users that are measured without the cache, which all wait alike; unset: all"
    )
    options = parser.parse_args()
    length = options.shared + options.own
    engine = load(options.model, EngineConfig(seed=0, max_model_len=length + options.output + 1))
    rng = np.random.default_rng(0)
    vocabulary = engine.model_config.vocab_size
    shared = rng.integers(0, vocabulary, options.shared).tolist()
    prompts = [shared + rng.integers(0, vocabulary, options.own).tolist() for _ in range(options.users)]
    page_size = engine.config.page_size
    expected = (options.users - 1) * (options.shared // page_size * page_size) / (options.users * length)
    print(f"{options.model}, {engine.device_kind}, jax {jax.__version__}, Python {platform.python_version()}")
    print(f"{options.users} users, {options.shared} + {options.own} tokens; hit rate of the trace {expected:.4f}")
    print("| users at a time | cache | TTFT median, ms | p99, ms | hit rate |\n|---|---|---|---|---|")
    try:
        for prompt in prompts[:2]:  # as a rehearsal
            measure(engine, [prompt], 2, 1, shared=False)
        for in_flight in options.in_flight or [1]:
            medians: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(options.rounds):
                for is_shared in medians:
                    engine.flush_prefix_cache().result()
                    some = prompts if is_shared else prompts[: options.users_without]
                    figures = measure(engine, some, options.output, in_flight, shared=is_shared)
                    median, high = np.percentile(figures.first_tokens, [50, 99]) * 1e3
                    medians[is_shared].append(float(median))
                    name = "on" if is_shared else "off"
                    print(f"| {in_flight} | {name} | {median:.1f} | {high:.1f} | {figures.hit_rate:.4f} |", flush=True)
            print(f"{np.median(medians[False]) / np.median(medians[True]):.1f} times lower", file=sys.stderr)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
