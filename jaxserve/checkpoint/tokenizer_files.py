"""The tokenizer as it travels with a converted checkpoint: `tokenizer.json` and our own small settings file."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.json_fields import from_json

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "jaxserve_tokenizer.json"
_LARGEST_FILE = 1 << 28  # bytes of a config or tokenizer; the largest vocabularies take some 30 MB


@dataclass(frozen=True)
class TokenizerSettings:
    """What `tokenizer.json` does not say.

    Attributes:
        bos_token, eos_token: texts that chat templates may print; empty where the model has none.
        eos_token_ids: every id that ends an answer: the union of config, generation config and tokenizer.
        chat_template: Jinja source, or None where the model has none.
    """

    bos_token: str = ""
    bos_token_id: int | None = None
    eos_token: str = ""
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None


@dataclass(frozen=True)
class TokenizerFiles:
    """A whole tokenizer: the text of its `tokenizer.json`, and the settings beside it."""

    tokenizer_json: str
    settings: TokenizerSettings

    def with_eos_token_ids(self, extra: tuple[int, ...]) -> TokenizerFiles:
        """The same with `extra` joined to the ids that end an answer."""
        joined = tuple(dict.fromkeys((*self.settings.eos_token_ids, *extra)))
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, eos_token_ids=joined))


def write_tokenizer(files: TokenizerFiles, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER_FILE).write_text(files.tokenizer_json, encoding="utf-8")
    settings = json.dumps(dataclasses.asdict(files.settings), ensure_ascii=False, indent=2)
    (folder / SETTINGS_FILE).write_text(settings + "\n", encoding="utf-8")


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read what `write_tokenizer` wrote.

    Raises:
        CheckpointError: if a file is missing or is not what it should be.
    """
    path = folder / SETTINGS_FILE
    try:
        settings = from_json(TokenizerSettings, read_json(path, "convert the model again"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}): convert the model again") from error
    return TokenizerFiles(read_text(folder / TOKENIZER_FILE), settings)


def read_text(path: Path) -> str:
    """A UTF-8 file's text, with "\\n" at the end of lines; any fault is a `CheckpointError` that names the file."""
    content = read_bytes(path)
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"cannot read {path}: {error_line(error)}") from error


def read_bytes(path: Path) -> bytes:
    """A small file's content; any fault, or a size that no such file has, is a `CheckpointError` that names the file."""
    try:
        size = path.stat().st_size
        if size > _LARGEST_FILE:  # it may take no room on the disk and all of the memory
            raise CheckpointError(f"{path} has {size} bytes, and at most {_LARGEST_FILE} are read of such a file")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error_line(error)}") from error


def read_json(path: Path, remedy: str = "fetch the file again") -> dict[str, Any]:
    """A file that holds one JSON object; any fault is a `CheckpointError` that names the file.

    Args:
        remedy: for what is no JSON object.
    """
    try:
        value = json.loads(read_text(path))
        json.dumps(
            value, ensure_ascii=False
        ).encode()  # raises for halves of characters, which no file can be written with
    except (ValueError, RecursionError) as error:  # numbers of too many digits are a ValueError too
        raise CheckpointError(f"{path} is not valid JSON ({error_line(error)}): {remedy}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}: {remedy}")
    return value


def check_post_processor(step: Any) -> None:
    """Refuse templates that the library takes, and with which it ends in a panic at every text.

    Args:
        step: the "post_processor" of a tokenizer.json that the library has taken.

    Raises:
        ValueError: if its template for one text cannot be filled in.
    """
    if not isinstance(step, dict):
        return
    for inner in step.get("processors", ()):
        check_post_processor(inner)
    if step.get("type") != "TemplateProcessing":
        return
    for piece in step["single"]:
        if piece.get("Sequence", {}).get("id") == "B":
            raise ValueError("the template in its post_processor has a place for a second text")
        token = piece.get("SpecialToken", {}).get("id")
        if token is not None and token not in step["special_tokens"]:
            raise ValueError(f"the template in its post_processor has the special token {token!r}, and no ids of it")


def error_line(error: BaseException) -> str:
    """An exception's text on one line, without the path that the operating system repeats."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
