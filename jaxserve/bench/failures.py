"""Configurations of a sweep that failed as a whole, and why: a file in the folder of each, for the report."""

from __future__ import annotations

import json
import signal
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxserve.bench.json_files import read_json
from jaxserve.json_fields import from_json

_FILE = "failure.json"
_REASON_CHARACTERS = 400  # a compiler may say pages


@dataclass(frozen=True)
class Failure:
    """One configuration that failed.

    Attributes:
        reason: as the command that failed said it.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        reason = textwrap.shorten(self.reason, _REASON_CHARACTERS, placeholder=" …").rstrip(".")
        return f"{self.name} failed: {reason}."


def write_failure(folder: Path, failure: Failure) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FILE).write_text(json.dumps(asdict(failure), indent=1))


def forget_failure(folder: Path) -> None:
    """For a configuration that is tried again."""
    (folder / _FILE).unlink(missing_ok=True)


def find_failures(folder: Path) -> list[Failure]:
    """Those below a folder.

    Raises:
        ValueError: a file is not what was written there.
    """
    return [
        read_json(path, lambda data: from_json(Failure, data, ignore_unknown=True))
        for path in sorted(folder.rglob(_FILE))
    ]


def exit_reason(code: int) -> str:
    """What an exit code says, of a command that said nothing else."""
    return f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
