"""Encoding with and without control tokens, and tokenizers that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tokenizer_files import (
    SETTINGS_FILE,
    TOKENIZER_FILE,
    TokenizerFiles,
    TokenizerSettings,
    read_tokenizer,
    write_tokenizer,
)
from jaxserve.text.tokenizer import load_tokenizer
from tests.text.vocabularies import CONTROL_TOKENS, byte_level_tokenizer, token_ids

TOKENIZER = byte_level_tokenizer()


def written(folder: Path) -> Path:
    settings = TokenizerSettings("<s>", 1, "</s>", (2, 5), "{{ 'é' }}")
    write_tokenizer(TokenizerFiles(TOKENIZER._json, settings), folder)
    return folder


def test_control_tokens_from_text_only_where_allowed() -> None:
    text = "a<|eot_id|>"
    assert TOKENIZER.encode(text) == token_ids(TOKENIZER, "a", "<|eot_id|>")
    plain = TOKENIZER.encode(text, allow_special_tokens=False)
    assert not set(plain) & TOKENIZER.special_token_ids
    assert TOKENIZER.decode(plain) == text
    assert TOKENIZER.encode(text) == token_ids(TOKENIZER, "a", "<|eot_id|>")  # the switch did not stick


def test_facts_of_the_vocabulary() -> None:
    assert TOKENIZER.special_token_ids == frozenset(token_ids(TOKENIZER, *CONTROL_TOKENS))
    assert TOKENIZER.vocab_size == max(TOKENIZER.special_token_ids) + 1
    assert TOKENIZER.token_bytes(10**6) == b""


def test_lone_surrogate_is_a_replacement_character() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b\ud83c\udf36")) == "a\ufffdb\U0001f336"


def test_settings_survive_the_disk(tmp_path: Path) -> None:
    loaded = load_tokenizer(written(tmp_path))
    assert (loaded.bos_token, loaded.bos_token_id, loaded.eos_token) == ("<s>", 1, "</s>")
    assert (loaded.eos_token_ids, loaded.chat_template) == ((2, 5), "{{ 'é' }}")
    assert loaded.encode("hell yes") == TOKENIZER.encode("hell yes")


@pytest.mark.parametrize("name", [TOKENIZER_FILE, SETTINGS_FILE])
@pytest.mark.parametrize(
    "content", [None, b"", b"{}}", b"\xff", b"[]"], ids=["missing", "empty", "cut", "binary", "list"]
)
def test_unusable_file_is_named_on_one_line(tmp_path: Path, name: str, content: bytes | None) -> None:
    written(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"^[^\n]*{name}[^\n]*$"):
        load_tokenizer(tmp_path)


def test_unknown_decoder_is_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path)
    data = json.loads((tmp_path / TOKENIZER_FILE).read_text())
    data["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="WordPiece"):
        load_tokenizer(tmp_path)


def test_settings_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / SETTINGS_FILE).write_text('{"new_key": 1}')
    with pytest.raises(CheckpointError, match="new_key"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("settings", [{"eos_token_ids": 5}, {"eos_token_ids": ["2"]}, {"bos_token": 1}], ids=str)
def test_settings_of_other_types_are_refused_by_name(settings: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / SETTINGS_FILE).write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=f"{next(iter(settings))}.*=.* must be .*: convert the model again"):
        read_tokenizer(tmp_path)
