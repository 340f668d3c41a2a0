"""Which jaxserve this is."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).resolve().parents[1]
_GIT_SECONDS = 10


def version() -> str:
    """Of the installed package; "0+unknown" in a checkout that was never installed."""
    try:
        return importlib.metadata.version("jaxserve")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def git_commit(source: Path = _SOURCE) -> str | None:
    """The commit of a checkout, with "-dirty" where files of it were changed since; None: it is none, or git is not there.

    Args:
        source: folder that the package lies in.
    """
    if not (source / ".git").exists():  # a folder around an installed package may be a checkout of something else
        return None
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Of this package, for a record: "jaxserve", and "git_commit" where it is a checkout."""
    commit = git_commit()
    return {"jaxserve": version()} | ({} if commit is None else {"git_commit": commit})
