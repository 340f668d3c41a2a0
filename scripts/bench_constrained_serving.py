"""What constraints cost streams that run side by side: time per output token without any, with a schema, and step by step.

    python scripts/bench_constrained_serving.py llama-3-8b --streams 64

An engine in this process with random weights. The schema is a list of a thousand objects, so that no answer ends early.
"step by step" is the same without jumping over forced tokens. Rounds alternate, after one of each that does not count. The
made-up vocabulary spells what is forced letter by letter, in longer runs than a real one: that of another model is taken
with --tokenizer, if it is not larger. With --speculative-config (as for `jaxserve serve`) all of them bring drafts, of
which --acceptance keeps a share whatever the model thinks of them, but for what the schema forbids.
"""

from __future__ import annotations

import argparse
import queue
import time
from dataclasses import dataclass

import numpy as np

from jaxserve.bench.engine_run import start_engine
from jaxserve.bench.random_tokenizer import random_tokenizer
from jaxserve.checkpoint.source import resolve_model
from jaxserve.cli.options import read_speculative_config
from jaxserve.config import EngineConfig
from jaxserve.constraint import Constraint, TokenConstraint
from jaxserve.engine.client import EngineClient
from jaxserve.engine.replicas import ReplicatedEngine
from jaxserve.engine.request import RequestOutput
from jaxserve.progress import NoProgress
from jaxserve.protocol.launch import TOKENIZER_FOLDER
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.grammar import CompiledGrammar, Grammar, compile_grammar
from jaxserve.structured.vocabulary import make_vocabulary
from jaxserve.text.tokenizer import load_tokenizer

ENTRY = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 30},
        "kind": {"enum": ["private person", "company", "public body"]},
        "orders": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 5},
        "note": {"type": ["string", "null"], "maxLength": 80},
    },
    "required": ["customer_name", "kind", "orders", "note"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ENTRY, "minItems": 1000}


@dataclass(frozen=True)
class Stepping:
    """A constraint that tells of no forced tokens."""

    grammar: CompiledGrammar

    def start(self) -> TokenConstraint:
        state = self.grammar.start()
        state.forced_run = lambda most: ()
        return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an architecture, as for `jaxserve bench`")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", help="a model whose vocabulary is used")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--speculative-config", help="JSON")
    parser.add_argument(
        "--acceptance", type=float, help="probability that a draft is kept; left out: drafts are verified"
    )
    options = parser.parse_args()
    config = EngineConfig(
        device=options.device,
        max_num_seqs=options.streams,
        max_model_len=options.prompt_tokens + options.output_tokens,
        enable_prefix_caching=False,
        load_format="dummy",
        speculative_config=read_speculative_config(options.speculative_config, options.acceptance),
    )
    engine = start_engine(options.model, config, NoProgress())
    started = time.perf_counter()
    tokenizer = random_tokenizer(engine.model_config.vocab_size)
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(resolve_model(options.tokenizer, NoProgress()) / TOKENIZER_FOLDER)
    vocabulary = make_vocabulary(tokenizer)
    grammar = compile_grammar(Grammar.of_schema(SCHEMA), vocabulary)
    print(f"{engine.device_kind}; vocabulary and schema: {time.perf_counter() - started:.1f} s")
    kinds: dict[str, Constraint | None] = {"none": None, "schema": grammar, "step by step": Stepping(grammar)}
    for number in range(options.rounds + 1):
        for name, constraint in kinds.items():
            line = measure(engine, constraint, options)
            if number:
                print(f"{name:>12}: {line}", flush=True)
    engine.shutdown()


def measure(engine: EngineClient | ReplicatedEngine, constraint: Constraint | None, options: argparse.Namespace) -> str:
    """One round: all streams at once."""
    outputs: queue.SimpleQueue[tuple[float, RequestOutput]] = queue.SimpleQueue()
    rng = np.random.default_rng(0)
    before = engine.stats()
    for seed in range(options.streams):
        prompt = rng.integers(256, engine.model_config.vocab_size, options.prompt_tokens).tolist()
        sampling = SamplingParams(
            max_tokens=options.output_tokens, seed=seed, ignore_eos=True, constraint=constraint, temperature=1.0
        )
        engine.submit_with_callback(prompt, sampling, lambda output: outputs.put((time.perf_counter(), output)))
    first: dict[str, tuple[float, int]] = {}
    counts: dict[str, int] = {}
    times: list[float] = []
    while len(times) < options.streams:
        now, output = outputs.get()
        request = output.request_id
        counts[request] = counts.get(request, 0) + len(output.token_ids)
        first.setdefault(request, (now, counts[request]))
        if output.finish_reason not in (None, "length"):
            raise RuntimeError(f"an answer ended with {output.finish_reason}: {output.error}")
        if output.finish_reason is not None:
            start, start_count = first[request]
            times.append((now - start) / (counts[request] - start_count))
    after = engine.stats()
    milliseconds = np.array(times) * 1e3
    drafts = ""
    if before.speculative is not None and after.speculative is not None:
        drafted, kept = (
            getattr(after.speculative, name) - getattr(before.speculative, name)
            for name in ("num_draft_tokens", "num_accepted_tokens")
        )
        drafts = f", {kept} of {drafted} drafts kept"
    return (
        f"TPOT {milliseconds.mean():.3f} ms, p99 {np.percentile(milliseconds, 99):.3f}; "
        f"{after.num_steps - before.num_steps} steps, {after.forced_tokens - before.forced_tokens} of "
        f"{after.generation_tokens - before.generation_tokens} tokens forced{drafts}"
    )


if __name__ == "__main__":
    main()
