"""Where conversion and export may write: nothing that lies elsewhere is removed, and the source is only read."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxserve.checkpoint import unfinished
from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.export import export
from jaxserve.checkpoint.unfinished import unfinished_path
from jaxserve.progress import NoProgress, Progress
from tests.tiny_model import write_tiny_llama


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "source", num_hidden_layers=1)


@pytest.mark.parametrize("resume", [True, False])
def test_nothing_is_removed_behind_a_link(source: Path, tmp_path: Path, resume: bool) -> None:
    precious = tmp_path / "precious" / "weights"
    precious.mkdir(parents=True)
    (precious / "file").write_text("mine")
    left = unfinished_path(tmp_path / "converted")
    left.symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match="is a link"):
        convert(source, tmp_path / "converted", progress=NoProgress(), resume=resume)
    left.unlink()
    left.mkdir()
    (left / "weights").symlink_to(precious)
    if resume:
        with pytest.raises(CheckpointError, match="is a link"):
            convert(source, tmp_path / "converted", progress=NoProgress(), resume=True)
    else:
        convert(source, tmp_path / "converted", progress=NoProgress())
    assert (precious / "file").read_text() == "mine"


class Interrupting:
    """A progress that is interrupted when the first weights are written."""

    @contextmanager
    def task(self, description: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        def advance(amount: int) -> None:
            if description in ("Converting weights", "Writing tensors"):
                raise KeyboardInterrupt

        yield advance


@pytest.fixture(params=["convert", "export"])
def make(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Callable[[Progress], Path]:
    """Conversion or export to `made`, told of its progress."""
    if request.param == "convert":
        return lambda progress: convert(source, tmp_path / "made", progress=progress)
    folder = convert(source, tmp_path / "converted", progress=NoProgress())
    return lambda progress: export(folder, tmp_path / "made", progress=progress)


def test_what_a_kill_leaves_is_removed_by_the_next(
    make: Callable[[Progress], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(tmp_path.iterdir())
    with monkeypatch.context() as killed:
        killed.setattr(unfinished, "remove_after_failure", lambda path: None)
        with pytest.raises(KeyboardInterrupt):
            make(Interrupting())
    (left,) = set(tmp_path.iterdir()) - before
    (left / "half").write_text("a file")
    made = make(NoProgress())
    assert set(tmp_path.iterdir()) - before == {made}
    assert not (made / "half").exists()


def test_an_interrupt_counts_more_than_what_cannot_be_removed(
    make: Callable[[Progress], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(KeyboardInterrupt):
        make(Interrupting())
    assert "partial is left, and may be removed (Directory not empty)" in caplog.text


def test_two_that_make_the_same_are_told(make: Callable[[Progress], Path]) -> None:
    class Meanwhile(Interrupting):
        @contextmanager
        def task(self, description: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
            if description in ("Converting weights", "Writing tensors"):
                with pytest.raises(CheckpointError, match=r"another process is making .*made: wait for it"):
                    make(NoProgress())
            yield lambda amount: None

    assert make(Meanwhile()).is_dir()


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


@pytest.mark.parametrize("name", ["x" * 300, "x" * 250, f"{'x' * 300}/converted", "x/" * 3000 + "x"], ids=len)
def test_a_name_that_is_too_long_is_told_before_anything_is_read(source: Path, tmp_path: Path, name: str) -> None:
    (source / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="too long a name, choose a shorter one"):
        convert(source, tmp_path / name, progress=NoProgress())
