"""Time to first token of a prompt that is computed, whose pages are on the device, and whose pages come back from the host.

    python scripts/bench_kv_offload.py llama-3-8b --prompt 4096 --kv-offload-gib 16

Between two questions for the same prompt others take every page of the device. MODEL is an architecture, or a JSON file with
one; its weights are random.
"""

from __future__ import annotations

import argparse
import platform
import time
from concurrent.futures import Future

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.build import build_dummy_engine
from jaxserve.engine.client import EngineClient
from jaxserve.engine.host_pages import OffloadStats
from jaxserve.engine.request import RequestOutput
from jaxserve.models.presets import preset_config
from jaxserve.progress import NoProgress
from jaxserve.sampling_params import SamplingParams


def first_token(engine: EngineClient, prompt: list[int]) -> tuple[float, int]:
    """Seconds to a prompt's first and only token, and how many of its tokens were there."""
    ended: Future[RequestOutput] = Future()
    submitted = time.monotonic()
    engine.submit_with_callback(
        prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), ended.set_result
    )
    output = ended.result()
    return output.time - submitted, output.num_cached_tokens


def offloaded(engine: EngineClient) -> OffloadStats:
    stats = engine.stats().kv_offload
    if stats is None:
        raise ValueError("the engine keeps no pages in host memory")
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--kv-offload-gib", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    pages = 2 * (options.prompt // EngineConfig().page_size + 1)  # room for two prompts
    config = EngineConfig(
        seed=0, max_model_len=options.prompt + 2, num_pages=pages, kv_offload_gib=options.kv_offload_gib
    )
    engine = build_dummy_engine(preset_config(options.model), config, NoProgress())
    rng = np.random.default_rng(0)

    def some_prompt() -> list[int]:
        return rng.integers(0, engine.model_config.vocab_size, options.prompt).tolist()

    times: dict[str, list[tuple[float, int]]] = {"computed": [], "on the device": [], "back from the host": []}
    try:
        first_token(engine, some_prompt())  # as a rehearsal
        for _ in range(options.rounds):
            prompt = some_prompt()
            times["computed"].append(first_token(engine, prompt))
            times["on the device"].append(first_token(engine, prompt))
            for _ in range(3):
                first_token(engine, some_prompt())
            times["back from the host"].append(first_token(engine, prompt))
        stats = offloaded(engine)
    finally:
        engine.shutdown()
    print(f"{options.model}, {engine.device_kind}, jax {jax.__version__}, Python {platform.python_version()}")
    print(f"prompts of {options.prompt} tokens, {options.rounds} rounds; {stats}")
    print("| pages | TTFT median, ms | highest, ms | tokens that were there |\n|---|---|---|---|")
    for name, pairs in times.items():
        seconds = [taken for taken, _ in pairs]
        print(f"| {name} | {np.median(seconds) * 1e3:.1f} | {max(seconds) * 1e3:.1f} | {pairs[-1][1]} |")


if __name__ == "__main__":
    main()
