"""What memory the machine, or the container, has for programs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.host_memory import available_host_bytes


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """Directories like /proc and /sys/fs/cgroup, of a machine most of whose memory holds a file that was read."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 5000 kB\nHugePages_Total: 0\n")
    return proc, cgroup


def limit(group: Path, most: str, used: int, of_files: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon {used - of_files}\nactive_file 7\ninactive_file {of_files}\n")


def test_what_holds_files_that_were_read_can_be_had(machine: tuple[Path, Path]) -> None:
    assert available_host_bytes(*machine) == 5000 * 1024


def test_a_container_has_what_its_limit_leaves(machine: tuple[Path, Path]) -> None:
    _, cgroup = machine
    limit(cgroup, "max", 1000)
    assert available_host_bytes(*machine) == 5000 * 1024
    limit(cgroup, "3000", 2500, of_files=1500)
    assert available_host_bytes(*machine) == 2000
    limit(cgroup, "3000", 3100)
    assert available_host_bytes(*machine) == 0


def test_a_service_has_what_the_narrowest_of_its_groups_leaves(machine: tuple[Path, Path]) -> None:
    proc, cgroup = machine
    (proc / "self" / "cgroup").write_text("4:memory:/elsewhere\n0::/system.slice/model.service\n")
    limit(cgroup / "system.slice", "4000", 1000)
    limit(cgroup / "system.slice" / "model.service", "3500", 900)
    assert available_host_bytes(*machine) == 2600
    limit(cgroup / "system.slice", "4000", 3000)  # by others in it
    assert available_host_bytes(*machine) == 1000


def test_where_nothing_says_what_is_available_unused_pages_are_counted(tmp_path: Path, monkeypatch: Any) -> None:
    pages = {"SC_AVPHYS_PAGES": 3, "SC_PHYS_PAGES": 8, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert available_host_bytes(tmp_path, tmp_path) == 3 * 4096
    monkeypatch.delitem(os.sysconf_names, "SC_AVPHYS_PAGES")
    assert available_host_bytes(tmp_path, tmp_path) == 8 * 4096
