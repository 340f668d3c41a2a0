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

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.export import export
from jaxserve.checkpoint.manifest import TOKENIZER_FOLDER
from jaxserve.checkpoint.tiktoken_read import is_tiktoken
from jaxserve.checkpoint.tokenizer_read import read_hf_tokenizer
from jaxserve.progress import NoProgress
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_model import write_tiny_llama

FOLDER = Path(__file__).parents[1] / "goldens" / "tokenizers"
ADDED_TOKENS = FOLDER / "sentencepiece_added_tokens"
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


def test_tokens_of_a_file_of_their_own_travel_with_the_model(tmp_path: Path) -> None:
    """ids.json has them in its texts; here: which are special, and that a converted checkpoint has them all."""
    folder, added = write_tiny_llama(tmp_path / "source", vocab_size=504, bos_token_id=1, eos_token_id=2), ADDED_TOKENS
    (folder / "tokenizer.json").unlink()
    shutil.copytree(added, folder, dirs_exist_ok=True)
    converted = convert(folder, tmp_path / "converted", progress=NoProgress())
    for tokenizer in (tokenizer_of(added), load_tokenizer(converted / TOKENIZER_FOLDER)):
        listed: dict[str, int] = json.loads((added / "added_tokens.json").read_text())
        assert {token: tokenizer.token_id(token) for token in listed} == listed
        special = {token for token, token_id in listed.items() if token_id in tokenizer.special_token_ids}
        assert special == {"<unk>", "<s>", "</s>", "<|user|>", "<|pad|>"}
        for case in json.loads((added / "ids.json").read_text()):
            assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
    exported = export(converted, tmp_path / "exported", progress=NoProgress())
    assert (exported / "added_tokens.json").read_bytes() == (added / "added_tokens.json").read_bytes()


def test_tokens_that_the_config_lists_count_alone(tmp_path: Path) -> None:
    """As transformers has it."""
    shutil.copytree(ADDED_TOKENS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"500": {"content": "<|go|>"}}}')
    assert tokenizer_of(tmp_path).vocab_size == 501


def test_tokens_of_a_file_of_their_own_follow_a_tiktoken_vocabulary(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "tiktoken" / "tokenizer.model", tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<|stop|>": 601, "<|go|>": 600}')
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|go|>"}')
    tokenizer = tokenizer_of(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.special_token_ids) == (602, frozenset({600}))
    assert tokenizer.encode("a<|stop|>")[::2] == [600, 601]


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        (["<tool>"], "must hold a JSON object"),
        ({"<tool>": "500"}, "must list ids by their tokens"),
        ({"<tool>": True}, "must list ids by their tokens"),
        ({"<tool>": -1}, "must be different, from 0"),
        ({"<tool>": 500, "<other>": 500}, "must be different"),
        ({"<tool>": 501}, "leave gaps"),
        ({"<tool>": 10**30}, "must be different, from 0"),
    ],
    ids=str,
)
def test_a_damaged_file_of_added_tokens_is_told(listed: Any, told: str, tmp_path: Path) -> None:
    shutil.copytree(ADDED_TOKENS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "added_tokens.json").write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=rf"added_tokens\.json.*{told}"):
        read_hf_tokenizer(tmp_path)


@pytest.mark.parametrize(("text", "told"), [("<unk>", "'<unk>', is the token 0 already"), ("", "'', is none")])
def test_an_added_token_that_would_shift_those_after_it_is_refused(text: str, told: str, tmp_path: Path) -> None:
    shutil.copytree(ADDED_TOKENS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "added_tokens.json").write_text(json.dumps({text: 500, "<after>": 501}))
    with pytest.raises(CheckpointError, match=f"the added token 500, {told}"):
        read_hf_tokenizer(tmp_path)


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
