"""Tokenizers from every form they come in give the ids of their own reference."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.gguf_source import GGUFFile
from jaxserve.checkpoint.gguf_tokenizer import read_gguf_tokenizer
from jaxserve.checkpoint.manifest import TOKENIZER_FOLDER, read_manifest
from jaxserve.checkpoint.tokenizer_build import (
    BYTE_LEVEL_RULES,
    PieceKind,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)
from jaxserve.checkpoint.tokenizer_files import TokenizerFiles, TokenizerSettings
from jaxserve.checkpoint.tokenizer_read import read_hf_tokenizer, read_model_file
from jaxserve.progress import NoProgress
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoint.files import byte_tokenizer_metadata, write_gguf
from tests.tiny_model import TINY_CONFIG, random_weights, write_tiny_llama

GOLDENS = Path(__file__).parents[1] / "goldens" / "smollm2_tokenizer.json"
TOKENIZERS = GOLDENS.parent / "tokenizers"
TEXTS = [
    "", " ", "hello world", " hello", "  two  spaces ", "trailing ", "tabs\tand\nlines\n\n", "digits 12345 and 3.14",
    "é \U0001f336 한국어 unseen \x00", "hello<mark>world", "▁ itself", "aaaaaaaaaa",
]  # fmt: skip


# --- the default model


@pytest.fixture(scope="module")
def goldens() -> dict[str, Any]:
    return json.loads(GOLDENS.read_text())


@pytest.fixture(scope="module")
def default_tokenizer(default_model_dir: Path) -> Tokenizer:
    return load_tokenizer(default_model_dir / TOKENIZER_FOLDER)


def test_default_models_ids_equal_transformers(default_tokenizer: Tokenizer, goldens: dict[str, Any]) -> None:
    for case in goldens["strings"]:
        text, ids = case["text"], case["ids"]
        plain = case.get("ids_without_special_tokens", ids)
        assert default_tokenizer.encode(text) == ids, text
        assert default_tokenizer.encode(text, allow_special_tokens=False) == plain, text
        assert default_tokenizer.decode(ids, skip_special_tokens=False) == case["decoded"], text


def test_default_models_chat_equals_transformers(default_tokenizer: Tokenizer, goldens: dict[str, Any]) -> None:
    tokenizer = default_tokenizer
    assert tokenizer.chat_template is not None
    chat = ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    for case in goldens["conversations"]:
        options = {"add_generation_prompt": case["add_generation_prompt"]}
        assert chat.render(case["messages"], **options) == case["text"]
        as_is = chat.encode(tokenizer, case["messages"], allow_special_tokens_in_content=True, **options)
        assert as_is == case["ids"]
        if not any(token in message["content"] for token in tokenizer.special_tokens for message in case["messages"]):
            assert chat.encode(tokenizer, case["messages"], **options) == case["ids"]


def test_facts_of_the_default_model(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.vocab_size == 49152
    assert (default_tokenizer.bos_token, default_tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert default_tokenizer.eos_token_ids == (2,)
    assert default_tokenizer.special_token_ids == frozenset(range(17))


# --- SentencePiece


@pytest.fixture(scope="module")
def sentencepiece_model() -> bytes:
    """A BPE with byte fallback, trained on a few lines; `<mark>` is a user's token, `<pad>` a control token."""
    lines = ["hello world the world says hello", "two spaces and trailing words", "digits 12345 tabs lines 3.14"] * 4
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=340, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, user_defined_symbols=["<mark>"],
        control_symbols=["<pad>"], split_digits=True, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def from_folder(tmp_path: Path, model: bytes, **config: Any) -> Tokenizer:
    folder = write_tiny_llama(tmp_path / "source")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(model)
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, **config}))
    files = read_hf_tokenizer(folder)
    assert files is not None
    return Tokenizer(files)


def from_gguf(tmp_path: Path, model: bytes) -> Tokenizer:
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = reference.vocab_size()
    kinds = [
        6 if reference.is_byte(i) else 3 if reference.is_control(i) else 2 if reference.is_unknown(i) else 1
        for i in range(size)
    ]
    kinds[reference.piece_to_id("<mark>")] = 4
    metadata = {
        **dict.fromkeys(byte_tokenizer_metadata()),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [reference.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [reference.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    path = write_gguf(tmp_path / "model.gguf", random_weights(TINY_CONFIG, 0), metadata=metadata)
    with GGUFFile(path) as file:
        files = read_gguf_tokenizer(file)
    assert files is not None
    return Tokenizer(files)


def as_meta_has_it(tmp_path: Path, model: bytes) -> Tokenizer:
    """A `tokenizer.model` that no tokenizer_config.json says more about."""
    (tmp_path / "tokenizer.model").write_bytes(model)
    settings = TokenizerSettings(bos_token_id=1, eos_token_ids=(2,))
    return Tokenizer(TokenizerFiles(read_model_file(tmp_path / "tokenizer.model", None), settings))


@pytest.mark.parametrize("make", [as_meta_has_it, from_gguf])
def test_sentencepiece_ids_are_its_own(tmp_path: Path, sentencepiece_model: bytes, make: Any) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    tokenizer = make(tmp_path, sentencepiece_model)
    for text in TEXTS:
        if "<mark>" in text:
            continue  # a space before what follows a user's token: the two differ there by design
        expected = reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.encode(text) == [1, *expected], text
        assert tokenizer.decode(expected) == reference.decode(expected), text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids[-1]) == (1, 2)
    assert tokenizer.token_id("<mark>") in tokenizer.encode("hello<mark>world")
    assert {"<s>", "</s>", "<unk>", "<pad>"} == set(tokenizer.special_tokens)


def test_one_vocabulary_gives_the_same_ids_in_all_three_forms(tmp_path: Path) -> None:
    """As `tokenizer.model`, as transformers' `tokenizer.json`, and in a GGUF.

    Left out is what a GGUF keeps otherwise: the tokens of users, and the space that SentencePiece puts first, before a text
    that begins with one too.
    """
    folder = TOKENIZERS / "sentencepiece_always"
    files = [read_hf_tokenizer(folder), read_hf_tokenizer(folder / "as_json")]
    forms = [Tokenizer(each) for each in files if each is not None]
    forms.append(from_gguf(tmp_path, (folder / "tokenizer.model").read_bytes()))
    assert len(forms) == 3
    for case in json.loads((folder / "ids.json").read_text()):
        if not any(token in case["text"] for token in ("<mark>", "<|user|>", "<s>")) and case["text"][:1] not in (
            " ",
            "▁",
        ):
            assert [form.encode(case["text"]) for form in forms] == [case["ids"]] * 3, case["text"]


def test_tokens_beyond_a_sentencepiece_vocabulary(tmp_path: Path, sentencepiece_model: bytes) -> None:
    added = {"340": {"content": "<|user|>", "special": True}, "341": {"content": "<tool>", "special": False}}
    tokenizer = from_folder(tmp_path, sentencepiece_model, added_tokens_decoder=added, add_bos_token=False)
    assert (tokenizer.token_id("<|user|>"), tokenizer.token_id("<tool>")) == (340, 341)
    assert 340 in tokenizer.special_token_ids
    assert 341 not in tokenizer.special_token_ids
    assert tokenizer.encode("<|user|>") == [340]


def test_gap_before_added_tokens_is_refused(tmp_path: Path, sentencepiece_model: bytes) -> None:
    with pytest.raises(CheckpointError, match="gaps"):
        from_folder(tmp_path, sentencepiece_model, added_tokens_decoder={"345": {"content": "<|user|>"}})


@pytest.mark.parametrize(
    ("options", "named"),
    [({"model_type": "unigram"}, "BPE"), ({"normalization_rule_name": "nmt_nfkc"}, "normalization")],
)
def test_sentencepiece_models_of_other_kinds_are_refused(tmp_path: Path, options: dict[str, str], named: str) -> None:
    model = io.BytesIO()
    settings = {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world"] * 4), model_writer=model, vocab_size=20, minloglevel=2,
        hard_vocab_limit=False, **settings,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=rf"tokenizer\.model.*{named}"):
        from_folder(tmp_path, model.getvalue())


def test_sentencepiece_model_with_a_token_that_is_no_text(tmp_path: Path, sentencepiece_model: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is damaged \(token 1 is no text\)"):
        from_folder(tmp_path, sentencepiece_model.replace(b"<s>", b"<\x9d>", 1))


def test_damaged_sentencepiece_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is no SentencePiece model"):
        from_folder(tmp_path, b"\xff" * 100)


# --- byte-level vocabularies of GGUF files


def pieces_of(pre: str, text: str) -> list[str]:
    """A text cut by a rule alone: the vocabulary holds bytes and every way to join neighbours of one kind."""
    data = byte_tokenizer_metadata()
    digits = [str(number) for number in range(10, 1000)]
    merges = [(number[:-1], number[-1]) for number in digits]
    pieces = [*data["tokenizer.ggml.tokens"], *digits, "ĊĊ"]
    kinds = [*("normal" if kind == 1 else "control" for kind in data["tokenizer.ggml.token_type"])]
    kinds += ["normal"] * (len(digits) + 1)
    rule = BYTE_LEVEL_RULES[pre]
    tokenizer = Tokenizer(
        TokenizerFiles(byte_level_tokenizer(pieces, kinds, [*merges, ("Ċ", "Ċ")], rule, None), TokenizerSettings())
    )
    return [tokenizer.token(token_id) or "" for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("tekken", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["12", "34"]),
    ],
)
def test_how_the_rules_cut_digits(pre: str, expected: list[str]) -> None:
    assert pieces_of(pre, "1234") == expected


def test_rule_that_composes_characters() -> None:
    assert pieces_of("qwen2", "e\u0301") == pieces_of("qwen2", "\u00e9")
    assert pieces_of("smollm", "e\u0301") != pieces_of("smollm", "\u00e9")


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"tokenizer.ggml.pre": "mystery"}, "'mystery'.*smollm"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.merges": ["x yz"]}, "merge 'x'"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "outside the vocabulary"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id=1000000"),
    ],
)
def test_gguf_tokenizer_that_cannot_be(tmp_path: Path, metadata: dict[str, Any], named: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_weights(TINY_CONFIG, 0), metadata=metadata)
    with GGUFFile(path) as file, pytest.raises(CheckpointError, match=rf"model\.gguf.*{named}"):
        read_gguf_tokenizer(file)


def test_gguf_adds_bos_where_it_says_so(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.add_bos_token": True}
    path = write_gguf(tmp_path / "model.gguf", random_weights(TINY_CONFIG, 0), metadata=metadata)
    with GGUFFile(path) as file:
        files = read_gguf_tokenizer(file)
    assert files is not None
    tokenizer = Tokenizer(files)
    assert tokenizer.encode("a")[0] == 257
    assert 257 not in tokenizer.encode("a", add_special_tokens=False)


@pytest.mark.parametrize("bos", ["<s>", "$A", "$B", "$", "$1", "$A:0", "x:1", ":", "<begin of text>", " ", "BOS"])
@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_bos_is_put_first_however_it_is_spelt(kind: str, bos: str) -> None:
    pieces = ["q", bos, "r"]
    kinds: list[PieceKind] = ["normal", "control", "normal"]
    if kind == "byte level":
        text = byte_level_tokenizer(pieces, kinds, [], BYTE_LEVEL_RULES["llama3"], (bos, 1))
    else:
        text = sentencepiece_tokenizer(pieces, kinds, [0.0] * 3, prefix_space="never", bos=(bos, 1))
    tokenizer = Tokenizer(TokenizerFiles(text, TokenizerSettings()))
    assert tokenizer.encode("qr") == [1, 0, 2]
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("qr", add_special_tokens=False) == [0, 2]


# --- chat templates


@pytest.mark.parametrize(
    ("entry", "file", "expected"),
    [
        ("{{ a }}", None, "{{ a }}"),
        ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ b }}"}], None, "{{ b }}"),
        ("{{ a }}", "{{ c }}", "{{ c }}"),
        (None, None, None),
    ],
    ids=["text", "named", "file", "none"],
)
def test_where_the_chat_template_comes_from(tmp_path: Path, entry: Any, file: str | None, expected: str | None) -> None:
    folder = write_tiny_llama(tmp_path / "source", chat_template=entry)
    if file is not None:
        (folder / "chat_template.jinja").write_text(file)
    files = read_hf_tokenizer(folder)
    assert files is not None
    assert files.settings.chat_template == expected


def test_ends_of_lines_of_a_template_are_those_that_transformers_reads(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "source")
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\r\nthen\rmore\n")
    files = read_hf_tokenizer(folder)
    assert files is not None and files.settings.chat_template == "{{ messages }}\nthen\nmore\n"


@pytest.mark.parametrize("form", ["huggingface", "gguf"])
def test_template_stops_and_special_tokens_travel_with_a_converted_checkpoint(tmp_path: Path, form: str) -> None:
    if form == "huggingface":
        source = write_tiny_llama(tmp_path / "source", chat_template="{{ messages }}")
        (source / "generation_config.json").write_text('{"eos_token_id": [258, 256]}')
    else:
        metadata = {"tokenizer.ggml.eot_token_id": 256}
        source = write_gguf(tmp_path / "model.gguf", random_weights(TINY_CONFIG, 0), metadata=metadata)
    folder = convert(source, tmp_path / "converted", progress=NoProgress())
    tokenizer = load_tokenizer(folder / TOKENIZER_FOLDER)
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.eos_token_ids == (258, 256) == read_manifest(folder).model_config.eos_token_ids
    assert tokenizer.special_token_ids == {256, 257, 258}
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
