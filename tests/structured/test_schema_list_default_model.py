"""The list of schemas once more: in the default model's own tokens, and what that model says to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxserve import Engine
from jaxserve.checkpoint.manifest import TOKENIZER_FOLDER
from jaxserve.constraint import TokenConstraint
from jaxserve.engine.token_masks import MASK_BITS, num_words
from jaxserve.structured.grammar import Grammar, compile_grammar
from jaxserve.structured.vocabulary import make_vocabulary
from jaxserve.text.tokenizer import load_tokenizer
from tests.optimized_programs import optimized_programs
from tests.structured.grammars import compiled, refused_at
from tests.structured.schemas import SchemaCase
from tests.structured.test_schema_list import CASES, CONFIG, obey, obey_all, text_of
from tests.tiny_engine import few_programs

SHORT = 32  # tokens: what is longer is cut, and must be the beginning of an answer


def may_follow(state: TokenConstraint, token: int, mask: np.ndarray) -> bool:
    mask[:] = 0
    state.write_mask(mask)
    return bool(mask[token // MASK_BITS] >> token % MASK_BITS & 1)


def test_values_are_accepted_and_refused_in_its_own_tokens(default_model_dir: Path) -> None:
    tokenizer = load_tokenizer(default_model_dir / TOKENIZER_FOLDER)
    vocabulary = make_vocabulary(tokenizer)
    mask = np.zeros(num_words(tokenizer.vocab_size), np.int32)
    for case in CASES:
        grammar, in_bytes = Grammar.of_schema(case.schema), compiled(Grammar.of_schema(case.schema))
        rule = compile_grammar(grammar, vocabulary)
        for text in map(text_of, (*case.good, *case.bad)):
            stop = refused_at(in_bytes, text)
            state, position = rule.start(), 0
            for token in tokenizer.encode_continuation(text):
                position += len(tokenizer.token_bytes(token))
                if not may_follow(state, token, mask):
                    break
                # What is forced may be spelled in the tokens that are usual for it alone, so others may end earlier.
                assert stop is None or position <= stop, (case.schema, text)
                state.accept(token)
            else:
                assert state.is_complete == (stop is None), (case.schema, text)
                continue
            assert stop is not None, (case.schema, text, position)


def optimized_engine(model: Path) -> Engine:
    with optimized_programs():
        return Engine(str(model), dataclasses.replace(CONFIG, max_num_batched_tokens=32, max_model_len=256))


@pytest.fixture(scope="module")
def lean_engine(default_model_dir: Path) -> Iterator[Engine]:
    with few_programs("full", masked=True):
        engine = optimized_engine(default_model_dir)
    with engine:
        yield engine


@pytest.fixture(scope="module")
def engine(default_model_dir: Path) -> Iterator[Engine]:
    with optimized_engine(default_model_dir) as engine:
        yield engine


def check_short_answers(engine: Engine, cases: list[SchemaCase]) -> None:
    """Three seeds each, most of them many at a time, and every other answer streamed."""
    jobs = [(case, seed, (place + seed) % 2 == 0) for place, case in enumerate(cases) for seed in range(3)]

    def ask(job: tuple[SchemaCase, int, bool]) -> bool:
        return obey(engine, job[0], job[1], stream=job[2], max_tokens=SHORT)

    whole = sum(map(ask, jobs[::30]))
    with ThreadPoolExecutor(16) as pool:
        whole += sum(pool.map(ask, [job for place, job in enumerate(jobs) if place % 30]))
    assert whole > len(jobs) / 2


def test_its_short_answers_satisfy_some_of_the_list(lean_engine: Engine) -> None:
    check_short_answers(lean_engine, CASES[::60])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_its_short_answers_satisfy_a_tenth_of_the_list(engine: Engine) -> None:
    check_short_answers(engine, CASES[::10])


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_its_answers_satisfy_the_list(engine: Engine) -> None:
    obey_all(engine, CASES)
