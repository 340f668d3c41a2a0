"""Small tokenizers made on the spot: a byte-level one in the manner of Llama 3, and one in SentencePiece's."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxserve.checkpoint.tokenizer_files import TokenizerFiles, TokenizerSettings
from jaxserve.text.token_bytes import byte_characters
from jaxserve.text.tokenizer import Tokenizer

CONTROL_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def byte_level_tokenizer(*, control_tokens: tuple[str, ...] = CONTROL_TOKENS) -> Tokenizer:
    """All 256 bytes, a few merges (two newlines among them), an added token that is no control token, and those."""
    characters = list(byte_characters().values())
    merges = [("Ġ", "y"), ("e", "s"), ("Ġy", "es"), ("Ċ", "Ċ"), ("h", "e"), ("l", "l"), ("he", "ll")]
    vocabulary = characters + [left + right for left, right in merges]
    backend = Backend(models.BPE({token: rank for rank, token in enumerate(vocabulary)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<tool é>", special=False, normalized=False)])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control_tokens])
    settings = TokenizerSettings(bos_token=control_tokens[0], eos_token=control_tokens[-1], chat_template=CHAT_TEMPLATE)
    return Tokenizer(TokenizerFiles(backend.to_str(), settings))


def sentencepiece_tokenizer(*, prefix: str = "legacy") -> Tokenizer:
    """Byte-fallback BPE with "▁" for spaces.

    Args:
        prefix: "legacy": each text between control tokens gets a space before it; "first": only the text at the start.
    """
    merges = [("▁", "x"), ("▁", "l"), ("▁l", "e"), ("▁", "▁")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz\n", "▁x", "▁l", "▁le", "▁▁", "▁leading"]
    backend = Backend(
        models.BPE({piece: rank for rank, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    if prefix == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]])
    return Tokenizer(TokenizerFiles(backend.to_str(), TokenizerSettings(bos_token="<s>", eos_token="</s>")))


def token_ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    """Ids of spellings; KeyError for one that the vocabulary lacks."""
    found = [tokenizer.token_id(token) for token in tokens]
    if None in found:
        raise KeyError(f"not in the vocabulary: {tokens[found.index(None)]!r}")
    return [token_id for token_id in found if token_id is not None]
