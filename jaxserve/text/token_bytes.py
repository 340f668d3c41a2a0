"""From a token's spelling in the vocabulary to the bytes it stands for, as `tokenizer.json` says under `decoder`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class DecodingScheme:
    """How tokens become text.

    Attributes:
        kind: "byte_level": each character of a spelling is one byte (GPT-2's table), and the bytes of all tokens
            together are read as UTF-8. "byte_fallback": a spelling is text, except `<0xE9>`, which is one byte; bytes
            are read as UTF-8 one run at a time.
        replaced: the character that stands for a space in spellings (SentencePiece's "▁"), or "".
        stripped_spaces: how many leading spaces the decoder drops from the text as a whole.
    """

    kind: Literal["byte_level", "byte_fallback"]
    replaced: str = ""
    stripped_spaces: int = 0

    def byte_value(self, token: str) -> int | None:
        """The byte that a byte-fallback token stands for, or None for a token that is text."""
        match = _BYTE_TOKEN.fullmatch(token) if self.kind == "byte_fallback" else None
        return int(match[1], 16) if match else None

    def token_bytes(self, token: str) -> bytes:
        """The bytes of one token, before leading spaces are dropped from the text as a whole."""
        if self.kind == "byte_level":
            if all(character in _BYTE_OF_CHARACTER for character in token):
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            return token.encode("utf-8", "replace")  # an added token, spelt as it is
        byte = self.byte_value(token)
        if byte is not None:
            return bytes([byte])
        return (token.replace(self.replaced, " ") if self.replaced else token).encode("utf-8", "replace")


def scheme_from_decoder(decoder: dict[str, Any] | None) -> DecodingScheme:
    """Read the scheme off the `decoder` section of a `tokenizer.json`.

    Raises:
        ValueError: for a decoder of another kind than those of the Llama family.
    """
    steps = decoder.get("decoders", []) if decoder and decoder.get("type") == "Sequence" else [decoder or {}]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return DecodingScheme("byte_level")
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        replaced = steps[0].get("pattern", {}).get("String")
        strip = steps[3] if len(steps) > 3 else {"content": " ", "start": 0, "stop": 0}
        if replaced and steps[0].get("content") == " " and strip.get("content") == " " and strip.get("stop") == 0:
            return DecodingScheme("byte_fallback", replaced, int(strip.get("start", 0)))
    raise ValueError(f"tokenizer.json: decoder {kinds} is not supported, only ByteLevel and SentencePiece's")


def byte_characters() -> dict[int, str]:
    """GPT-2's table: the printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}


_BYTE_OF_CHARACTER = {character: byte for byte, character in byte_characters().items()}
