"""Opens a Hugging Face folder."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoint.assemble import Assembler
from jaxserve.checkpoint.hf_config import bos_token_id_from, family_of_config, model_config_from_hf
from jaxserve.checkpoint.opened_model import OpenModel, ignored_files
from jaxserve.checkpoint.safetensors_source import (
    INDEX_FILE,
    SINGLE_FILE,
    SafetensorsSource,
    has_safetensors,
    weight_files,
)
from jaxserve.checkpoint.tokenizer_files import read_json
from jaxserve.checkpoint.tokenizer_read import eos_token_ids_from_configs, read_hf_tokenizer
from jaxserve.checkpoint.torch_source import BIN_FILE, BIN_INDEX_FILE, BinSource, bin_files
from jaxserve.checkpoint.trusted_files import check_index, checked_file, has_entry, index_counts
from jaxserve.checkpoint.vendor_assemble import VendorAssembler
from jaxserve.checkpoint.vendor_config import VendorForm, vendor_form

logger = logging.getLogger(__name__)

QUANTIZATION_FILE = "hf_quant_config.json"
# All that says what a model is, beside its weights: it travels with a converted checkpoint, and comes back on export.
SETTING_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", QUANTIZATION_FILE,
)  # fmt: skip


@contextlib.contextmanager
def open_huggingface(folder: Path, dtype: np.dtype | None) -> Iterator[OpenModel]:
    """Check all of a Hugging Face folder that can be told without reading the weights.

    Args:
        dtype: of the arrays it will give, but for the norms; None: as the files have them.

    Raises:
        CheckpointError: if it is incomplete, damaged or not supported.
    """
    config = read_json(checked_file(folder, "config.json"))
    tokenizer = read_hf_tokenizer(folder)
    settings = tokenizer.settings if tokenizer else None
    where = str(folder / "config.json")
    model_config = model_config_from_hf(
        config,
        eos_token_ids=settings.eos_token_ids if settings else eos_token_ids_from_configs(folder),
        bos_token_id=settings.bos_token_id if settings else bos_token_id_from(config, where),
        where=where,
    )
    family = family_of_config(config, where)
    form = _form(folder, config)
    carried = tuple(checked_file(folder, name) for name in SETTING_FILES if has_entry(folder, name))
    weights, source = _weights(folder, integers=form is not None)
    with source:
        files = (*weights, *carried)
        checked = (source, family.names, model_config, dtype, str(folder))
        assembler = Assembler.checked(*checked) if form is None else VendorAssembler.checked(*checked, form)
        yield OpenModel(
            assembler=assembler,
            tokenizer=tokenizer,
            files=files,
            carried=carried,
            ignored=ignored_files(folder, (*files, *folder.glob("*.index.json"))),
            source="huggingface",
            name=folder.resolve().name,
            architecture=family.architecture,
        )


def _form(folder: Path, config: Mapping[str, Any]) -> VendorForm | None:
    """How the weights are quantized, if they are: config.json says it, or a file of its own (modelopt's first versions)."""
    if "quantization_config" in config or not has_entry(folder, QUANTIZATION_FILE):
        return vendor_form(config, str(folder / "config.json"))
    path = checked_file(folder, QUANTIZATION_FILE)
    return vendor_form({"quantization_config": {"quant_method": "modelopt", **read_json(path)}}, str(path))


def _weights(folder: Path, *, integers: bool) -> tuple[list[Path], SafetensorsSource | BinSource]:
    """Safetensors where there are some; pickled weights otherwise. With all files that they lie in, and their index."""
    if not has_safetensors(folder) and (pickled := bin_files(folder)):
        source = BinSource(pickled, integers=integers)
        index = _index(folder, BIN_FILE, BIN_INDEX_FILE)
        if index:
            check_index(folder, BIN_INDEX_FILE, source.file_names())
        return [*pickled, *index], source
    index = _index(folder, SINGLE_FILE, INDEX_FILE)
    return [*weight_files(folder), *index], SafetensorsSource(folder, integers=integers)


def _index(folder: Path, single_file: str, name: str) -> list[Path]:
    """The index, where it says which files hold the weights. One that does not is told."""
    if index_counts(folder, name, single_file):
        return [checked_file(folder, name)]
    if has_entry(folder, name):
        logger.warning("%s: the weights are those of %s, not of the files of %s", folder, single_file, name)
    return []
