"""Tokens that a checkpoint has beyond its vocabulary file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.checkpoint.errors import CheckpointError

ADDED_TOKENS_FILE = "added_tokens.json"
_LARGEST_ID = 2**31 - 1
_LISTS_OF_SPECIAL_TOKENS = ("additional_special_tokens", "extra_special_tokens")


def with_listed_tokens(
    config: Mapping[str, Any], token_map: Mapping[str, Any], listed: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """tokenizer_config.json with the tokens of `added_tokens.json` in it, where older versions of transformers kept them.

    The file has ids by tokens, and says no more of them: special are those that the two others name as such.

    Args:
        config: what tokenizer_config.json says.
        token_map: what special_tokens_map.json says.
        listed: what added_tokens.json says.
        path: of that file.

    Raises:
        CheckpointError: if it has anything but ids by tokens, or one id twice.
    """
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in listed.values()):
        raise CheckpointError(f"{path} must list ids by their tokens: fetch the file again")
    ids = set(listed.values())
    if len(ids) < len(listed) or not all(0 <= token_id <= _LARGEST_ID for token_id in ids):
        raise CheckpointError(f"{path}: its ids must be different, from 0 to {_LARGEST_ID}: fetch the file again")
    special = {token for each in (config, token_map) for token in _special_tokens(each)}
    decoder = {
        str(token_id): {"content": token, "special": token in special, "normalized": token not in special}
        for token, token_id in listed.items()
    }
    return {**config, "added_tokens_decoder": decoder}


def _special_tokens(settings: Mapping[str, Any]) -> set[str]:
    """The tokens that have a role (`eos_token` and the like), and those that are only listed as special."""
    found = [token for name, token in settings.items() if name.endswith("_token")]
    for name in _LISTS_OF_SPECIAL_TOKENS:
        found += value if isinstance(value := settings.get(name), list) else []
    texts = (token.get("content") if isinstance(token, dict) else token for token in found)
    return {text for text in texts if isinstance(text, str)}


def added_tokens(config: Mapping[str, Any], num_pieces: int, path: Path) -> list[tokenizers.AddedToken]:
    """Tokens beyond the vocabulary, as tokenizer_config.json lists them; their ids must follow without a gap.

    Raises:
        CheckpointError: if they do not, or the list is none.
    """
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(map(_is_added_token, listed.items())):
        raise CheckpointError(f"{path}: added_tokens_decoder in tokenizer_config.json must list tokens by their ids")
    beyond = sorted(
        ((int(token_id), token) for token_id, token in listed.items() if int(token_id) >= num_pieces),
        key=lambda entry: entry[0],
    )
    if [token_id for token_id, _ in beyond] != list(range(num_pieces, num_pieces + len(beyond))):
        raise CheckpointError(
            f"{path}: the ids of the added tokens in tokenizer_config.json or {ADDED_TOKENS_FILE} leave gaps"
        )
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return [
        tokenizers.AddedToken(token["content"], **{flag: bool(token.get(flag, False)) for flag in flags})
        for _, token in beyond
    ]


def _is_added_token(entry: tuple[str, Any]) -> bool:
    token_id, token = entry
    plain = token_id.isascii() and token_id.isdigit() and len(token_id) < 20
    return plain and isinstance(token, dict) and isinstance(token.get("content"), str)
