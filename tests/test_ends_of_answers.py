"""Every id that ends an answer, wherever a checkpoint says it, ends one: through conversion, engine and text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve import Engine, EngineConfig
from jaxserve.checkpoint.convert import convert
from jaxserve.progress import NoProgress
from tests.checkpoint.files import write_gguf
from tests.tiny_engine import few_programs
from tests.tiny_model import SPECIAL_TOKENS, TINY_CONFIG, random_weights, write_tiny_llama

ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}
FROM_CONFIG, FROM_GENERATION, FROM_TOKENIZER = 256, 257, 258
LETTER = 87  # "W" here, "x" there


@pytest.fixture(scope="module", params=["huggingface", "gguf"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "gguf":
        ends = {"tokenizer.ggml.eot_token_id": FROM_CONFIG, "tokenizer.ggml.eom_token_id": FROM_GENERATION}
        source = write_gguf(root / "model.gguf", random_weights(TINY_CONFIG | ONE_LAYER, 0), metadata=ends, **ONE_LAYER)
    else:
        source = write_tiny_llama(root / "model", eos_token_id=FROM_CONFIG, **ONE_LAYER)
        both = f'{{"eos_token_id": [{FROM_CONFIG}, {FROM_GENERATION}]}}'
        (source / "generation_config.json").write_text(both)
    folder = convert(source, root / "converted", progress=NoProgress())
    config = EngineConfig(device="cpu", max_model_len=32, max_num_seqs=1, max_num_batched_tokens=16)
    with few_programs("full"):
        made = Engine(str(folder), config=config)
    with made:
        yield made


def complete(engine: Engine, token_id: int, **options: Any) -> tuple[str, str, int]:
    """Text, reason and number of tokens of an answer whose every token is likeliest to be that one."""
    answer = engine.completions.create(
        prompt="Once", max_tokens=3, temperature=0, logit_bias={str(token_id): 100}, **options
    )
    assert answer.usage is not None
    return answer.choices[0].text, str(answer.choices[0].finish_reason), answer.usage.completion_tokens


@pytest.mark.parametrize("token_id", [FROM_CONFIG, FROM_GENERATION, FROM_TOKENIZER])
def test_each_id_ends_an_answer_and_is_not_shown(engine: Engine, token_id: int) -> None:
    assert SPECIAL_TOKENS[token_id - 256] not in complete(engine, token_id)[0]
    assert complete(engine, token_id) == ("", "stop", 1)


@pytest.mark.parametrize("token_id", [FROM_CONFIG, FROM_GENERATION, FROM_TOKENIZER])
def test_ignore_eos_is_for_all_of_them(engine: Engine, token_id: int) -> None:
    assert complete(engine, token_id, ignore_eos=True) == ("", "length", 3)


def test_ignore_eos_is_not_for_the_callers_own(engine: Engine) -> None:
    text, *ended = complete(engine, LETTER, ignore_eos=True)
    assert text in ("WWW", "xxx") and ended == ["length", 3]
    assert complete(engine, LETTER, ignore_eos=True, stop_token_ids=[LETTER]) == ("", "stop", 1)
