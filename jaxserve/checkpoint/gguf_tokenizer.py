"""Rebuilds the tokenizer that a GGUF's metadata describes."""

from __future__ import annotations

from typing import TypeVar

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.gguf_config import eos_token_ids_from_gguf, token_id_from_gguf
from jaxserve.checkpoint.gguf_source import GGUFFile
from jaxserve.checkpoint.tokenizer_build import (
    BYTE_LEVEL_RULES,
    PieceKind,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)
from jaxserve.checkpoint.tokenizer_files import TokenizerFiles, TokenizerSettings, error_line

_Element = TypeVar("_Element", str, int, float)
_GGUF_KINDS: dict[int, PieceKind] = {1: "normal", 2: "unknown", 3: "control", 4: "user", 5: "unused", 6: "byte"}


def read_gguf_tokenizer(file: GGUFFile) -> TokenizerFiles | None:
    """The tokenizer in a GGUF's metadata, or None if it has none.

    Raises:
        CheckpointError: if it is damaged or of a kind that is not supported.
    """
    model = file.get("tokenizer.ggml.model")
    if model is None:
        return None
    pieces = _list(file, "tokens", str)
    kinds = _gguf_kinds(file, len(pieces))
    bos, eos = (_gguf_token(file, pieces, key) for key in ("bos", "eos"))
    try:
        if model == "gpt2":
            tokenizer_json = _gguf_byte_level(file, pieces, kinds, bos)
        elif model == "llama":
            scores = _list(file, "scores", float)
            if len(scores) != len(pieces):
                raise ValueError(f"{len(scores)} scores for {len(pieces)} tokens")
            tokenizer_json = sentencepiece_tokenizer(
                pieces,
                kinds,
                scores,
                prefix_space="sentencepiece" if _flag(file, "add_space_prefix", True) else "never",
                bos=bos if _flag(file, "add_bos_token", True) else None,
            )
        else:
            raise ValueError(f"tokenizer model {model!r} is not supported; supported are 'gpt2' and 'llama'")
    except ValueError as error:
        raise CheckpointError(f"{file.path}: {error_line(error)}") from error
    template = file.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{file.path}: metadata tokenizer.chat_template must be a text")
    settings = TokenizerSettings(
        bos_token=bos[0] if bos else "",
        bos_token_id=bos[1] if bos else None,
        eos_token=eos[0] if eos else "",
        eos_token_ids=eos_token_ids_from_gguf(file),
        chat_template=template,
    )
    return TokenizerFiles(tokenizer_json, settings)


def _gguf_byte_level(file: GGUFFile, pieces: list[str], kinds: list[PieceKind], bos: tuple[str, int] | None) -> str:
    name = file.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in BYTE_LEVEL_RULES:
        raise ValueError(f"pre-tokenizer {name!r} is not supported; supported are {', '.join(BYTE_LEVEL_RULES)}")
    rule = BYTE_LEVEL_RULES[name]
    merges = []
    for merge in _list(file, "merges", str):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    adds_bos = _flag(file, "add_bos_token", rule.adds_bos)
    return byte_level_tokenizer(pieces, kinds, merges, rule, bos if adds_bos else None)


def _gguf_kinds(file: GGUFFile, num_pieces: int) -> list[PieceKind]:
    numbers = _list(file, "token_type", int) or [1] * num_pieces
    if len(numbers) != num_pieces or not set(numbers) <= set(_GGUF_KINDS):
        raise CheckpointError(f"{file.path}: token_type does not fit the {num_pieces} tokens: fetch the file again")
    return [_GGUF_KINDS[number] for number in numbers]


def _gguf_token(file: GGUFFile, pieces: list[str], key: str) -> tuple[str, int] | None:
    token_id = token_id_from_gguf(file, key)
    if token_id is None:
        return None
    if token_id >= len(pieces):
        raise CheckpointError(f"{file.path}: {key}_token_id={token_id} is outside the vocabulary of {len(pieces)}")
    return pieces[token_id], token_id


def _list(file: GGUFFile, key: str, kind: type[_Element]) -> list[_Element]:
    """A list in the tokenizer's metadata, empty where there is none."""
    values = file.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise CheckpointError(f"{file.path}: metadata tokenizer.ggml.{key} must be a list of {kind.__name__}")
    return values


def _flag(file: GGUFFile, key: str, default: bool) -> bool:
    value = file.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{file.path}: metadata tokenizer.ggml.{key}={value!r} must be true or false")
    return value
