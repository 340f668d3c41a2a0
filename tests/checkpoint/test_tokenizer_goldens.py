"""`tokenizer.model` of SentencePiece and of tiktoken: the ids that transformers gives, text by text.

The references are made by `scripts/make_tokenizer_goldens.py`.
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tiktoken_read import is_tiktoken
from jaxserve.checkpoint.tokenizer_read import read_hf_tokenizer
from jaxserve.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[1] / "goldens" / "tokenizers"
BOS = {"tiktoken": "<|begin_of_text|>"}


def tokenizer_of(folder: Path) -> Tokenizer:
    files = read_hf_tokenizer(folder)
    assert files is not None
    return Tokenizer(files)


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_ids_equal_transformers(name: str) -> None:
    tokenizer = tokenizer_of(FOLDER / name)
    cases: list[dict[str, Any]] = json.loads((FOLDER / name / "ids.json").read_text())
    assert len(cases) > 40
    # transformers' converter of tiktoken's files puts no BOS first, where Llama 3's own tokenizer does.
    first = [tokenizer.token_id(BOS[name])] if name in BOS else []
    for case in cases:
        assert tokenizer.encode(case["text"]) == [*first, *case["ids"]], case["text"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded"], case["text"]


@pytest.mark.parametrize("name", sorted(path.parent.name for path in FOLDER.glob("*/as_json")))
def test_the_same_tokenizer_as_tokenizer_json(name: str) -> None:
    """As transformers saved it, which puts BOS first where its own ids have it."""
    tokenizer = tokenizer_of(FOLDER / name / "as_json")
    cases: list[dict[str, Any]] = json.loads((FOLDER / name / "ids.json").read_text())
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded"], case["text"]


def test_special_tokens_of_llama3_follow_the_vocabulary() -> None:
    tokenizer = tokenizer_of(FOLDER / "tiktoken")
    assert tokenizer.vocab_size == 600 + 256
    assert tokenizer.token_id("<|begin_of_text|>") == 600
    assert tokenizer.token_id("<|eot_id|>") == 609
    assert tokenizer.token_id("<|reserved_special_token_247|>") == 855
    assert tokenizer.special_token_ids == frozenset(range(600, 856))
    assert 609 not in tokenizer.encode("<|eot_id|>", allow_special_tokens=False)


def test_tokens_that_the_config_lists_take_the_place_of_llama3s(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "tiktoken" / "tokenizer.model", tmp_path)
    config = {"added_tokens_decoder": {"600": {"content": "<|go|>", "special": True}}, "bos_token": "<|go|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.vocab_size == 601
    assert tokenizer.encode("a")[0] == 600


def test_the_two_formats_of_one_name_are_told_apart() -> None:
    assert is_tiktoken(FOLDER / "tiktoken" / "tokenizer.model")
    assert not is_tiktoken(FOLDER / "sentencepiece_first" / "tokenizer.model")


@pytest.mark.parametrize(
    ("line", "named"),
    [("!!! 1", "line 2"), ("YQ== 7", "line 2.*rank 7"), ("YQ==", "line 2"), ("IQ== 1", "twice")],
    ids=["base64", "rank", "no rank", "twice"],
)
def test_damaged_tiktoken_file_is_told_by_line(tmp_path: Path, line: str, named: str) -> None:
    first = f"{base64.b64encode(b'!').decode()} 0"
    (tmp_path / "tokenizer.model").write_text(f"{first}\n{line}\n")
    with pytest.raises(CheckpointError, match=rf"tokenizer\.model.*{named}") as caught:
        read_hf_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
