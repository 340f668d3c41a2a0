"""A real, tiny model with the prefix cache gives what it gives without: token for token, greedy and drawn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.client import EngineClient
from jaxserve.sampling_params import SamplingParams
from tests.engine.random_traffic import RandomTraffic
from tests.tiny_engine import TIMEOUT, VOCAB_SIZE, Answer, ask, tiny_engine

# 88 tokens of KV cache for four sequences of up to 64: pages are evicted, and sequences preempted.
SIZES: dict[str, Any] = {
    "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "page_size": 4, "num_pages": 22, "seed": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    with tiny_engine(EngineConfig(**SIZES), mode="full") as engine:
        yield engine


@pytest.fixture(scope="module")
def plain() -> Iterator[EngineClient]:
    with tiny_engine(EngineConfig(**SIZES, enable_prefix_caching=False), mode="full") as engine:
        yield engine


def shared_requests(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that begin alike, by one of three prefixes, and go on by themselves."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(2, VOCAB_SIZE) for _ in range(24)] for _ in range(3)]
    requests: list[tuple[list[int], SamplingParams]] = []
    for number in range(count):
        own = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(0, 8))]
        prompt = [*rng.choice(prefixes)[: rng.randint(1, 24)], *own]
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.9, "seed": number},
            {"temperature": 1.0, "seed": number, "top_p": 0.9, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
            {"temperature": 0.0, "prompt_logprobs": 1},
        ]
        sampling = SamplingParams(
            max_tokens=rng.choice([1, 6, 16, 30]), n=rng.choice([1, 1, 2, 3]), ignore_eos=True, **kinds[number % 4]
        )
        requests.append((prompt, sampling))
    return requests


def test_random_traffic_gives_what_it_gives_without_the_cache(engine: EngineClient, plain: EngineClient) -> None:
    requests = shared_requests(48, seed=1)
    before = engine.stats()
    traffic = RandomTraffic(engine, requests, seed=2, pauses=(0, 0, 1, 4), abort_share=0.25, flush_share=0.1)
    after = engine.stats()
    assert after.cached_prompt_tokens - before.cached_prompt_tokens > 100
    assert after.num_preemptions > before.num_preemptions
    traffic.check(plain)
    assert plain.stats().cached_prompt_tokens == 0


def test_choices_that_share_their_prompt_in_one_step(engine: EngineClient, plain: EngineClient) -> None:
    """13 + 1 + 1 tokens: the second and third attend to pages that the first one writes in the same step."""
    prompt, sampling = list(range(2, 15)), SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True)
    engine.flush_prefix_cache().result(TIMEOUT)
    before = engine.stats().cached_prompt_tokens
    shared = Answer(engine, prompt, sampling).wait()
    assert engine.stats().cached_prompt_tokens - before >= 24
    assert shared == Answer(plain, prompt, sampling).wait()


@pytest.mark.parametrize("length", [20, 57])  # twice the longer one is more than all pages
def test_prompt_logprobs_are_whole_though_the_prompt_is_there(
    engine: EngineClient, plain: EngineClient, length: int
) -> None:
    prompt = [2 + position * 7 % 61 for position in range(length)]
    ask(engine, prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    sampling = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=2, ignore_eos=True)
    outputs = [Answer(some, prompt, sampling).next() for some in (engine, plain)]
    for output in outputs:
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == length
    pairs = zip(*(output.prompt_logprobs[1:] for output in outputs), strict=True)  # type: ignore[index]
    for cached, computed in pairs:
        assert cached is not None
        assert computed is not None
        assert cached.token_id == computed.token_id
        assert cached.logprob == pytest.approx(computed.logprob, abs=1e-5)
