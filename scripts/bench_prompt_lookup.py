"""What prompt lookup saves on a copying task: one stream on a CPU, with and without drafts, side by side.

The model is asked to repeat a text, and both engines must give the same tokens. They stay up and take turns, so that both
see the same machine. The time from the first token to the last, over the tokens between, is the time per token; medians over
`--rounds` are printed.

    python scripts/bench_prompt_lookup.py --num-speculative-tokens 7
"""

from __future__ import annotations

import argparse
import statistics
import time

from jaxserve.api import Engine
from jaxserve.config import EngineConfig
from jaxserve.speculative_config import SpeculativeConfig

TEXT = (
    "The harbour of Port Ellis was built in 1874 by the engineer Margaret Thorne, who had studied tides in Saint-Malo for "
    "eleven years. Its outer wall is 412 metres long and rests on blocks of grey granite, each of which weighs about nine "
    "tonnes. Ships of up to 3,000 tonnes can enter at any tide; larger ones wait outside for the pilot boat Kestrel. In "
    "the winter of 1931 a storm broke the wall in two places, and it took the town four years to raise the money for its "
    "repair. Since then the harbour master has kept a diary in which every crack, however small, is drawn and measured."
)
MESSAGES = [{"role": "user", "content": f"Repeat the following text word for word, and nothing else.\n\n{TEXT}"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--num-speculative-tokens", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    shared = {"device": "cpu", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 1}
    drafting = SpeculativeConfig("ngram", options.num_speculative_tokens)
    engines = {
        "plain": Engine(options.model, EngineConfig(**shared)),
        "prompt lookup": Engine(options.model, EngineConfig(**shared, speculative_config=drafting)),
    }
    try:
        compare(engines, options.max_tokens, options.rounds)
    finally:
        for engine in engines.values():
            engine.close()


def compare(engines: dict[str, Engine], max_tokens: int, rounds: int) -> None:
    """Takes turns and prints medians.

    Raises:
        RuntimeError: the answers differ.
    """
    times: dict[str, list[float]] = {name: [] for name in engines}
    answers: dict[str, str] = {}
    for _ in range(rounds + 1):  # the first round shows the engine what steps take, and is not counted
        for name, engine in engines.items():
            answers[name], seconds = one_answer(engine, max_tokens)
            times[name].append(seconds)
    if len(set(answers.values())) > 1:
        raise RuntimeError(f"the answers differ: {answers}")
    medians = {name: statistics.median(measured[1:]) for name, measured in times.items()}
    for name, seconds in medians.items():
        print(f"{name:<14}{seconds * 1e3:8.2f} ms per token")
    print(f"{'speed-up':<14}{medians['plain'] / medians['prompt lookup']:8.2f}")
    stats = engines["prompt lookup"].stats().speculative
    if stats is not None:
        print(
            f"kept {stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted tokens, {stats.accepted_per_position}"
        )


def one_answer(engine: Engine, max_tokens: int) -> tuple[str, float]:
    """The text, and the seconds per token after the first."""
    text, first, last, tokens = "", 0.0, 0.0, 0
    stream = engine.chat.completions.create(
        messages=MESSAGES,
        stream=True,
        temperature=0.0,
        max_tokens=max_tokens,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        now = time.perf_counter()
        if chunk.choices and chunk.choices[0].delta.content:
            first, last = first or now, now
            text += chunk.choices[0].delta.content
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    return text, (last - first) / max(1, tokens - 1)


if __name__ == "__main__":
    main()
