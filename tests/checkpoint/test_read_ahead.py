"""Files that the system reads before they are asked for."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from jaxserve.checkpoint.read_ahead import reading_ahead

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")
MEBIBYTES = 9


class Advice:
    """What the system was asked to read, in place of asking it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.changed = threading.Condition()
        monkeypatch.setattr(os, "posix_fadvise", self)

    def __call__(self, descriptor: int, start: int, count: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        with self.changed:
            self.asked.append((f"{path.parent.name}/{path.name}", start, count))
            self.changed.notify_all()

    def wait_for(self, file: str) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: any(file == name for name, *_ in self.asked), timeout=20)

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(name for name, *_ in self.asked))


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("c", "a", "b")]
    for folder in made:
        folder.mkdir()
        (folder / "data").write_bytes(bytes(MEBIBYTES << 20))
    return made


def test_some_ahead_in_the_order_that_is_given(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    advice = Advice(monkeypatch)
    with reading_ahead(folders, 1) as done_with_one:
        assert advice.wait_for("c/data")
        done_with_one()
        assert advice.wait_for("a/data")
        assert advice.files == ["c/data", "a/data"]
    assert advice.files == ["c/data", "a/data"]


def test_the_whole_of_a_file_is_asked_for(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    advice = Advice(monkeypatch)
    with reading_ahead(folders, 3):
        assert advice.wait_for("b/data")
    of_first = [(start, count) for name, start, count in advice.asked if name == "c/data"]
    assert [start for start, _ in of_first] == list(range(0, MEBIBYTES << 20, of_first[0][1]))


def test_what_cannot_be_read_is_left_to_whoever_needs_it(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    advice = Advice(monkeypatch)
    (folders[0] / "data").unlink()
    (folders[0] / "gone").symlink_to("nowhere")
    with reading_ahead([Path("/nowhere"), *folders], 4):
        assert advice.wait_for("b/data")
    assert advice.files == ["a/data", "b/data"]


def test_it_ends_with_its_body(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    Advice(monkeypatch)
    with pytest.raises(KeyError), reading_ahead(folders, 0):
        raise KeyError
    assert "jaxserve-read-ahead" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.timeout(30)
def test_it_ends_where_folders_are_missing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), reading_ahead([tmp_path / str(number) for number in range(9)], 2):
        raise KeyError


def test_without_advice_nothing_happens(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise")
    with reading_ahead(folders, 3) as done_with_one:
        done_with_one()
        assert "jaxserve-read-ahead" not in {thread.name for thread in threading.enumerate()}
