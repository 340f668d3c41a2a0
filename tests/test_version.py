"""Which jaxserve a record says that it is of."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from jaxserve.version import git_commit


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_checkout_and_says_where_files_were_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "--quiet")
    assert git_commit(tmp_path) is None  # there is none yet
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "--quiet", "--message", "a")
    git("tag", "v1")
    assert git_commit(tmp_path) == git("rev-parse", "HEAD")[:12]
    (tmp_path / "file").write_text("b")
    assert git_commit(tmp_path) == git("rev-parse", "HEAD")[:12] + "-dirty"
    inside = tmp_path / "site-packages"
    inside.mkdir()
    assert git_commit(inside) is None  # an installed package is of no checkout that it lies in


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit(tmp_path) is None
