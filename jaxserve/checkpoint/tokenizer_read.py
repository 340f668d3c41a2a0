"""Reads a tokenizer from wherever a model brings it: `tokenizer.json`, `tokenizer.model`, or a GGUF's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece.sentencepiece_model_pb2 as sentencepiece_model
import tokenizers
from google.protobuf.message import DecodeError

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.gguf_config import eos_token_ids_from_gguf
from jaxserve.checkpoint.gguf_source import GGUFFile
from jaxserve.checkpoint.hf_config import token_ids_from
from jaxserve.checkpoint.safetensors_source import checked_file
from jaxserve.checkpoint.tokenizer_build import (
    BYTE_LEVEL_RULES,
    PieceKind,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)
from jaxserve.checkpoint.tokenizer_files import (
    TokenizerFiles,
    TokenizerSettings,
    error_line,
    read_json,
    read_text,
)

_GGUF_KINDS: dict[int, PieceKind] = {1: "normal", 2: "unknown", 3: "control", 4: "user", 5: "unused", 6: "byte"}


def read_hf_tokenizer(folder: Path) -> TokenizerFiles | None:
    """The tokenizer of a Hugging Face folder, or None if it has none.

    The ids that end an answer are the union of config, generation config and tokenizer.

    Raises:
        CheckpointError: if a file is damaged, or a link that leaves the folder.
    """
    config = _json_if_there(folder, "tokenizer_config.json")
    if (folder / "tokenizer.json").exists():
        tokenizer_json = read_text(checked_file(folder, "tokenizer.json"))
    elif (folder / "tokenizer.model").exists():
        tokenizer_json = _read_sentencepiece(checked_file(folder, "tokenizer.model"), config)
    else:
        return None
    token_map = _json_if_there(folder, "special_tokens_map.json")
    bos_token, eos_token = (_token_text(config, token_map, key) for key in ("bos_token", "eos_token"))
    try:
        backend = tokenizers.Tokenizer.from_str(tokenizer_json)
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
                adds_prefix_space=bool(file.get("tokenizer.ggml.add_space_prefix", True)),
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


def _read_sentencepiece(path: Path, config: Mapping[str, Any]) -> str:
    model = sentencepiece_model.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        model.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise CheckpointError(f"{path} is no SentencePiece model ({error_line(error)}): fetch it again") from error
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise CheckpointError(f"{path}: SentencePiece models other than BPE are not supported: use a tokenizer.json")
    if model.normalizer_spec.precompiled_charsmap or model.normalizer_spec.remove_extra_whitespaces:
        raise CheckpointError(f"{path}: SentencePiece normalization is not supported: use a tokenizer.json")
    names = {1: "normal", 2: "unknown", 3: "control", 4: "user", 5: "unused", 6: "byte"}
    pieces = [piece.piece for piece in model.pieces]
    bos_id = model.trainer_spec.bos_id
    adds_bos = config.get("add_bos_token", True) and 0 <= bos_id < len(pieces)
    try:
        return sentencepiece_tokenizer(
            pieces,
            [names[piece.type] for piece in model.pieces],  # pyright: ignore[reportArgumentType]
            [piece.score for piece in model.pieces],
            adds_prefix_space=model.normalizer_spec.add_dummy_prefix,
            bos=(pieces[bos_id], bos_id) if adds_bos else None,
            added=_added_tokens(config, len(pieces), path),
        )
    except ValueError as error:
        raise CheckpointError(f"{path}: {error_line(error)}") from error


def _added_tokens(config: Mapping[str, Any], num_pieces: int, path: Path) -> list[tokenizers.AddedToken]:
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


def _json_if_there(folder: Path, name: str) -> dict[str, Any]:
    return read_json(checked_file(folder, name)) if (folder / name).exists() else {}


def _token_text(config: Mapping[str, Any], token_map: Mapping[str, Any], key: str) -> str:
    token = config.get(key) or token_map.get(key) or ""
    return token.get("content", "") if isinstance(token, dict) else str(token)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own counts before the config's entry, which may be one template or a list of named ones."""
    if (folder / "chat_template.jinja").exists():
        return read_text(checked_file(folder, "chat_template.jinja"))
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template must be a text, or named texts")
    return template
