"""Make tests/goldens/tokenizers/: small vocabularies as `tokenizer.model`, and the ids that transformers gives with them.

The tests that read them need none of what this script needs:

    pip install torch transformers sentencepiece protobuf tiktoken
    python scripts/make_tokenizer_goldens.py

Each folder has a `tokenizer.model`, a `tokenizer_config.json`, and `ids.json`: for each text its ids, and what they are
decoded to. `sentencepiece_*` is one BPE with byte fallback under several settings of the prefix space, and one with its
tokens beyond the vocabulary in files of their own, as older versions of transformers wrote them; `tiktoken` a byte-level
vocabulary with Llama 3's special tokens. Of each kind one also has `as_json`: the same tokenizer as transformers saves it.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import golden_texts
import sentencepiece
import tokenizers
import transformers  # pyright: ignore[reportMissingImports]
from transformers.convert_slow_tokenizer import TikTokenConverter  # pyright: ignore[reportMissingImports]

FOLDER = Path(__file__).parent.parent / "tests" / "goldens" / "tokenizers"
TEXTS = (
    *golden_texts.STRINGS,
    "hello<mark>world", "hello<|user|>world", "a<|user|> b <mark> c", "<s>twice</s> end", "▁ itself ▁▁", "<0x41> is text",
)  # fmt: skip
ADDED_TOKENS = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|user|>": 500, "<tool>": 501, "two words": 502, "<|pad|>": 503}
TEXTS_WITH_ADDED_TOKENS = (
    "call <tool> now", "call<tool>now", "<tool>", "<tool> <tool>", " <tool>", "two words here", "in two words",
    "two  words", "the two wordsmiths", "<|user|><tool> <|user|>", "<|pad|>a <|pad|>",
)  # fmt: skip
LLAMA3_TOKENS = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
]  # fmt: skip
PREFIX_SPACES: dict[str, dict[str, Any]] = {
    "sentencepiece_first": {"legacy": False},
    "sentencepiece_always": {"legacy": True},
    "sentencepiece_never": {"legacy": False, "add_prefix_space": False},
    "sentencepiece_unset": {},
}


def write_ids(tokenizer: Any, texts: tuple[str, ...], path: Path) -> None:
    entries = []
    for text in texts:
        ids = tokenizer.encode(text)
        entries.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids, clean_up_tokenization_spaces=False)})
    path.write_text(json.dumps(entries, indent=0) + "\n")


def write_json(tokenizer: Any, folder: Path) -> None:
    """As transformers saves it."""
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        if file.name not in ("tokenizer.json", "tokenizer_config.json"):
            file.unlink()


def make_sentencepiece() -> bytes:
    lines = [line for text in golden_texts.PROMPTS for line in text.split("\n") if line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=500, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, user_defined_symbols=["<mark>"],
        control_symbols=["<pad>"], split_digits=True, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def make_sentencepiece_folders() -> None:
    model = make_sentencepiece()
    user_token = {"content": "<|user|>", "special": True, "normalized": False}
    for name, settings in PREFIX_SPACES.items():
        folder = make_sentencepiece_folder(name, model, added_tokens_decoder={"500": user_token}, **settings)
        tokenizer = loaded(folder)
        write_ids(tokenizer, TEXTS, folder / "ids.json")
        if name == "sentencepiece_always":
            write_json(tokenizer, folder / "as_json")
    folder = make_sentencepiece_folder("sentencepiece_added_tokens", model, legacy=False)
    (folder / "added_tokens.json").write_text(json.dumps(ADDED_TOKENS, indent=1) + "\n")
    named = {"additional_special_tokens": ["<|user|>"], "pad_token": {"content": "<|pad|>", "normalized": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(named, indent=1) + "\n")
    write_ids(loaded(folder), (*TEXTS, *TEXTS_WITH_ADDED_TOKENS), folder / "ids.json")


def make_sentencepiece_folder(name: str, model: bytes, **settings: Any) -> Path:
    folder = FOLDER / name
    folder.mkdir(parents=True)
    (folder / "tokenizer.model").write_bytes(model)
    config = {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "add_bos_token": True, **settings,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


def loaded(folder: Path) -> Any:
    """The tokenizer that transformers makes of the files."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        Path(copy, "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
        return transformers.AutoTokenizer.from_pretrained(copy)


def make_tiktoken_folder() -> None:
    folder = FOLDER / "tiktoken"
    folder.mkdir(parents=True)
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)  # pyright: ignore
    trained.train_from_iterator([*golden_texts.PROMPTS, *golden_texts.STRINGS], trainer)
    by_id = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    byte_of = {character: byte for byte, character in _byte_characters().items()}
    lines = [f"{base64.b64encode(bytes(byte_of[c] for c in piece)).decode()} {rank}\n" for piece, rank in by_id]
    (folder / "tokenizer.model").write_text("".join(lines))
    (folder / "tokenizer_config.json").write_text("{}\n")
    special = [*LLAMA3_TOKENS, *(f"<|reserved_special_token_{number}|>" for number in range(3, 248))]
    converter = TikTokenConverter(str(folder / "tokenizer.model"), extra_special_tokens=special)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=converter.converted())
    texts = (*TEXTS, "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>", "<|reserved_special_token_247|>")
    write_ids(tokenizer, texts, folder / "ids.json")
    write_json(tokenizer, folder / "as_json")


def _byte_characters() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    make_sentencepiece_folders()
    make_tiktoken_folder()


if __name__ == "__main__":
    main()
