"""Writes a converted checkpoint as a Hugging Face folder, as `jaxserve export` does: `export_checkpoint.py SRC DST`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # usable without installing the package

import jax

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.export import export
from jaxserve.progress import NoProgress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a folder that convert_checkpoint.py made")
    parser.add_argument("destination", type=Path, help="the folder to make")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        export(arguments.source, arguments.destination, progress=NoProgress())
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
