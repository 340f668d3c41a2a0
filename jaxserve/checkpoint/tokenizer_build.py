"""Builds `tokenizer.json` from a bare vocabulary, as files without one hold it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

PieceKind = Literal["normal", "unknown", "control", "user", "unused", "byte"]
# Where a space is put before a text, so that its first word is spelt as any other. "sentencepiece": before every stretch
# between control tokens, as SentencePiece itself does for a text; "always" and "first": before every stretch or the first
# one, but not where there is a space already, as transformers does; "never".
PrefixSpace = Literal["sentencepiece", "always", "first", "never"]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class ByteLevelRule:
    """How a byte-level vocabulary cuts text before merging.

    Attributes:
        pattern: each match is a word; None: GPT-2's own pattern.
        single_digits: each digit stands alone, cut off before the pattern is applied.
        whole_words: a word that is in the vocabulary is taken as it is, whatever the merges say.
        adds_bos: BOS is put first unless the file says otherwise.
        composed: text is brought to Unicode's NFC first.
    """

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    adds_bos: bool = False
    composed: bool = False


# By the names that GGUF files give them under `tokenizer.ggml.pre`.
BYTE_LEVEL_RULES = {
    "default": ByteLevelRule(),
    "gpt-2": ByteLevelRule(),
    "smollm": ByteLevelRule(single_digits=True),
    "llama-bpe": ByteLevelRule(_LLAMA3, whole_words=True, adds_bos=True),
    "llama3": ByteLevelRule(_LLAMA3, whole_words=True, adds_bos=True),
    "llama-v3": ByteLevelRule(_LLAMA3, whole_words=True, adds_bos=True),
    "qwen2": ByteLevelRule(_QWEN2, composed=True),
    "tekken": ByteLevelRule(_TEKKEN, whole_words=True, adds_bos=True),
}


def byte_level_tokenizer(
    pieces: Sequence[str],
    kinds: Sequence[PieceKind],
    merges: Sequence[tuple[str, str]],
    rule: ByteLevelRule,
    bos: tuple[str, int] | None,
    added: Sequence[AddedToken] = (),
) -> str:
    """The `tokenizer.json` of a GPT-2-like vocabulary.

    Args:
        pieces: spellings, in the order of their ids.
        bos: BOS and its id where it is put before every text.
        added: tokens beyond the vocabulary, in the order of their ids, which follow the pieces'.

    Raises:
        ValueError: if a spelling is there twice, or a merge is not of pieces.
    """
    vocabulary = _vocabulary(pieces)
    for left, right in merges:
        if not {left, right, left + right} <= vocabulary.keys():
            raise ValueError(f"merge {left!r} + {right!r} is not of pieces in the vocabulary")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=rule.whole_words))
    if rule.composed:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, pieces, kinds)
    _add_beyond(tokenizer, added)
    _put_first(tokenizer, bos)
    return tokenizer.to_str()


def sentencepiece_tokenizer(
    pieces: Sequence[str],
    kinds: Sequence[PieceKind],
    scores: Sequence[float],
    *,
    prefix_space: PrefixSpace,
    bos: tuple[str, int] | None,
    added: Sequence[AddedToken] = (),
) -> str:
    """The `tokenizer.json` of a SentencePiece BPE vocabulary with byte fallback.

    Args:
        scores: of the pieces: the higher, the earlier it is merged.
        added: tokens beyond the vocabulary, in the order of their ids, which follow the pieces'.

    Raises:
        ValueError: if a spelling is there twice.
    """
    vocabulary = _vocabulary(pieces)
    unknown = next((piece for piece, kind in zip(pieces, kinds, strict=True) if kind == "unknown"), None)
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_from_scores(pieces, kinds, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback="byte" in kinds,
    )
    tokenizer = Tokenizer(model)
    if prefix_space in ("always", "first"):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prefix_space, split=False)
    else:
        spaces = [normalizers.Replace(" ", "▁")]
        prepended = [normalizers.Prepend("▁"), *spaces] if prefix_space == "sentencepiece" else spaces
        tokenizer.normalizer = normalizers.Sequence(prepended)
    strip = [] if prefix_space == "never" else [decoders.Strip(content=" ", left=1, right=0)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_tokens(tokenizer, pieces, kinds)
    _add_beyond(tokenizer, added)
    _put_first(tokenizer, bos)
    return tokenizer.to_str()


def _merges_from_scores(
    pieces: Sequence[str], kinds: Sequence[PieceKind], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best pieces first: the order in which SentencePiece would join them."""
    ranks = {piece: rank for rank, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)) if kind == "normal"}
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, rank in ranks.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ranks and right in ranks:
                merges.append((-scores[rank], rank, ranks[left], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _vocabulary(pieces: Sequence[str]) -> dict[str, int]:
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        twice = next(piece for token_id, piece in enumerate(pieces) if vocabulary[piece] != token_id)
        raise ValueError(f"the vocabulary has the token {twice!r} twice")
    return vocabulary


def _add_tokens(tokenizer: Tokenizer, pieces: Sequence[str], kinds: Sequence[PieceKind]) -> None:
    """Control tokens and the user's own are cut out of a text before anything else happens to it."""
    for piece, kind in zip(pieces, kinds, strict=True):
        if kind in ("control", "unknown"):
            tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False)])
        elif kind == "user":
            tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False)])


def _add_beyond(tokenizer: Tokenizer, added: Sequence[AddedToken]) -> None:
    """Raises ValueError if a token is one already, or empty: it would be passed over, and all after it get lower ids."""
    first = tokenizer.get_vocab_size()
    for token_id, token in enumerate(added, start=first):
        if token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
        if (found := tokenizer.token_to_id(token.content)) != token_id:
            one = "is none" if found is None else f"is the token {found} already"
            raise ValueError(f"the added token {token_id}, {token.content!r}, {one}: give it another text")


def _put_first(tokenizer: Tokenizer, bos: tuple[str, int] | None) -> None:
    if bos is None:
        return
    token, token_id = bos
    # As it is spelt, as other programs expect it, unless the template's syntax would read that as something else.
    name = token if re.fullmatch(r"[^$:\s]+", token) else "BOS"
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportCallIssue]
        single=f"{name}:0 $A:0",
        pair=f"{name}:0 $A:0 {name}:1 $B:1",
        special_tokens=[{"id": name, "ids": [token_id], "tokens": [token]}],
    )
