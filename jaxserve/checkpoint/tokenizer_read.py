"""Reads the tokenizer of a Hugging Face folder: `tokenizer.json`, or `tokenizer.model` of SentencePiece or tiktoken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.checkpoint.added_tokens import ADDED_TOKENS_FILE, with_listed_tokens
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.hf_config import token_ids_from
from jaxserve.checkpoint.tiktoken_read import is_tiktoken, read_tiktoken
from jaxserve.checkpoint.tokenizer_files import (
    TokenizerFiles,
    TokenizerSettings,
    check_post_processor,
    error_line,
    read_json,
    read_text,
)
from jaxserve.checkpoint.trusted_files import checked_file, has_entry


def read_hf_tokenizer(folder: Path) -> TokenizerFiles | None:
    """The tokenizer of a Hugging Face folder, or None if it has none.

    The ids that end an answer are the union of config, generation config and tokenizer.

    Raises:
        CheckpointError: if a file is damaged, or a link that leaves the folder.
    """
    config = _json_if_there(folder, "tokenizer_config.json")
    token_map = _json_if_there(folder, "special_tokens_map.json")
    if has_entry(folder, "tokenizer.json"):
        tokenizer_json = read_text(checked_file(folder, "tokenizer.json"))
    elif has_entry(folder, "tokenizer.model"):
        if "added_tokens_decoder" not in config and has_entry(folder, ADDED_TOKENS_FILE):
            path = checked_file(folder, ADDED_TOKENS_FILE)
            config = with_listed_tokens(config, token_map, read_json(path), path)
        tokenizer_json = read_model_file(checked_file(folder, "tokenizer.model"), config)
    else:
        return None
    bos_token, eos_token = (_token_text(folder, config, token_map, key) for key in ("bos_token", "eos_token"))
    try:
        backend = tokenizers.Tokenizer.from_str(tokenizer_json)
        check_post_processor(json.loads(tokenizer_json).get("post_processor"))
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        raise CheckpointError(
            f"{folder / 'tokenizer.json'} is not usable ({error_line(error)}): fetch the file again"
        ) from error
    eos_token_ids = list(eos_token_ids_from_configs(folder))
    tokenizer_eos = backend.token_to_id(eos_token) if eos_token else None
    if tokenizer_eos is not None:
        eos_token_ids.append(tokenizer_eos)
    settings = TokenizerSettings(
        bos_token=bos_token,
        bos_token_id=backend.token_to_id(bos_token) if bos_token else None,
        eos_token=eos_token,
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        chat_template=_chat_template(folder, config),
    )
    return TokenizerFiles(tokenizer_json, settings)


def eos_token_ids_from_configs(folder: Path) -> tuple[int, ...]:
    """The union of what config.json and generation_config.json say."""
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        found += token_ids_from(_json_if_there(folder, name).get("eos_token_id"), str(folder / name))
    return tuple(dict.fromkeys(found))


def read_model_file(path: Path, config: Mapping[str, Any] | None) -> str:
    """The `tokenizer.json` that a `tokenizer.model` stands for, whichever of the two formats of that name it is.

    Args:
        config: what tokenizer_config.json says: tokens beyond the vocabulary, whether BOS is put first, and spaces; None:
            there is none, as in Meta's layout.

    Raises:
        CheckpointError: if it is damaged, or of a kind that is not supported.
    """
    if is_tiktoken(path):
        return read_tiktoken(path, config or {})
    from jaxserve.checkpoint.sentencepiece_read import read_sentencepiece  # here: its library is only for such files

    return read_sentencepiece(path, config)


def _json_if_there(folder: Path, name: str) -> dict[str, Any]:
    return read_json(checked_file(folder, name)) if has_entry(folder, name) else {}


def _token_text(folder: Path, config: Mapping[str, Any], token_map: Mapping[str, Any], key: str) -> str:
    token = config.get(key) or token_map.get(key) or ""
    text = token.get("content", "") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: {key}={token!r} must be a text, or an object with one"
        )
    return text


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own counts before the config's entry, which may be one template or a list of named ones."""
    if has_entry(folder, "chat_template.jinja"):
        return read_text(checked_file(folder, "chat_template.jinja"))
    template = config.get("chat_template")
    if isinstance(template, list) and all(_is_named_template(entry) for entry in template):
        template = {entry.get("name"): entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template must be a text, or named texts")
    return template


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
