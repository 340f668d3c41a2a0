"""Files that change while they are converted: the manifest would tell of bytes that are not those of the weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.unfinished import unfinished_path
from jaxserve.progress import NoProgress
from tests.checkpoint.files import shard, stored, write_gguf
from tests.tiny_model import TINY_CONFIG, random_weights, write_tiny_llama

WEIGHTS = "model.safetensors"


class Changing:
    """A progress that changes a file once a share of a task's bytes was read."""

    def __init__(self, change: Callable[[], None], during: str, share: float) -> None:
        self._change, self._during, self._share = change, during, share

    @contextmanager
    def task(self, description: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        left = self._share * (total or 0) if description == self._during else float("inf")

        def advance(amount: int) -> None:
            nonlocal left
            left -= amount
            if left <= 0:
                left = float("inf")
                self._change()

        yield advance


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_tiny_llama(tmp_path / "source")
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    return folder


def overwritten(path: Path) -> None:
    """With other bytes, and as many."""
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))


def overwritten_with_its_time(path: Path) -> None:
    """As whoever writes a file in its place and sets its time back, such as `cp --preserve`."""
    times = (path.stat().st_atime, path.stat().st_mtime)
    overwritten(path)
    os.utime(path, times)


def emptied(path: Path) -> None:
    """As whoever writes a file anew does first."""
    path.write_bytes(b"")


def put_in_its_place(path: Path) -> None:
    """A file of the same size and time, as whoever copies files with their times leaves it."""
    other = path.with_name("other")
    shutil.copy2(path, other)
    overwritten_with_its_time(other)
    other.rename(path)


def assert_told(source: Path, name: str, progress: Changing, resume: bool = False) -> None:
    with pytest.raises(CheckpointError, match=f"{name} changed while it was converted: .*convert again"):
        convert(source, source.parent / "converted", progress=progress, resume=resume)
    assert not (source.parent / "converted").exists()


@pytest.mark.parametrize("during", ["Checking files", "Converting weights"])
@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("change", [overwritten, overwritten_with_its_time, emptied, put_in_its_place, Path.unlink])
@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_file_of_the_source(
    name: str, change: Callable[[Path], None], share: float, during: str, folder: Path
) -> None:
    assert_told(folder, name, Changing(lambda: change(folder / name), during, share))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["source"]


def test_the_index_of_several_files(folder: Path) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    assert_told(folder, index.name, Changing(lambda: overwritten(index), "Converting weights", 0.5))


@pytest.mark.parametrize("during", ["Checking files", "Converting weights"])
@pytest.mark.parametrize("change", [overwritten, emptied])
def test_a_gguf(change: Callable[[Path], None], during: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    path = write_gguf(tmp_path / "source" / "model.gguf", random_weights(TINY_CONFIG, 0))
    os.utime(path, (1e9, 1e9))
    progress = Changing(lambda: change(path), during, 0.5)
    with pytest.raises(CheckpointError, match=r"model\.gguf changed while it was converted"):
        convert(path, tmp_path / "converted", progress=progress)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_pickled_file_that_becomes_shorter(folder: Path) -> None:
    """It is mapped: reading on would end the process."""
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(values) for name, values in load_file(folder / WEIGHTS).items()}
    (folder / WEIGHTS).unlink()
    pickled = folder / "pytorch_model.bin"
    torch.save(tensors, pickled)
    assert_told(folder, pickled.name, Changing(lambda: emptied(pickled), "Converting weights", 0.3))


def test_what_was_read_of_other_bytes_is_not_gone_on_with(folder: Path) -> None:
    """The earlier bytes may come back, and with them their hash."""
    before = (folder / WEIGHTS).read_bytes()
    first_layer_begun = 0.3
    progress = Changing(lambda: overwritten(folder / WEIGHTS), "Converting weights", first_layer_begun)
    assert_told(folder, WEIGHTS, progress, resume=True)
    state = json.loads((unfinished_path(folder.parent / "converted") / "conversion.json").read_text())
    assert list(state["finished"]) == ["embedding"]
    (folder / WEIGHTS).write_bytes(before)
    resumed = convert(folder, folder.parent / "converted", progress=NoProgress(), resume=True)
    at_once = convert(folder, folder.parent / "at-once", progress=NoProgress())
    jax.tree.map(np.testing.assert_array_equal, stored(resumed), stored(at_once))
