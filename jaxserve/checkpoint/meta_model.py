"""Opens a folder in Meta's original layout: `params.json`, `consolidated.NN.pth`, `tokenizer.model`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jaxserve.checkpoint.assemble import Assembler
from jaxserve.checkpoint.config_values import flag, number, whole_number
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.families import LLAMA
from jaxserve.checkpoint.meta_source import MetaSource, consolidated_files
from jaxserve.checkpoint.opened_model import OpenModel, ignored_files
from jaxserve.checkpoint.tensor_names import META
from jaxserve.checkpoint.tiktoken_read import BEGIN_OF_TEXT, END_OF_MESSAGE, END_OF_TEXT, END_OF_TURN
from jaxserve.checkpoint.tokenizer_files import TokenizerFiles, TokenizerSettings, read_json
from jaxserve.checkpoint.tokenizer_read import read_model_file
from jaxserve.checkpoint.trusted_files import checked_file, has_entry
from jaxserve.config import ModelConfig, RopeScaling

logger = logging.getLogger(__name__)

_PARAMS_FILE, _TOKENIZER_FILE = "params.json", "tokenizer.model"
_LLAMA_32_SMALL = {(2048, 16), (3072, 28)}  # hidden size and layers of the 1B and the 3B


@contextlib.contextmanager
def open_meta(folder: Path, dtype: np.dtype | None) -> Iterator[OpenModel]:
    """Check all of a folder that can be told without reading the weights.

    Args:
        dtype: of the arrays it will give, but for the norms; None: as the files have them.

    Raises:
        CheckpointError: if it is incomplete, damaged or not supported, or torch is not there.
    """
    where = str(folder / _PARAMS_FILE)
    params = read_json(checked_file(folder, _PARAMS_FILE))
    for key in ("moe", "quantization_args", "vision_chunk_size", "lora_args"):
        if params.get(key) not in (None, -1):
            raise CheckpointError(f"{where}: {key}={params[key]!r} is not supported")
    tokenizer = _read_tokenizer(folder)
    hidden_size, num_heads = whole_number(params, "dim", where), whole_number(params, "n_heads", where)
    num_kv_heads = whole_number(params, "n_kv_heads", where, num_heads)
    for key, value in (("dim", hidden_size), ("n_heads", num_heads), ("n_kv_heads", num_kv_heads)):
        if value < 1:
            raise CheckpointError(f"{where}: {key}={value} must be at least 1")
    with MetaSource(folder, hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads) as source:
        config = _model_config(params, source, tokenizer.settings if tokenizer else TokenizerSettings(), where)
        files = (*consolidated_files(folder), folder / _PARAMS_FILE)
        if tokenizer is not None:
            files = (*files, folder / _TOKENIZER_FILE)
        yield OpenModel(
            assembler=Assembler.checked(source, META, config, dtype, str(folder)),
            tokenizer=tokenizer,
            files=files,
            carried=(),
            ignored=ignored_files(folder, files),
            source="meta",
            name=folder.resolve().name,
            architecture=LLAMA.architecture,
        )


def _model_config(
    params: Mapping[str, Any], source: MetaSource, settings: TokenizerSettings, where: str
) -> ModelConfig:
    gate = META.in_layer(0, "gate")
    for name in (META.embedding, gate):
        if name not in source.names() or len(source.shape(name)) != 2:
            raise CheckpointError(f"{where}: tensor {name!r} is missing: fetch the checkpoint again")
    vocab_size = whole_number(params, "vocab_size", where, -1)
    if vocab_size not in (-1, source.shape(META.embedding)[0]):  # -1, in Llama 1 and 2: the tokenizer knows
        raise CheckpointError(
            f"{where}: vocab_size={vocab_size}, but {META.embedding!r} has shape {source.shape(META.embedding)}"
        )
    theta = number(params, "rope_theta", where, 10000.0)
    num_layers = whole_number(params, "n_layers", where)
    try:
        return ModelConfig(
            vocab_size=source.shape(META.embedding)[0],
            intermediate_size=source.shape(gate)[0],
            num_layers=num_layers,
            hidden_size=source.hidden_size,
            num_heads=source.num_heads,
            num_kv_heads=source.num_kv_heads,
            head_dim=source.hidden_size // source.num_heads,
            max_position_embeddings=_context(params, theta, where),
            rms_norm_eps=number(params, "norm_eps", where, 1e-5),
            rope_theta=theta,
            rope_scaling=_rope_scaling(params, (source.hidden_size, num_layers), where),
            tie_word_embeddings=META.lm_head not in source.names(),
            eos_token_ids=settings.eos_token_ids,
            bos_token_id=settings.bos_token_id,
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _rope_scaling(params: Mapping[str, Any], size: tuple[int, int], where: str) -> RopeScaling | None:
    """Llama 3.1's; its file says only that there is one, and 3.2's small models use another factor."""
    if not flag(params, "use_scaled_rope", where):
        return None
    factor = number(params, "rope_scaling_factor", where, 32.0 if size in _LLAMA_32_SMALL else 8.0)
    return RopeScaling("llama3", factor, 1.0, number(params, "high_freq_factor", where, 4.0), 8192)


def _context(params: Mapping[str, Any], theta: float, where: str) -> int:
    """The context that a model was trained with, which `params.json` leaves unsaid."""
    if params.get("max_seq_len") is not None:
        return whole_number(params, "max_seq_len", where)
    if flag(params, "use_scaled_rope", where):
        context, meant = 131072, "Llama 3.1"
    elif theta >= 1_000_000:
        context, meant = 16384, "Code Llama"
    elif theta >= 500_000:
        context, meant = 8192, "Llama 3"
    elif params.get("norm_eps") == 1e-6:
        context, meant = 2048, "Llama 1"
    else:
        context, meant = 4096, "Llama 2"
    logger.warning("%s says no context length: taking the %d tokens of %s", where, context, meant)
    return context


def _read_tokenizer(folder: Path) -> TokenizerFiles | None:
    if not has_entry(folder, _TOKENIZER_FILE):
        return None
    text = read_model_file(checked_file(folder, _TOKENIZER_FILE), None)
    backend = tokenizers.Tokenizer.from_str(text)
    bos, eos = (BEGIN_OF_TEXT, END_OF_TEXT) if backend.token_to_id(BEGIN_OF_TEXT) is not None else ("<s>", "</s>")
    ends = (backend.token_to_id(token) for token in (eos, END_OF_MESSAGE, END_OF_TURN))
    return TokenizerFiles(
        text,
        TokenizerSettings(
            bos_token=bos,
            bos_token_id=backend.token_to_id(bos),
            eos_token=eos,
            eos_token_ids=tuple(token_id for token_id in ends if token_id is not None),
        ),
    )
