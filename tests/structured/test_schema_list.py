"""The list of schemas: what satisfies one is accepted token by token, what does not is refused, and models obey it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from jaxserve import Engine, EngineConfig
from jaxserve.speculative_config import SpeculativeConfig
from jaxserve.structured.grammar import Grammar, GrammarState
from tests.structured.grammars import allowed, check_look_ahead, compiled, refused_at
from tests.structured.schemas import SchemaCase, all_schemas
from tests.tiny_engine import few_programs
from tests.tiny_model import write_tiny_llama

CASES = all_schemas()
USER = {"role": "user", "content": "Answer."}
MAX_TOKENS = 200
CONFIG = EngineConfig(device="cpu", max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512)


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def validator_of(schema: Any) -> Draft202012Validator:
    return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)


def test_there_are_three_hundred() -> None:
    assert len(CASES) >= 300
    assert len({text_of(case.schema) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", [pytest.param(case, id=text_of(case.schema)[:60]) for case in CASES])
def test_values_are_accepted_and_refused(case: SchemaCase) -> None:
    validator = validator_of(case.schema)
    grammar = compiled(Grammar.of_schema(case.schema))
    for value in case.good:
        assert validator.is_valid(value), value
        assert refused_at(grammar, text_of(value)) is None, value
        check_look_ahead(grammar, text_of(value).encode())
    for value in case.bad:
        stopped = refused_at(grammar, text_of(value))
        assert stopped is not None, value
        rest = grammar.start()
        for byte in text_of(value).encode()[:stopped]:
            rest.accept(byte)
        assert allowed(rest) or rest.is_complete  # up to there it was the beginning of something else


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = write_tiny_llama(tmp_path_factory.mktemp("model") / "model")
    with few_programs("full", masked=True):
        engine = Engine(str(model), CONFIG)
    with engine:
        yield engine


def obey(engine: Engine, case: SchemaCase, seed: int, *, stream: bool, max_tokens: int = MAX_TOKENS) -> bool:
    """One answer at a high temperature; whether it was whole."""
    fields: dict[str, Any] = {
        "messages": [USER], "temperature": 1.5, "seed": seed, "max_tokens": max_tokens,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": case.schema}},
    }  # fmt: skip
    if stream:
        parts = [chunk.choices[0] for chunk in engine.chat.completions.create(**fields, stream=True)]
        text, reason = "".join(part.delta.content or "" for part in parts), parts[-1].finish_reason
    else:
        choice = engine.chat.completions.create(**fields).choices[0]
        text, reason = choice.message.content or "", choice.finish_reason
    if reason == "stop":
        validator_of(case.schema).validate(json.loads(text))
        return True
    assert reason == "length"
    beginning = text.rstrip("\ufffd")
    assert refused_at(compiled(Grammar.of_schema(case.schema)), beginning) in (None, len(beginning.encode()))
    return False


def obey_all(engine: Engine, cases: list[SchemaCase]) -> None:
    """Each with three seeds: the first alone, the others many at a time, every other one streamed."""
    whole = sum(obey(engine, case, 0, stream=place % 2 == 0) for place, case in enumerate(cases))
    jobs = [(case, seed, (place + seed) % 2 == 0) for place, case in enumerate(cases) for seed in (1, 2)]
    with ThreadPoolExecutor(16) as pool:
        whole += sum(pool.map(lambda job: obey(engine, job[0], job[1], stream=job[2]), jobs))
    assert whole > 2 * len(cases)  # of three each: the list asks for little that has no end


def test_answers_satisfy_a_tenth_of_the_list(engine: Engine) -> None:
    obey_all(engine, CASES[::10])


def test_forced_tokens_change_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {
        "type": "object",
        "properties": {"customer": {"enum": ["one of a kind", "none"]}, "measures": {"type": "integer", "maximum": 99}},
        "required": ["customer", "measures"],
        "additionalProperties": False,
    }

    def answers() -> list[tuple[str | None, str, int]]:
        def ask(seed: int) -> tuple[str | None, str, int]:
            answer = engine.chat.completions.create(
                messages=[USER], temperature=1.5, seed=seed, max_tokens=25 if seed % 3 == 0 else 100,
                frequency_penalty=seed % 2,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            )  # fmt: skip
            choice = answer.choices[0]
            return choice.message.content, choice.finish_reason, answer.usage.completion_tokens

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(ask, range(8)))

    runs: list[int] = []
    found = GrammarState.forced_run

    def told(self: GrammarState, most: int) -> tuple[int, ...]:
        run = found(self, most)
        runs.append(len(run))
        return run

    monkeypatch.setattr(GrammarState, "forced_run", told)
    jumping = answers()
    assert max(runs) > 10
    monkeypatch.setattr(GrammarState, "forced_run", lambda self, most: ())
    assert answers() == jumping


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_answers_satisfy_the_list(tiny_model_dir: Path) -> None:
    with Engine(str(tiny_model_dir), CONFIG) as engine:
        obey_all(engine, CASES)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_answers_satisfy_the_list_with_drafts(method: Any, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    drafter = str(write_tiny_llama(tmp_path / "draft", seed=1)) if method == "draft_model" else None
    config = dataclasses.replace(CONFIG, speculative_config=SpeculativeConfig(method, 3, model=drafter, adaptive=False))
    with Engine(str(model), config) as engine:
        obey_all(engine, CASES)
        stats = engine.stats().speculative
    assert stats is not None and stats.num_draft_tokens > 1000
