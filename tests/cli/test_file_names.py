"""Names of folders that are no UTF-8, as Linux allows them: refused before anything is read or made."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.source import resolve_model
from jaxserve.cli.main import build_app
from jaxserve.progress import NoProgress
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are no such names")
NAME = os.fsdecode(b"caf\xe9")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "source", num_hidden_layers=1)


def assert_refused(named: Path, *arguments: Path | str) -> None:
    before = sorted(os.walk(os.fsencode(named.parent)))
    result = CliRunner().invoke(build_app(), [str(each) for each in arguments])
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert "caf\\udce9" in line and "is not UTF-8: rename it, or choose another one" in line
    assert sorted(os.walk(os.fsencode(named.parent))) == before


@pytest.mark.parametrize("is_link", [False, True])
def test_the_folder_that_is_read(source: Path, tmp_path: Path, is_link: bool) -> None:
    named = tmp_path / NAME
    source.rename(named)
    asked = tmp_path / "link" if is_link else named
    if is_link:
        asked.symlink_to(named)
    assert_refused(named, "convert", asked, tmp_path / "made")
    assert_refused(named, "inspect", asked)
    with pytest.raises(CheckpointError, match="is not UTF-8"):  # as `jaxserve serve` does
        resolve_model(str(asked), NoProgress())


def test_a_converted_folder_that_is_read(source: Path, tmp_path: Path) -> None:
    named = tmp_path / NAME
    convert(source, tmp_path / "converted", progress=NoProgress()).rename(named)
    assert_refused(named, "export", named, tmp_path / "made")
    assert_refused(named, "inspect", named)


def test_the_folder_that_is_made(source: Path, tmp_path: Path) -> None:
    converted = convert(source, tmp_path / "converted", progress=NoProgress())
    for named in (tmp_path / NAME, tmp_path / NAME / "made"):
        assert_refused(tmp_path / NAME, "convert", source, named)
        assert_refused(tmp_path / NAME, "export", converted, named)


def test_a_relative_path_below_such_a_folder(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / NAME
    named.mkdir()
    shutil.move(source, named / "source")
    monkeypatch.chdir(named)
    result = CliRunner().invoke(build_app(), ["convert", "source", "made"])
    assert result.exit_code == 1 and "is not UTF-8" in result.output
    assert os.listdir(named) == ["source"]
