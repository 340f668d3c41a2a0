"""Opens a GGUF file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxserve.checkpoint.assemble import Assembler
from jaxserve.checkpoint.families import family_of_model
from jaxserve.checkpoint.gguf_config import eos_token_ids_from_gguf, model_config_from_gguf
from jaxserve.checkpoint.gguf_source import GGUFFile
from jaxserve.checkpoint.gguf_tokenizer import read_gguf_tokenizer
from jaxserve.checkpoint.opened_model import OpenModel


@contextlib.contextmanager
def open_gguf(path: Path, dtype: np.dtype | None) -> Iterator[OpenModel]:
    """Check all of a GGUF file that can be told without reading the weights.

    Args:
        dtype: of the arrays it will give, but for the norms; None: as the file has them (quantized: float32).

    Raises:
        CheckpointError: if it is damaged or not supported.
    """
    with GGUFFile(path) as file:
        tokenizer = read_gguf_tokenizer(file)
        model_config = model_config_from_gguf(
            file,
            eos_token_ids=tokenizer.settings.eos_token_ids if tokenizer else eos_token_ids_from_gguf(file),
            bos_token_id=tokenizer.settings.bos_token_id if tokenizer else None,
        )
        yield OpenModel(
            assembler=Assembler.checked(file, file.family.gguf_names, model_config, dtype, str(path)),
            tokenizer=tokenizer,
            files=(path,),
            carried=(),
            ignored=(),
            source="gguf",
            name=path.stem,
            architecture=family_of_model(model_config).architecture,
        )
