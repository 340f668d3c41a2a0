"""Tokens that a checkpoint has beyond its vocabulary file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.checkpoint.errors import CheckpointError


def added_tokens(config: Mapping[str, Any], num_pieces: int, path: Path) -> list[tokenizers.AddedToken]:
    """Tokens beyond the vocabulary, as tokenizer_config.json lists them; their ids must follow without a gap."""
    listed = config.get("added_tokens_decoder", {})
    beyond = sorted((int(token_id), token) for token_id, token in listed.items() if int(token_id) >= num_pieces)
    if [token_id for token_id, _ in beyond] != list(range(num_pieces, num_pieces + len(beyond))):
        raise CheckpointError(f"{path}: the ids of the added tokens in tokenizer_config.json leave gaps")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return [
        tokenizers.AddedToken(token["content"], **{flag: bool(token.get(flag, False)) for flag in flags})
        for _, token in beyond
    ]
