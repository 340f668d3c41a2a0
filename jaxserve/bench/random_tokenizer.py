"""A tokenizer and a chat template for engines with random weights, so that they can be served over HTTP."""

from __future__ import annotations

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.checkpoint.tokenizer_files import TokenizerFiles, TokenizerSettings
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer

_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
_BYTES = 256


def random_tokenizer(vocab_size: int) -> Tokenizer:
    """One token for each byte, and short made-up words for the other ids: text of the usual length for each token.

    Raises:
        ValueError: fewer ids than bytes.
    """
    if vocab_size < _BYTES:
        raise ValueError(f"{vocab_size=} must be at least {_BYTES}: text needs a token for each byte")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    # GPT-2's way of writing bytes as printable characters, which the ByteLevel pre-tokenizer speaks.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(letter for letter in alphabet if ord(letter) > 255)
    vocabulary = {chr(byte) if byte in printable else next(spare): byte for byte in range(_BYTES)}
    space = next(text for text, byte in vocabulary.items() if byte == ord(" "))
    for token in range(_BYTES, vocab_size):
        vocabulary[space + _word(token)] = token
    backend = BackendTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    return Tokenizer(TokenizerFiles(backend.to_str(), TokenizerSettings(eos_token="", eos_token_ids=())))


def plain_template() -> ChatTemplate:
    """Messages one below the other."""
    return ChatTemplate(_TEMPLATE, bos_token="", eos_token="")


def _word(number: int) -> str:
    """A different pronounceable word for each number."""
    letters = ""
    while number:
        number, vowel = divmod(number, 5)
        number, consonant = divmod(number, 20)
        letters += "bcdfghjklmnpqrstvwxz"[consonant] + "aeiou"[vowel]
    return letters
