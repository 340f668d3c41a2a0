"""Where conversion and export may write: nothing that lies elsewhere is removed, and the source is only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.export import export
from jaxserve.checkpoint.unfinished import unfinished_path
from jaxserve.progress import NoProgress
from tests.tiny_model import write_tiny_llama


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "source", num_hidden_layers=1)


@pytest.mark.parametrize("resume", [True, False])
def test_nothing_is_removed_behind_a_link(source: Path, tmp_path: Path, resume: bool) -> None:
    precious = tmp_path / "precious" / "weights"
    precious.mkdir(parents=True)
    (precious / "file").write_text("mine")
    unfinished = unfinished_path(tmp_path / "converted")
    unfinished.symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match="is a link"):
        convert(source, tmp_path / "converted", progress=NoProgress(), resume=resume)
    unfinished.unlink()
    unfinished.mkdir()
    (unfinished / "weights").symlink_to(precious)
    if resume:
        with pytest.raises(CheckpointError, match="is a link"):
            convert(source, tmp_path / "converted", progress=NoProgress(), resume=True)
    else:
        convert(source, tmp_path / "converted", progress=NoProgress())
    assert (precious / "file").read_text() == "mine"


@pytest.mark.parametrize("inside", ["converted", "a/b", "../link/converted"])
def test_nothing_is_made_inside_the_source(source: Path, tmp_path: Path, inside: str) -> None:
    (tmp_path / "link").symlink_to(source)
    before = sorted(source.rglob("*"))
    with pytest.raises(CheckpointError, match=r"lies inside .*source, which is only read"):
        convert(source, source / inside, progress=NoProgress())
    folder = convert(source, tmp_path / "converted", progress=NoProgress())
    with pytest.raises(CheckpointError, match=r"lies inside .*converted, which is only read"):
        export(folder, folder / "exported", progress=NoProgress())
    assert sorted(source.rglob("*")) == before
