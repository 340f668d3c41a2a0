"""A model in its own format, opened: its headers read and checked, its weights not yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxserve.checkpoint.assemble import Assembler
from jaxserve.checkpoint.tokenizer_files import TokenizerFiles
from jaxserve.checkpoint.vendor_assemble import VendorAssembler

# What a folder may hold beside a model without anyone missing it in a converted one.
_NOT_WORTH_A_WARNING = ("README", "LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "checklist.chk", ".")


@dataclass(frozen=True)
class OpenModel:
    """What conversion, export and inspection need of a model.

    Attributes:
        tokenizer: None where there is none.
        files: all that it is made of, the weights first.
        carried: those of them that travel with a converted checkpoint as they are.
        ignored: names of files beside them that nothing was read of, and that may hold more than words.
        source: format: "huggingface", "gguf" or "meta".
        architecture: its Hugging Face name, such as "LlamaForCausalLM".
    """

    assembler: Assembler | VendorAssembler
    tokenizer: TokenizerFiles | None
    files: tuple[Path, ...]
    carried: tuple[Path, ...]
    ignored: tuple[str, ...]
    source: str
    name: str
    architecture: str


def ignored_files(folder: Path, used: Iterable[Path]) -> tuple[str, ...]:
    """Names of what a folder holds beside `used`, without texts for people and hidden files; folders with a slash."""
    names = {path.name for path in used}
    others = sorted(path for path in folder.iterdir() if path.name not in names)
    return tuple(path.name + "/" * path.is_dir() for path in others if not path.name.startswith(_NOT_WORTH_A_WARNING))
