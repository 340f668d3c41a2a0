"""Opens a model in whatever format it comes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import jinja2
import numpy as np

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.hf_model import open_huggingface
from jaxserve.checkpoint.manifest import is_converted
from jaxserve.checkpoint.opened_model import OpenModel
from jaxserve.checkpoint.tensor_source import BFLOAT16
from jaxserve.checkpoint.token_ids import check_token_ids
from jaxserve.checkpoint.tokenizer_files import TokenizerFiles, error_line
from jaxserve.checkpoint.trusted_files import has_entry
from jaxserve.models.presets import preset_config
from jaxserve.template_sandbox import SandboxedTemplate, TemplateLimits

logger = logging.getLogger(__name__)

DTYPES: dict[str, np.dtype | None] = {
    "auto": None,
    "float32": np.dtype(np.float32),
    "bfloat16": BFLOAT16,
    "float16": np.dtype(np.float16),
}

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt")


@contextlib.contextmanager
def open_model(path: Path, dtype: str = "auto") -> Iterator[OpenModel]:
    """Open a model and check all that can be told without reading its weights, and without starting a JAX backend.

    A chat template that is not valid is told in a warning: the weights are none the worse for it.

    Args:
        path: a Hugging Face folder, a folder in Meta's layout (`params.json`), or a GGUF file.
        dtype: of the arrays it will give, but for the norms; "auto": as the file has them (quantized: float32).

    Raises:
        CheckpointError: if it is none of them, or incomplete, damaged or not supported.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"{dtype=} must be one of {', '.join(DTYPES)}")
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if is_converted(path):
        raise CheckpointError(
            f"{path} is a converted checkpoint already: convert what it was made from, or what `jaxserve export` gives "
            "back of it; `jaxserve serve --quantization` quantizes it as it is loaded"
        )
    if path.is_file():
        _refuse_file_of_a_folder(path)
        from jaxserve.checkpoint.gguf_model import open_gguf  # here: its library is only for such files

        opened = open_gguf(path, DTYPES[dtype])
    elif has_entry(path, "config.json"):
        opened = open_huggingface(path, DTYPES[dtype])
    elif has_entry(path, "params.json"):
        from jaxserve.checkpoint.meta_model import open_meta  # here: it needs torch, an extra

        opened = open_meta(path, DTYPES[dtype])
    else:
        raise CheckpointError(
            f"{path} is no model: it has neither config.json (Hugging Face) nor params.json (Meta) nor jaxserve.json "
            "(converted)"
        )
    with opened as model:
        check_token_ids(model.assembler.config, model.tokenizer, str(path))
        _warn_of_template(model.tokenizer, path)
        yield model


def architecture_error(model: str) -> CheckpointError:
    """For what has a model's sizes and no weights, named where weights are wanted."""
    return CheckpointError(
        f"{model} is an architecture, without weights: random weights are for `jaxserve bench` and `jaxserve profile` only; "
        "give a folder with weights or a GGUF file"
    )


def _refuse_file_of_a_folder(path: Path) -> None:
    """Raises CheckpointError for what is called as JSON or a folder's weights are, unless it is a GGUF file all the same."""
    if path.suffix not in (".json", *_WEIGHT_SUFFIXES):
        return
    with path.open("rb") as file:
        if file.read(4) == b"GGUF":
            return
    if path.suffix in _WEIGHT_SUFFIXES:
        raise CheckpointError(
            f"{path} is one file of a model: give the folder that it lies in, {path.absolute().parent}"
        )
    try:
        preset_config(str(path))
    except ValueError as error:
        raise CheckpointError(
            f"{path} is JSON, and holds no weights: give the folder that does, or a GGUF file"
        ) from error
    raise architecture_error(str(path))


def _warn_of_template(tokenizer: TokenizerFiles | None, path: Path) -> None:
    if tokenizer is None or tokenizer.settings.chat_template is None:
        return
    try:
        SandboxedTemplate(tokenizer.settings.chat_template, TemplateLimits())
    except jinja2.TemplateError as error:
        logger.warning(
            "%s: its chat template is not valid (%s), and a server of it will not start: mend it there, and convert then",
            path,
            error_line(error),
        )
