"""Converts a model into a folder that jaxserve loads, as `jaxserve convert` does: `convert_checkpoint.py SRC DST`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # usable without installing the package

import jax

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.open_model import DTYPES
from jaxserve.checkpoint.quantize import quantization_step
from jaxserve.checkpoint.source import convert_model
from jaxserve.config import Quantization
from jaxserve.progress import NoProgress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="a Hugging Face or Meta folder, a GGUF file, a known name or hf:ORG/NAME")
    parser.add_argument("destination", type=Path, help="the folder to make")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="auto", help="of the weights; auto: the source's")
    parser.add_argument("--quantization", choices=get_args(Quantization), help="what the layers' weights are made into")
    parser.add_argument("--resume", action="store_true", help="go on with what an earlier run left")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        convert_model(
            arguments.source,
            arguments.destination,
            dtype=arguments.dtype,
            step=quantization_step(arguments.quantization),
            resume=arguments.resume,
            progress=NoProgress(),
        )
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
