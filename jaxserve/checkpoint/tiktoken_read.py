"""Reads tiktoken's `tokenizer.model` (Llama 3): lines of a token's bytes in base64 and its rank."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.checkpoint.added_tokens import added_tokens
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tokenizer_build import BYTE_LEVEL_RULES, PieceKind, byte_level_tokenizer
from jaxserve.checkpoint.tokenizer_files import error_line, read_bytes

BEGIN_OF_TEXT, END_OF_TEXT = "<|begin_of_text|>", "<|end_of_text|>"
END_OF_MESSAGE, END_OF_TURN = "<|eom_id|>", "<|eot_id|>"
_NUM_SPECIAL = 256
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\s")


def is_tiktoken(path: Path) -> bool:
    """Whether the file looks like tiktoken's, and not like SentencePiece's, which has the same name."""
    try:
        with path.open("rb") as file:
            return _LINE.match(file.read(1024)) is not None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error_line(error)}") from error


def llama3_special_tokens() -> list[str]:
    """The tokens that follow Llama 3's vocabulary, in the order of their ids, by their names as of Llama 3.1."""
    named = [
        BEGIN_OF_TEXT, END_OF_TEXT, "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
        "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
        END_OF_MESSAGE, END_OF_TURN, "<|python_tag|>",
    ]  # fmt: skip
    return [*named, *(f"<|reserved_special_token_{number}|>" for number in range(3, _NUM_SPECIAL - len(named) + 3))]


def read_tiktoken(path: Path, config: Mapping[str, Any]) -> str:
    """The `tokenizer.json` of a tiktoken vocabulary, with Llama 3's rule for cutting text.

    Args:
        config: what tokenizer_config.json says. Without `added_tokens_decoder` the special tokens are Llama 3's.

    Raises:
        CheckpointError: if the file is damaged.
    """
    ranked = _read_ranks(path)
    pieces = [_spelt(token) for token in ranked]
    kinds: list[PieceKind] = ["normal"] * len(pieces)
    if "added_tokens_decoder" in config:
        added = added_tokens(config, len(pieces), path)
    else:
        added = [tokenizers.AddedToken(token, special=True, normalized=False) for token in llama3_special_tokens()]
    bos = str(_content(config.get("bos_token")) or BEGIN_OF_TEXT)
    bos_id = next((len(pieces) + index for index, token in enumerate(added) if token.content == bos), None)
    adds_bos = config.get("add_bos_token", True) and bos_id is not None
    try:
        return byte_level_tokenizer(
            pieces,
            kinds,
            _merges(ranked),
            BYTE_LEVEL_RULES["llama3"],
            (bos, bos_id) if adds_bos and bos_id is not None else None,
            added,
        )
    except ValueError as error:
        raise CheckpointError(f"{path}: {error_line(error)}") from error


def _read_ranks(path: Path) -> list[bytes]:
    """The tokens, in the order of their ranks."""
    tokens: list[bytes] = []
    for number, line in enumerate(read_bytes(path).splitlines()):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            if int(rank) != number:
                raise ValueError(f"rank {int(rank)} follows {number - 1}")
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(
                f"{path}: line {number + 1} is no token and its rank ({error_line(error)}): fetch the file again"
            ) from error
        tokens.append(token)
    return tokens


def _merges(ranked: list[bytes]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, lowest rank first: the order in which tiktoken would join them."""
    ranks = {token: rank for rank, token in enumerate(ranked)}
    merges: list[tuple[str, str]] = []
    for token in ranked:
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        whole = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        whole.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(_spelt(left), _spelt(right)) for left, right in whole]
    return merges


def _spelt(token: bytes) -> str:
    return "".join(_CHARACTERS[byte] for byte in token)


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _byte_characters() -> tuple[str, ...]:
    """GPT-2's table: the printable character that stands for each byte in byte-level vocabularies."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(spare)) for byte in range(256))


_CHARACTERS = _byte_characters()
