"""Reads SentencePiece's `tokenizer.model`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece.sentencepiece_model_pb2 as sentencepiece_model
from google.protobuf.message import DecodeError

from jaxserve.checkpoint.added_tokens import added_tokens
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tokenizer_build import PrefixSpace, sentencepiece_tokenizer
from jaxserve.checkpoint.tokenizer_files import error_line, read_bytes


def read_sentencepiece(path: Path, config: Mapping[str, Any] | None) -> str:
    """The `tokenizer.json` of a SentencePiece model. As `read_model_file`."""
    settings = {} if config is None else config
    model = sentencepiece_model.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        model.ParseFromString(read_bytes(path))
    except DecodeError as error:
        raise CheckpointError(f"{path} is no SentencePiece model ({error_line(error)}): fetch it again") from error
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise CheckpointError(f"{path}: SentencePiece models other than BPE are not supported: use a tokenizer.json")
    if model.normalizer_spec.precompiled_charsmap or model.normalizer_spec.remove_extra_whitespaces:
        raise CheckpointError(f"{path}: SentencePiece normalization is not supported: use a tokenizer.json")
    names = {1: "normal", 2: "unknown", 3: "control", 4: "user", 5: "unused", 6: "byte"}
    pieces = [piece.piece for piece in model.pieces]
    unread = next(
        (number for number, piece in enumerate(pieces) if not isinstance(piece, str)), None
    )  # no UTF-8: bytes
    if unread is not None:
        raise CheckpointError(f"{path} is damaged (token {unread} is no text): fetch it again")
    bos_id = model.trainer_spec.bos_id
    adds_bos = settings.get("add_bos_token", True) and 0 <= bos_id < len(pieces)
    try:
        return sentencepiece_tokenizer(
            pieces,
            [names[piece.type] for piece in model.pieces],  # pyright: ignore[reportArgumentType]
            [piece.score for piece in model.pieces],
            prefix_space=_prefix_space(config, model.normalizer_spec.add_dummy_prefix),
            bos=(pieces[bos_id], bos_id) if adds_bos else None,
            added=added_tokens(settings, len(pieces), path),
        )
    except ValueError as error:
        raise CheckpointError(f"{path}: {error_line(error)}") from error


def _prefix_space(config: Mapping[str, Any] | None, model_adds_it: bool) -> PrefixSpace:
    """As transformers 5 has it where there is a tokenizer_config.json for it; SentencePiece's own way otherwise."""
    if config is None:
        return "sentencepiece" if model_adds_it else "never"
    if config.get("add_prefix_space") is False:
        return "never"
    return "always" if config.get("legacy", False) else "first"
