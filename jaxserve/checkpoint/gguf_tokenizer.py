"""Rebuilds the tokenizer that a GGUF's metadata describes."""

from __future__ import annotations

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.gguf_config import eos_token_ids_from_gguf
from jaxserve.checkpoint.gguf_source import GGUFFile
from jaxserve.checkpoint.tokenizer_build import (
    BYTE_LEVEL_RULES,
    PieceKind,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)
from jaxserve.checkpoint.tokenizer_files import TokenizerFiles, TokenizerSettings, error_line

_GGUF_KINDS: dict[int, PieceKind] = {1: "normal", 2: "unknown", 3: "control", 4: "user", 5: "unused", 6: "byte"}


def read_gguf_tokenizer(file: GGUFFile) -> TokenizerFiles | None:
    """The tokenizer in a GGUF's metadata, or None if it has none.

    Raises:
        CheckpointError: if it is damaged or of a kind that is not supported.
    """
    model = file.get("tokenizer.ggml.model")
    if model is None:
        return None
    pieces = [str(piece) for piece in file.get("tokenizer.ggml.tokens", [])]
    kinds = _gguf_kinds(file, len(pieces))
    bos, eos = (_gguf_token(file, pieces, key) for key in ("bos", "eos"))
    try:
        if model == "gpt2":
            tokenizer_json = _gguf_byte_level(file, pieces, kinds, bos)
        elif model == "llama":
            scores = file.get("tokenizer.ggml.scores", [])
            if len(scores) != len(pieces):
                raise ValueError(f"{len(scores)} scores for {len(pieces)} tokens")
            tokenizer_json = sentencepiece_tokenizer(
                pieces,
                kinds,
                scores,
                prefix_space="sentencepiece" if file.get("tokenizer.ggml.add_space_prefix", True) else "never",
                bos=bos if file.get("tokenizer.ggml.add_bos_token", True) else None,
            )
        else:
            raise ValueError(f"tokenizer model {model!r} is not supported; supported are 'gpt2' and 'llama'")
    except ValueError as error:
        raise CheckpointError(f"{file.path}: {error_line(error)}") from error
    settings = TokenizerSettings(
        bos_token=bos[0] if bos else "",
        bos_token_id=bos[1] if bos else None,
        eos_token=eos[0] if eos else "",
        eos_token_ids=eos_token_ids_from_gguf(file),
        chat_template=file.get("tokenizer.chat_template"),
    )
    return TokenizerFiles(tokenizer_json, settings)


def _gguf_byte_level(file: GGUFFile, pieces: list[str], kinds: list[PieceKind], bos: tuple[str, int] | None) -> str:
    name = file.get("tokenizer.ggml.pre", "default")
    if name not in BYTE_LEVEL_RULES:
        raise ValueError(f"pre-tokenizer {name!r} is not supported; supported are {', '.join(BYTE_LEVEL_RULES)}")
    rule = BYTE_LEVEL_RULES[name]
    merges = []
    for merge in file.get("tokenizer.ggml.merges", []):
        left, _, right = str(merge).partition(" ")
        merges.append((left, right))
    adds_bos = file.get("tokenizer.ggml.add_bos_token", rule.adds_bos)
    return byte_level_tokenizer(pieces, kinds, merges, rule, bos if adds_bos else None)


def _gguf_kinds(file: GGUFFile, num_pieces: int) -> list[PieceKind]:
    numbers = file.get("tokenizer.ggml.token_type", [1] * num_pieces)
    if len(numbers) != num_pieces or not set(numbers) <= set(_GGUF_KINDS):
        raise CheckpointError(f"{file.path}: token_type does not fit the {num_pieces} tokens: fetch the file again")
    return [_GGUF_KINDS[number] for number in numbers]


def _gguf_token(file: GGUFFile, pieces: list[str], key: str) -> tuple[str, int] | None:
    token_id = file.get(f"tokenizer.ggml.{key}_token_id")
    if token_id is None:
        return None
    if not 0 <= token_id < len(pieces):
        raise CheckpointError(f"{file.path}: {key}_token_id={token_id} is outside the vocabulary of {len(pieces)}")
    return pieces[token_id], int(token_id)
