"""How much memory the machine has for programs, or the container that this one runs in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Bytes that programs can still have without anything being swapped.

    What the system keeps of files that were read counts as available: it is given up as soon as a program wants memory, and
    after a checkpoint was read it may be most of the machine's.
    """
    return max(0, min([_available_on_machine(proc), *_left_in_container(proc, cgroup)]))


def _available_on_machine(proc: Path) -> int:
    try:
        return _numbers(proc / "meminfo")["MemAvailable:"] * 1024
    except (OSError, LookupError):  # no Linux: what is left are pages that nobody uses at all, where they are counted
        unused = "SC_AVPHYS_PAGES" in os.sysconf_names
        return os.sysconf("SC_AVPHYS_PAGES" if unused else "SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_container(proc: Path, cgroup: Path) -> Iterator[int]:
    """What this process's control group (version 2), and each one around it, may still use."""
    for folder in _control_groups(proc, cgroup):
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            files = _numbers(folder / "memory.stat").get("inactive_file", 0)
        except OSError:  # none that limits memory
            continue
        if limit != "max":
            yield int(limit) - max(0, used - files)


def _control_groups(proc: Path, cgroup: Path) -> list[Path]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    group = cgroup / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(cgroup)]


def _numbers(path: Path) -> dict[str, int]:
    """A file of lines with a name, a number and perhaps its unit."""
    words = (line.split() for line in path.read_text().splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) > 1}
