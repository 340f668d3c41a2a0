"""Tokens that a checkpoint has beyond its vocabulary file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.checkpoint.errors import CheckpointError


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
        raise CheckpointError(f"{path}: the ids of the added tokens in tokenizer_config.json leave gaps")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return [
        tokenizers.AddedToken(token["content"], **{flag: bool(token.get(flag, False)) for flag in flags})
        for _, token in beyond
    ]


def _is_added_token(entry: tuple[str, Any]) -> bool:
    token_id, token = entry
    plain = token_id.isascii() and token_id.isdigit() and len(token_id) < 20
    return plain and isinstance(token, dict) and isinstance(token.get("content"), str)
