"""Text to token ids and back, with the ids of Hugging Face's tokenizer for the same checkpoint."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tokenizer_files import TokenizerFiles, check_post_processor, error_line, read_tokenizer
from jaxserve.text.token_bytes import scheme_from_decoder


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a converted checkpoint.

    Args:
        folder: where `tokenizer.json` and `jaxserve_tokenizer.json` lie.

    Raises:
        CheckpointError: if a file is missing or unusable.
    """
    files = read_tokenizer(folder)
    try:
        return Tokenizer(files)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error_line(error)}") from error


class Tokenizer:
    """Immutable after construction, but for what it remembers; every method may be called from several threads.

    Attributes:
        vocab_size: one more than the largest id (the model may have more rows than that, as padding).
        bos_token, eos_token: texts for chat templates, or "".
        eos_token_ids: every id that ends an answer.
        special_token_ids: control tokens: never shown, and only made from text where that is allowed.
        chat_template: Jinja source or None.
        scheme: how tokens become bytes and text (for `Detokenizer`).
    """

    def __init__(self, files: TokenizerFiles) -> None:
        """Raises ValueError if `tokenizer.json` is malformed, or its template or decoder of a kind that cannot be used."""
        self._json = files.tokenizer_json
        self._backend = _build(self._json)
        self._literal_backends: dict[bool, tokenizers.Tokenizer] = {}
        self._literal_lock = threading.Lock()
        self._bytes_of: dict[int, bytes] = {}  # of tokens that were asked for: log probabilities name 20 for each one
        self._pieces: dict[int, bytes | int | None] = {}  # of tokens that were generated
        data = json.loads(self._json)
        check_post_processor(data.get("post_processor"))
        self.scheme = scheme_from_decoder(data.get("decoder"))
        self.bos_token = files.settings.bos_token
        self.bos_token_id = files.settings.bos_token_id
        self.eos_token = files.settings.eos_token
        self.eos_token_ids = files.settings.eos_token_ids
        self.chat_template = files.settings.chat_template
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: token for token in added.values() if token.special}
        self.special_token_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: add what the checkpoint adds by itself (usually BOS, or nothing).
            allow_special_tokens: text that spells a control token becomes that token, as with Hugging Face; otherwise
                it is encoded as the plain text that it is.
        """
        backend = self._backend if allow_special_tokens else self._literal_backend(continued=False)
        return _encode(backend, text, add_special_tokens=add_special_tokens)

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of plain text that follows a control token: nothing is added, and no control token is made.

        It differs from `encode` only for vocabularies that put a space before the first word of a text alone.
        """
        return _encode(self._literal_backend(continued=True), text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; bytes that are no valid UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The token's spelling in the vocabulary; None for an id that has none (rows that pad the embedding)."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of a spelling, or None."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to the text, control tokens included; b"" for an id without a token."""
        known = self._bytes_of.get(token_id)
        if known is None:
            token = self.token(token_id)
            known = b"" if token is None else self.scheme.token_bytes(token)
            if 0 <= token_id < self.vocab_size:
                self._bytes_of[token_id] = known
        return known

    def piece(self, token_id: int) -> bytes | int | None:
        """What a token brings to a growing text: its bytes, or the byte that it stands for, or nothing at all.

        A single byte that a byte-fallback vocabulary spells `<0xE9>` is an int: a run of them is decoded as one.
        """
        try:
            return self._pieces[token_id]
        except KeyError:
            token = self.token(token_id)
            byte = None if token is None else self.scheme.byte_value(token)
            piece = None if token is None else self.scheme.token_bytes(token) if byte is None else byte
            if 0 <= token_id < self.vocab_size:
                self._pieces[token_id] = piece
            return piece

    def _literal_backend(self, *, continued: bool) -> tokenizers.Tokenizer:
        """A copy that makes no control tokens from text; a copy, since the switch is the object's, not the call's."""
        with self._literal_lock:
            if continued not in self._literal_backends:
                source = _without_first_prefix(self._json) if continued else self._json
                if continued and source == self._json and False in self._literal_backends:
                    self._literal_backends[True] = self._literal_backends[False]
                else:
                    backend = _build(source)
                    backend.encode_special_tokens = True
                    self._literal_backends[continued] = backend
            return self._literal_backends[continued]


def _build(tokenizer_json: str) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        raise ValueError(f"tokenizer.json is not usable ({error_line(error)}): fetch the file again") from error
    backend.no_truncation()  # a training set-up's cut or padding is no business of a server
    backend.no_padding()
    return backend


def _encode(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    # Only the batched call releases the interpreter's lock: a long text must not stop every other thread for seconds.
    return backend.encode_batch([_valid_unicode(text)], add_special_tokens=add_special_tokens)[0].ids


def _without_first_prefix(tokenizer_json: str) -> str:
    """The same tokenizer for text that is not at the start, where only the start gets a prefix space."""
    data = json.loads(tokenizer_json)
    pre_tokenizer = data.get("pre_tokenizer") or {}
    changed = False
    for step in (pre_tokenizer, *pre_tokenizer.get("pretokenizers", ())):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
            changed = True
    return json.dumps(data, ensure_ascii=False) if changed else tokenizer_json


def _valid_unicode(text: str) -> str:
    """Lone surrogates, which JSON can carry and UTF-8 cannot, become U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
