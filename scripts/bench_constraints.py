"""What structured output costs the host: compiling the grammars of the tests' list of schemas, and the masks of a step.

    PYTHONPATH=. python scripts/bench_constraints.py --model smollm2-135m-instruct --rows 64

`compile`: one grammar, with the mask of its first token. `mask`: at each token of every value that the list has for a
schema: taking that token in, writing the mask of the next, and finding out what is forced. `step`: that for many rows at
once, each somewhere else in its own schema, as the engine does it for a step, summed over its threads; with `--drafts` each
row brings so many of the tokens that follow there, and gets a mask after each. Milliseconds of CPU time: what else runs on
the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable
from typing import TypeVar

import llguidance
import numpy as np

from jaxserve.checkpoint.source import resolve_model
from jaxserve.constraint import TokenConstraint
from jaxserve.engine.request import Request
from jaxserve.engine.schedule import DecodeRow, DraftedTokens, ScheduledBatch
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.token_masks import MaskWriter, num_words
from jaxserve.progress import NoProgress
from jaxserve.protocol.launch import TOKENIZER_FOLDER
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.grammar import CompiledGrammar, Grammar, compile_grammar
from jaxserve.structured.vocabulary import make_vocabulary
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from tests.structured.schemas import SchemaCase, all_schemas

NUM_STEPS = 50

ResultT = TypeVar("ResultT")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer is used")
    parser.add_argument("--rows", type=int, default=64, help="constrained rows of a step")
    parser.add_argument("--drafts", type=int, default=3, help="of each row, in steps with drafts")
    options = parser.parse_args()
    tokenizer = load_tokenizer(resolve_model(options.model, NoProgress()) / TOKENIZER_FOLDER)
    cases = all_schemas()
    print(
        f"{options.model}, {tokenizer.vocab_size} tokens; {len(cases)} schemas; Python {platform.python_version()}, "
        f"llguidance {llguidance.__version__}, {os.cpu_count()} cores"
    )
    started = time.perf_counter()
    vocabulary = make_vocabulary(tokenizer)
    print(f"vocabulary, once: {time.perf_counter() - started:.2f} s")
    compile_times, grammars = [], []
    for case in cases:
        grammar = Grammar.of_schema(case.schema)
        seconds, compiled = timed(lambda grammar=grammar: compile_grammar(grammar, vocabulary))
        compile_times.append(seconds)
        grammars.append(compiled)
    report("compile", compile_times)
    report("mask", mask_times(tokenizer, cases, grammars))
    for drafts in sorted({0, options.drafts}):
        name = f"step of {options.rows} rows" + (f" with {drafts} drafts each" if drafts else "")
        report(name, step_times(tokenizer, cases, grammars, options.rows, drafts))


def tokens_of(tokenizer: Tokenizer, value: object) -> list[int]:
    return tokenizer.encode_continuation(json.dumps(value, ensure_ascii=False))


def mask_times(tokenizer: Tokenizer, cases: list[SchemaCase], grammars: list[CompiledGrammar]) -> list[float]:
    mask = np.zeros(num_words(tokenizer.vocab_size), np.int32)
    times: list[float] = []
    for case, grammar in zip(cases, grammars, strict=True):
        for value in case.good:
            state = grammar.start()
            for token in tokens_of(tokenizer, value):
                seconds, may_go_on = timed(lambda state=state, token=token: advance(state, token, mask))
                times.append(seconds)
                if not may_go_on:
                    break
    return times


def advance(state: TokenConstraint, token: int, mask: np.ndarray) -> bool:
    """Takes a token in and writes the mask of the next, as far as there is one."""
    state.accept(token)
    if state.is_final:
        return False
    mask[:] = 0
    state.write_mask(mask)
    state.forced_run(64)
    return True


def step_times(
    tokenizer: Tokenizer, cases: list[SchemaCase], grammars: list[CompiledGrammar], num_rows: int, num_drafts: int
) -> list[float]:
    choose = random.Random(0)
    writer = MaskWriter(tokenizer.vocab_size)
    times: list[float] = []
    for _ in range(NUM_STEPS):
        rows, following = zip(
            *(row_somewhere(tokenizer, cases, grammars, choose) for _ in range(num_rows)), strict=True
        )
        batch = ScheduledBatch(
            decode=tuple(DecodeRow(sequence, 0, -1, -1, num_drafts) for sequence in rows),
            prefill=(),
            num_drafts=num_drafts,
        )
        drafted = None
        if num_drafts:
            counts = np.array([min(num_drafts, len(tokens)) for tokens in following], np.int32)
            tokens = np.array(
                [[*tokens[:num_drafts], *[0] * num_drafts][:num_drafts] for tokens in following], np.int32
            )
            drafted = DraftedTokens(tokens, counts)
        times.append(timed(lambda batch=batch, drafted=drafted: write(writer, batch, drafted))[0])
    writer.close()
    return times


def write(writer: MaskWriter, batch: ScheduledBatch, drafted: DraftedTokens | None) -> None:
    writer.find_forced(writer.write(batch, drafted))


def row_somewhere(
    tokenizer: Tokenizer, cases: list[SchemaCase], grammars: list[CompiledGrammar], choose: random.Random
) -> tuple[Sequence, list[int]]:
    """A sequence at a random place inside a value of a random schema, and the tokens that follow in it."""
    number = choose.randrange(len(cases))
    tokens = tokens_of(tokenizer, choose.choice(cases[number].good))
    state = grammars[number].start()
    place = choose.randrange(len(tokens))
    for token in tokens[:place]:
        state.accept(token)
    request = Request("r", (1,), SamplingParams(), arrival_time=0.0)
    return Sequence(request, 0, 0, frozenset((0,)), 1000, constraint=state, token_ids=[1]), tokens[place:]


def timed(work: Callable[[], ResultT]) -> tuple[float, ResultT]:
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def report(name: str, seconds: list[float]) -> None:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    print(f"{name}: p50 {p50:.3f}, p99 {p99:.3f}, most {max(seconds) * 1e3:.3f} ms ({len(seconds)} times)")


if __name__ == "__main__":
    main()
